"""Attention with a sliding window: both implementations against a dense softmax over the window's keys.

Keys before a window are NaN and page-table entries before it point to a page of NaN, so reading them shows. A query at
position i sees keys i - W + 1 to i.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_tools import in_triton
from test_attention_kernels import (
    PAGE_SIZE,
    POISON,
    assert_close,
    assert_prefill_is_dense,
    dense_attention,
    forget_before,
    launch_of,
    make_new_tokens,
    make_sequences,
)

from meltcore.kernels.attention import decode, prefill, stream_k
from meltcore.kernels.attention.decode import DecodeLaunch, decode_attention
from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.attention.prefill import PACKED_PAIRS, prefill_attention
from meltcore.kernels.attention.stream_k import StreamK
from meltcore.kernels.rotary import rotary_table

WINDOWS = [1, 63, 64, 65, 100, 4096]
EDGES = [1, 63, 64, 65, 4096]  # beside a page of 64 tokens; a division that others resemble has two of them
LENGTHS = [1, 64, 65, 100, 101, 128, 300]
# group, kv_heads, head_dim, splits or StreamK, dtype
DECODES: list[tuple[int, int, int, int | StreamK | None, torch.dtype]] = [
    (2, 1, 64, 1, torch.float32),
    (2, 2, 64, 4, torch.float32),
    (2, 1, 256, 4, torch.bfloat16),  # two blocks per page
    (2, 1, 128, None, torch.bfloat16),
    (2, 2, 64, StreamK(3, 1), torch.float32),
    (2, 2, 64, StreamK(7, 2), torch.float32),
    (2, 2, 128, StreamK(40, 2), torch.bfloat16),  # more work ranges than blocks
]


def decode_distance_is_small(
    group: int,
    kv_heads: int,
    head_dim: int,
    launch: int | StreamK | None,
    dtype: torch.dtype,
    window: int,
    device: torch.device,
    *,
    lengths: list[int] = LENGTHS,
    kernel_window: int | None = None,
) -> None:
    """Assert that decode is dense attention, and zeros for a row of padding, whose page table is not read."""
    made = make_sequences(lengths, kv_heads, head_dim, dtype, device)
    given = make_new_tokens(made, group, normed=True)
    forget_before(made, given.positions.tolist(), window)
    spare = made.page_table.shape[0] * (made.page_table.shape[0] - 1) // 2 - made.rows.sum()
    made.page_table[spare] = 2**40
    params = given.params._replace(sliding_window=kernel_window or window)
    division = launch if isinstance(launch, StreamK) else launch_of(made, launch)
    qkv = torch.cat((given.qkv[:1], given.qkv))
    positions = torch.cat((torch.tensor([-1], device=device), given.positions))
    rows = torch.cat((spare[None], made.rows))
    out = qkv.new_full((len(qkv), *given.queries.shape[1:]), POISON)
    for _ in range(2):  # the second launch finds the counters of arrivals as the first one did
        decode_attention(qkv, params, positions, made.page_table, rows, out=out.fill_(POISON), launch=division)
    assert (out[0] == 0).all()
    scale = head_dim**-0.5
    for i, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
        expected = dense_attention(given.queries[i : i + 1], keys, values, len(keys) - 1, scale, window)
        assert_close(out[i + 1 : i + 2], expected, dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", DECODES[:1] + DECODES[2:3], ids=str)
def test_decode_equals_dense_softmax_over_the_window(
    shape: tuple[int, int, int, int | StreamK | None, torch.dtype], window: int, device: torch.device
) -> None:
    torch.manual_seed(window)
    decode_distance_is_small(*shape, window, device)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        *((shape, window) for shape in (DECODES[1], DECODES[5]) for window in EDGES),
        *((shape, window) for shape in (DECODES[3], DECODES[4], DECODES[6]) for window in (64, 65)),
    ],
    ids=str,
)
def test_every_division_of_a_decode_step_attends_to_the_window(
    shape: tuple[int, int, int, int | StreamK | None, torch.dtype],
    window: int,
    implementation: str,
    device: torch.device,
) -> None:
    torch.manual_seed(window)
    decode_distance_is_small(*shape, window, device)


@pytest.mark.parametrize("prefetch", [False, True])
def test_splits_start_at_the_window_with_and_without_prefetch(prefetch: bool, device: torch.device) -> None:
    """Also where a split has the new token alone."""
    torch.manual_seed(41)
    made = make_sequences([129, 130, 200, 700], 1, 64, torch.float32, device)
    given = make_new_tokens(made, group=2, normed=False)
    forget_before(made, given.positions.tolist(), 129)
    launch = DecodeLaunch(splits=4, split_pages=1, block_keys=64, warps=4, stages=3, prefetch=prefetch)
    out = in_triton(decode_attention)(
        *(given.qkv, given.params._replace(sliding_window=129), *given[2:5]), launch=launch
    )
    for i, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
        expected = dense_attention(given.queries[i : i + 1], keys, values, len(keys) - 1, 0.125, 129)
        assert_close(out[i : i + 1], expected, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("launch", [1, 4, StreamK(7, 2)], ids=str)
def test_decode_with_a_window_off_by_one_is_noticed(
    launch: int | StreamK, off: int, implementation: str, device: torch.device
) -> None:
    torch.manual_seed(42)
    with pytest.raises(AssertionError, match="relative distance"):
        decode_distance_is_small(*(2, 2, 64, launch, torch.float32, 65, device), lengths=[300], kernel_window=65 + off)


# group, kv_heads, head_dim, dtype, chunks as (start, tokens)
PREFILLS: list[tuple[int, int, int, torch.dtype, list[tuple[int, int]]]] = [
    (2, 1, 64, torch.float32, [(0, 1), (63, 70), (190, 64)]),
    (2, 1, 256, torch.bfloat16, [(0, 66), (150, 40)]),  # two blocks per page
    (2, 2, 128, torch.bfloat16, [(127, 3), (200, 100)]),
]


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", PREFILLS, ids=str)
def test_prefill_equals_dense_causal_softmax_over_the_window(
    shape: tuple[int, int, int, torch.dtype, list[tuple[int, int]]], window: int, device: torch.device
) -> None:
    torch.manual_seed(window)
    assert_prefill_is_dense(*shape, normed=True, device=device, window=window)


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("window", [1, 100, 129])
def test_two_heads_of_a_group_packed_see_the_window(
    window: int, implementation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(window)
    monkeypatch.setattr(prefill, "select_launch", lambda *_: PACKED_PAIRS)
    assert_prefill_is_dense(*PREFILLS[2], normed=True, device=device, window=window)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("chunk", [(200, 1), (200, 64), (64, 30)], ids=str)
def test_prefill_with_a_window_off_by_one_is_noticed(chunk: tuple[int, int], off: int, device: torch.device) -> None:
    torch.manual_seed(43)
    with pytest.raises(AssertionError, match="relative distance"):
        assert_prefill_is_dense(
            *(2, 1, 64, torch.float32, [chunk]), normed=False, device=device, window=65, kernel_window=65 + off
        )


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 64, 65, 100, 1000])
@pytest.mark.parametrize("launch", [1, 4, StreamK(3, 1)], ids=str)
def test_decode_computes_the_blocks_of_the_window_alone(
    launch: int | StreamK, window: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("counts the calls of the interpreted kernel")
    lengths = [1, 64, 65, 700]
    made = make_sequences(lengths, 1, 64, torch.float32, device)
    given = make_new_tokens(made, group=2, normed=False)
    blocks = counted_blocks(monkeypatch)
    division = launch if isinstance(launch, StreamK) else launch_of(made, launch)
    params = given.params._replace(sliding_window=window)
    in_triton(decode_attention)(*(given.qkv, params, *given[2:5]), launch=division)
    # The new token comes from the projection, so a block that it begins is computed only for it to be attended to.
    spans = [(max(0, length - window) // PAGE_SIZE, -(-length // PAGE_SIZE)) for length in lengths]
    expected = sum(end - begin for begin, end in spans)
    assert expected - 2 <= len(blocks) <= expected


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (65, 2), (128, 3), (300, 3), (1000, 4)])
def test_splits_divide_the_pages_of_the_window(
    window: int, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position 699 is on page 10. With 300 keys, 5 pages and a part are two pages per split."""
    if device.type == "cuda":
        pytest.skip("counts the calls of the interpreted kernel")
    made = make_sequences([700], 1, 64, torch.float32, device)
    given = make_new_tokens(made, group=2, normed=False)
    begun = []
    begin_split = decode.begin_split

    def counted(*args: Any) -> Any:
        begun.append(args)
        return begin_split(*args)

    monkeypatch.setattr(decode, "begin_split", counted)
    launch = DecodeLaunch(splits=4, split_pages=1, block_keys=64, warps=4, stages=3, prefetch=False)
    in_triton(decode_attention)(*(given.qkv, given.params._replace(sliding_window=window), *given[2:5]), launch=launch)
    assert len(begun) == splits


def test_one_work_range_writes_no_partial_outputs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence's window is in one work range, so there is nothing to combine."""
    if device.type == "cuda":
        pytest.skip("replaces a function of the interpreted kernel")
    made = make_sequences([700, 1, 200], 1, 64, torch.float32, device)
    given = make_new_tokens(made, group=2, normed=False)
    monkeypatch.setattr(stream_k, "finish_split", lambda *_: pytest.fail("a split"))
    params = given.params._replace(sliding_window=100)
    out = in_triton(decode_attention)(*(given.qkv, params, *given[2:5]), launch=StreamK(1, 1))
    for i, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
        expected = dense_attention(given.queries[i : i + 1], keys, values, len(keys) - 1, 0.125, 100)
        assert_close(out[i : i + 1], expected, torch.float32)


@pytest.mark.parametrize(
    ("window", "edge", "whole"),
    [
        (40, 2, 0),  # from key 601: blocks 18 and 19 of 32 keys, and those of the queries themselves, 20 and 21
        (100, 3, 1),  # from key 541; the last query from 604, so all see block 19 whole
        (257, 2, 6),
        (4096, 0, 20),
    ],
)
def test_prefill_computes_the_blocks_of_the_window_alone(
    window: int, edge: int, whole: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one tile, the queries 640 to 703. Blocks that every query sees whole are not masked."""
    if device.type == "cuda":
        pytest.skip("counts the calls of the interpreted kernel")
    blocks = counted_blocks(monkeypatch)
    torch.manual_seed(44)
    shape = 1, 1, 64, torch.float32, [(640, 64)]
    in_triton(assert_prefill_is_dense)(*shape, normed=False, device=device, window=window)
    assert blocks == [True] * edge + [False] * whole + [True, True]


def counted_blocks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each block that the kernels attend to from here on is masked."""
    blocks: list[bool] = []
    for module in (decode, stream_k, prefill):
        attend_block = module.attend_block

        def counted(*args: Any, attend_block: Any = attend_block, **kwargs: Any) -> Any:
            blocks.append(kwargs["MASKED"])
            return attend_block(*args, **kwargs)

        monkeypatch.setattr(module, "attend_block", counted)
    return blocks


def layer(window: int | None, device: torch.device) -> AttentionParams:
    cache = torch.zeros(3, PAGE_SIZE, 1, 64, device=device)
    return AttentionParams(None, rotary_table(64, 4, 10_000.0, device), cache, cache, 1.0, window)


@pytest.mark.parametrize("window", [*WINDOWS, 1024])
def test_window_spans_at_most_this_many_pages(window: int) -> None:
    pages = [
        position // PAGE_SIZE - max(0, position - window + 1) // PAGE_SIZE + 1 for position in range(window + PAGE_SIZE)
    ]
    params = layer(window, torch.device("cpu"))
    assert params.max_query_pages(640) == max(pages)
    assert params.max_query_pages(2) == min(2, max(pages))
    assert params._replace(sliding_window=None).max_query_pages(640) == 640


@pytest.mark.parametrize(("window", "splits"), [(None, 32), (1024, 16), (65, 2), (1, 1)])
def test_decode_is_split_no_further_than_the_pages_of_the_window(window: int | None, splits: int) -> None:
    """One sequence of one key head would have as many splits as may be."""
    out, table = torch.empty(1, 2, 64), torch.zeros(1, 640, dtype=torch.int64)
    launch = decode._select_launch(out, layer(window, torch.device("cpu")), table)
    assert isinstance(launch, DecodeLaunch)
    assert launch.splits == splits


@pytest.mark.parametrize("window", [0, -1])
def test_window_without_the_query_itself_is_refused(window: int, device: torch.device) -> None:
    params, qkv = layer(window, device), torch.zeros(1, 4 * 64, device=device)
    index = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=f"a sliding window of {window}; a query sees at least 1 key"):
        in_triton(decode_attention)(qkv, params, index[0], index, index[0])
    with pytest.raises(ValueError, match=f"a sliding window of {window}; a query sees at least 1 key"):
        in_triton(prefill_attention)(qkv, params, index, torch.zeros(1, 4, dtype=torch.int32, device=device))
