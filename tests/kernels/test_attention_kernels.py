"""Paged attention, decode and prefill: both implementations against a dense softmax, on shuffled page tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.attention import prefill, windows
from meltcore.kernels.attention.decode import DecodeLaunch, decode_attention, decode_launch
from meltcore.kernels.attention.metadata import BLOCK_QUERIES, AttentionParams, HeadNorms, make_query_tiles
from meltcore.kernels.attention.prefill import prefill_attention
from meltcore.kernels.attention.split_kv import arrival_counters
from meltcore.kernels.attention.stream_k import MAX_SEQUENCES, StreamK, decode_stream_k, stream_k_for
from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.rotary import rotary_table

PAGE_SIZE = 64
H200_SHARED = 227 * 2**10
POISON = 7e4
# ||out - dense|| / ||dense||, by type: rounding of the inputs of the second dot and of the output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Sequences(NamedTuple):
    """A paged cache, and the same keys and values as plain [length, kv_heads, head_dim] tensors."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_sequences(
    lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Sequences:
    """Pages and rows in random order. What no sequence owns is NaN, so reading past an end shows."""
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    total = sum(counts) + 1
    caches = torch.full((2, total, PAGE_SIZE, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    table = torch.zeros(len(lengths) + 1, max(counts) + 3, dtype=torch.int64, device=device)
    rows = torch.randperm(len(lengths) + 1, device=device)[: len(lengths)]
    free = (torch.randperm(total - 1, device=device) + 1).tolist()
    keys, values = [], []
    for length, count, row in zip(lengths, counts, rows.tolist(), strict=True):
        pages = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages, dtype=torch.int64, device=device)
        both = torch.randn(2, length, kv_heads, head_dim, device=device).to(dtype)
        for index, page in enumerate(pages):
            part = both[:, index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            caches[:, page, : part.shape[1]] = part
        keys.append(both[0])
        values.append(both[1])
    return Sequences(caches[0], caches[1], table, rows, keys, values)


def dense_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """An independent implementation, head by head, in float64."""
    group = queries.shape[1] // keys.shape[1]
    out = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    for query in range(queries.shape[0]):
        end = start + query + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(queries.shape[1]):
            scores = keys[seen, head // group].double() @ queries[query, head].double() * scale
            out[query, head] = scores.softmax(0) @ values[seen, head // group].double()
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    distance = (out.double() - expected).norm() / expected.norm()
    assert distance <= TOLERANCE[dtype], f"relative distance {distance:.2e}"


DECODE_SHAPES = [
    # group, kv_heads, head_dim, splits, dtype, lengths with the new token
    (1, 2, 64, 1, torch.float32, [1, 63, 64, 65]),
    (2, 2, 128, 4, torch.float32, [1, 129, 700]),
    (2, 1, 128, 4, torch.bfloat16, [64, 257, 2]),
    (4, 1, 64, None, torch.float16, [200, 5]),
    (8, 1, 64, 2, torch.bfloat16, [130, 1]),
    (2, 1, 256, 2, torch.bfloat16, [70]),
    (32, 1, 64, 2, torch.float32, [70]),
    (2, 1, 64, 32, torch.float32, [64 * 20 + 1]),
    (3, 1, 64, 4, torch.float32, [200]),
]
EPS = 1e-6


class NewTokens(NamedTuple):
    """The inputs of a decode step, and the same queries, keys and values as plain [sequences, heads, head_dim]."""

    qkv: torch.Tensor
    params: AttentionParams
    positions: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def make_new_tokens(made: Sequences, group: int, normed: bool) -> NewTokens:
    """The last token of each sequence as a QKV projection, part of wider rows; its slot in the cache is NaN."""
    dtype, device = made.key_cache.dtype, made.key_cache.device
    _, _, kv_heads, head_dim = made.key_cache.shape
    positions = torch.tensor([len(keys) - 1 for keys in made.keys], device=device)
    heads = group * kv_heads
    projected = torch.randn(len(positions), heads + 2 * kv_heads + 1, head_dim, device=device).to(dtype)
    split = projected[:, :-1]
    rotary = rotary_table(head_dim, int(positions.max()) + 1, 10_000.0, device)
    weights = torch.randn(2, head_dim, device=device).to(dtype)
    norms = HeadNorms(weights[0], weights[1], EPS) if normed else None
    queries = rotated(split[:, :heads], norms and norms.query, rotary, positions)
    keys = rotated(split[:, heads:-kv_heads], norms and norms.key, rotary, positions)
    values = split[:, -kv_heads:]
    for i, position in enumerate(positions.tolist()):
        made.keys[i][position], made.values[i][position] = keys[i], values[i]
        page = made.page_table[made.rows[i], position // PAGE_SIZE]
        made.key_cache[page, position % PAGE_SIZE] = made.value_cache[page, position % PAGE_SIZE] = float("nan")
    params = AttentionParams(norms, rotary, made.key_cache, made.value_cache, head_dim**-0.5)
    return NewTokens(split.flatten(1), params, positions, made.page_table, made.rows, queries, keys, values)


def rotated(
    heads: torch.Tensor, weight: torch.Tensor | None, rotary: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """An independent norm and rotation, with complex numbers in float64, rounded once."""
    wide = heads.double()
    if weight is not None:
        wide = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    half = heads.shape[-1] // 2
    angles = torch.complex(rotary[:, :half].double(), rotary[:, half:].double())[positions][:, None]
    both = torch.complex(wide[..., :half], wide[..., half:]) * angles
    return torch.cat((both.real, both.imag), -1).to(heads.dtype)


def forget_before(made: Sequences, first_queries: list[int], window: int) -> None:
    """Make NaN what no query from these positions on sees, and point the page-table entries before it to such a page.

    No sequence owns page 0, so it is NaN already. Other pages before a window are given back and used anew.
    """
    for index, (row, first) in enumerate(zip(made.rows.tolist(), first_queries, strict=True)):
        oldest = max(0, first - window + 1)
        for position in range(oldest):
            page = made.page_table[row, position // PAGE_SIZE]
            made.key_cache[page, position % PAGE_SIZE] = made.value_cache[page, position % PAGE_SIZE] = float("nan")
        made.keys[index][:oldest] = made.values[index][:oldest] = float("nan")
        made.page_table[row, : oldest // PAGE_SIZE] = 0


def launch_of(made: Sequences, splits: int | None) -> DecodeLaunch | None:
    """The decode launch of these sequences with the given KV splits; None for the default launch."""
    (_, _, *sizes), device = made.key_cache.shape, made.key_cache.device
    given = len(made.keys), *sizes, made.key_cache.element_size(), made.page_table.shape[1]
    launch = decode_launch(*given, sm_count(device), shared_memory_bytes(device))
    return None if splits is None else launch._replace(splits=splits)


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("seed", [11])
@pytest.mark.parametrize(("group", "kv_heads", "head_dim", "splits", "dtype", "lengths"), DECODE_SHAPES)
def test_decode_equals_dense_softmax(
    group: int,
    kv_heads: int,
    head_dim: int,
    splits: int | None,
    dtype: torch.dtype,
    lengths: list[int],
    normed: bool,
    seed: int,
    device: torch.device,
) -> None:
    torch.manual_seed(seed)
    made = make_sequences(lengths, kv_heads, head_dim, dtype, device)
    given = make_new_tokens(made, group, normed)
    out = torch.full_like(given.queries, POISON if dtype != torch.float16 else 6e4)
    launch = launch_of(made, splits)
    before = made.key_cache.clone(), made.value_cache.clone()
    for _ in range(2):  # the second launch finds the counters of arrivals as the first one did
        returned = decode_attention(*given[:5], out=out, launch=launch)
    assert returned is out
    expected = [
        dense_attention(given.queries[i : i + 1], made.keys[i], made.values[i], length - 1, head_dim**-0.5)
        for i, length in enumerate(lengths)
    ]
    assert_close(out, torch.cat(expected), dtype)
    stored = torch.zeros(before[0].shape[:2], dtype=torch.bool)
    for i, position in enumerate(given.positions.tolist()):
        cache_index = made.page_table[made.rows[i], position // PAGE_SIZE], position % PAGE_SIZE
        assert_close(made.key_cache[cache_index], given.keys[i].double(), dtype)
        assert torch.equal(made.value_cache[cache_index], given.values[i])
        stored[cache_index] = True
    for cache, earlier in zip(made[:2], before, strict=True):
        torch.testing.assert_close(cache.cpu()[~stored], earlier.cpu()[~stored], rtol=0, atol=0, equal_nan=True)


def test_prefetched_splits_give_the_same(device: torch.device) -> None:
    """Splits that end within, at and after their first block; one has the new token alone."""
    torch.manual_seed(13)
    made = make_sequences([20, 64, 65, 129, 700], 2, 64, torch.float32, device)
    given = make_new_tokens(made, group=2, normed=True)
    out = torch.full_like(given.queries, POISON)
    launch = launch_of(made, 4)
    assert launch is not None
    in_triton(decode_attention)(*given[:5], out=out, launch=launch._replace(prefetch=True))
    for i, keys in enumerate(made.keys):
        expected = dense_attention(given.queries[i : i + 1], keys, made.values[i], len(keys) - 1, 0.125)
        assert_close(out[i : i + 1], expected, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "dtype", "lengths", "launch"),
    [
        (2, 2, 64, torch.float32, [20, 64, 65, 129, 700], StreamK(3, 1)),
        (2, 1, 64, torch.float32, [700, 1, 2, 64, 300], StreamK(7, 1)),
        (3, 1, 64, torch.float32, [64 * 30], StreamK(11, 1)),  # one sequence in all work ranges
        (2, 4, 64, torch.float32, [20, 64, 65, 300], StreamK(5, 2)),
        (3, 2, 64, torch.float32, [33, 31, 130], StreamK(4, 2)),  # rows of the tile left over
        (2, 2, 128, torch.bfloat16, [1, 128, 500], StreamK(1, 2)),
        (2, 8, 128, torch.bfloat16, [17, 8, 9, 200], StreamK(7, 8)),
        (2, 2, 64, torch.float16, [65, 30], StreamK(40, 2)),  # more work ranges than blocks
    ],
)
def test_stream_k_gives_the_same_wherever_sequences_are_split(
    group: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    lengths: list[int],
    launch: StreamK,
    device: torch.device,
) -> None:
    """A padding row yields zeros; arrival counters are zero again for a second launch."""
    torch.manual_seed(14)
    made = make_sequences(lengths, kv_heads, head_dim, dtype, device)
    given = make_new_tokens(made, group, normed=True)
    qkv = torch.cat((given.qkv[:1], given.qkv))
    positions = torch.cat((torch.tensor([-1], device=device), given.positions))
    spare = made.page_table.shape[0] * (made.page_table.shape[0] - 1) // 2 - made.rows.sum()
    made.page_table[spare] = 2**40
    rows = torch.cat((spare[None], made.rows))
    out = qkv.new_full((len(qkv), *given.queries.shape[1:]), 6e4)
    for _ in range(2):
        in_triton(decode_attention)(
            qkv, given.params, positions, made.page_table, rows, out=out.fill_(6e4), launch=launch
        )
    assert (out[0] == 0).all()
    for i, keys in enumerate(made.keys):
        expected = dense_attention(given.queries[i : i + 1], keys, made.values[i], len(keys) - 1, head_dim**-0.5)
        assert_close(out[i + 1 : i + 2], expected, dtype)
    assert not arrival_counters(device).any()


def test_stream_k_is_for_neither_few_nor_many_sequences() -> None:
    cpu = torch.device("cpu")
    found = {count: stream_k_for(count, 16, 8, 128, cpu) for count in (1, 16, 17, 100, 128, 129, 1000)}
    assert [count for count, launch in found.items() if launch] == [17, 100, 128]
    assert found[17] == found[100] == found[128], "as many work ranges as run concurrently, however many sequences"
    many = torch.empty(129, 1, 64)
    params = AttentionParams(None, many, *[torch.empty(1, 64, 1, 64)] * 2, 1.0)
    with pytest.raises(ValueError, match="129 sequences"):
        decode_stream_k(many, params, many, many, many, many, StreamK(3, 1))


@pytest.mark.parametrize(("heads", "kv_heads", "key_heads"), [(16, 8, 2), (64, 8, 2), (64, 4, 1), (9, 3, 1)])
def test_work_range_has_two_key_heads_where_their_queries_fit_one_tile(
    heads: int, kv_heads: int, key_heads: int
) -> None:
    """There are as many programs either way."""
    assert stream_k_for(MAX_SEQUENCES, heads, kv_heads, 64, torch.device("cpu")) == (
        132 * key_heads // kv_heads,
        key_heads,
    )


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("splits", [1, 4])
def test_outputs_of_padding_are_zeros_and_its_pages_are_not_read(splits: int, device: torch.device) -> None:
    torch.manual_seed(12)
    made = make_sequences([100], 2, 64, torch.float32, device)
    given = make_new_tokens(made, group=2, normed=True)
    # If a padding row's page were looked up, its number would be far outside the cache.
    made.page_table[made.page_table.shape[0] - 1 - made.rows[0]] = 2**40
    spare = (made.page_table.shape[0] - 1 - made.rows[:1]).expand(2)
    out = decode_attention(
        given.qkv.repeat(3, 1),
        given.params,
        torch.tensor([99, -1, -1], device=device),
        made.page_table,
        torch.cat((made.rows, spare)),
        launch=launch_of(made, splits),
    )
    assert (out[1:] == 0).all()
    assert_close(out[:1], dense_attention(given.queries[:1], made.keys[0], made.values[0], 99, 0.125), torch.float32)


# group, kv_heads, head_dim, dtype, chunks as (start, tokens)
PrefillShape = tuple[int, int, int, torch.dtype, list[tuple[int, int]]]
PREFILL_SHAPES: list[PrefillShape] = [
    (1, 2, 64, torch.float32, [(0, 1), (0, 65), (63, 2)]),
    (2, 1, 128, torch.float32, [(5, 70), (64, 64)]),
    (2, 2, 128, torch.bfloat16, [(0, 130), (127, 3)]),
    (4, 1, 64, torch.float16, [(70, 33), (0, 64)]),
    (8, 1, 64, torch.bfloat16, [(128, 10)]),
    (2, 1, 256, torch.bfloat16, [(3, 66)]),
]
PACKABLE = [shape for shape in PREFILL_SHAPES if shape[0] % 2 == 0 and shape[2] <= 128 and shape[3].itemsize == 2]


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("seed", [21])
@pytest.mark.parametrize("shape", PREFILL_SHAPES, ids=str)
def test_prefill_equals_dense_causal_softmax(
    shape: PrefillShape, normed: bool, seed: int, device: torch.device
) -> None:
    torch.manual_seed(seed)
    assert_prefill_is_dense(*shape, normed=normed, device=device)


# As PrefillShape: windows of one token and of several, at the first position and across ends of pages.
WINDOW_SHAPES: list[PrefillShape] = [
    (1, 2, 64, torch.float32, [(0, 1), (0, 4), (62, 4), (200, 3)]),
    (8, 1, 64, torch.bfloat16, [(63, 1), (64, 4), (300, 2)]),
    (3, 2, 64, torch.float16, [(130, 4), (1, 2)]),
    (2, 1, 256, torch.bfloat16, [(97, 8), (15, 3)]),  # two blocks per page
]


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("sms", [1, 8, 132])  # whole sequences, some splits of several pages, and one per page
@pytest.mark.parametrize("shape", WINDOW_SHAPES, ids=str)
def test_windows_equal_dense_causal_softmax(
    shape: PrefillShape, sms: int, implementation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(sms)
    monkeypatch.setattr(windows, "sm_count", lambda _: sms)
    monkeypatch.delattr(prefill, "_prefill_kernel")
    most = max(count for _, count in shape[4])
    for normed, max_queries in ((True, most), (False, 8)):
        assert_prefill_is_dense(*shape, normed=normed, device=device, max_queries=max_queries)
    assert (arrival_counters(device) == 0).all()


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("window", [1, 64, 100])
def test_windows_with_a_sliding_window(
    window: int, implementation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(window)
    monkeypatch.setattr(windows, "sm_count", lambda _: 8)
    monkeypatch.delattr(prefill, "_prefill_kernel")
    chunks = [(0, 4), (62, 4), (99, 3), (300, 4)]
    shape = (2, 2, 64, torch.float32, chunks)
    assert_prefill_is_dense(*shape, normed=True, device=device, window=window, max_queries=4)
    for off in (-1, 1):
        with pytest.raises(AssertionError, match="relative distance"):
            assert_prefill_is_dense(
                *(2, 2, 64, torch.float32, [(300, 4)]),
                normed=False,
                device=device,
                window=65,
                kernel_window=65 + off,
                max_queries=4,
            )


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("shape", PACKABLE, ids=str)
def test_two_heads_of_a_group_packed_in_one_program(
    shape: PrefillShape, normed: bool, implementation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(22)
    monkeypatch.setattr(prefill, "select_launch", lambda *_: prefill.PACKED_PAIRS)
    assert_prefill_is_dense(*shape, normed=normed, device=device)


@pytest.mark.parametrize(
    ("arch", "kv_heads", "head_dim", "tiles", "packed_heads"),
    [
        (90, 8, 128, 34, 2),
        (90, 8, 128, 33, 1),
        (90, 8, 64, 34, 2),
        (90, 16, 128, 34, 1),
        (90, 8, 256, 34, 1),
        (80, 8, 128, 34, 1),
    ],
)
def test_heads_are_packed_where_there_are_many_tiles(
    arch: int, kv_heads: int, head_dim: int, tiles: int, packed_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "capability", lambda _: arch)
    monkeypatch.setattr(prefill, "sm_count", lambda _: 132)
    cache = torch.empty(1, 64, kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
    launch = prefill.select_launch(cache[0, 0], cache, 16, tiles)
    assert launch.packed_heads == packed_heads
    in_fp8 = cache.to(torch.float8_e4m3fn)
    assert prefill.select_launch(cache[0, 0], in_fp8, 16, tiles).packed_heads == 1


def assert_prefill_is_dense(
    group: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    chunks: list[tuple[int, int]],
    *,
    normed: bool,
    device: torch.device,
    window: int | None = None,
    kernel_window: int | None = None,
    max_queries: int = BLOCK_QUERIES,
) -> None:
    """For random tokens: those that a tile covers; the others are left as they were.

    kernel_window: what the kernel is given instead of `window`, where they differ.
    """
    made = make_sequences([start + count for start, count in chunks], kv_heads, head_dim, dtype, device)
    if window is not None:
        forget_before(made, [start for start, _ in chunks], window)
    # Tokens of other calls are before, between and after; the queries are part of wider rows.
    ends = np.cumsum([count + 1 for _, count in chunks]).tolist()
    heads = group * kv_heads
    projected = torch.randn(ends[-1] + 1, heads + 2 * kv_heads + 1, head_dim, device=device).to(dtype)
    split = projected[:, :-1]
    rotary = rotary_table(head_dim, max(start + count for start, count in chunks), 10_000.0, device)
    weight = torch.randn(head_dim, device=device).to(dtype)
    norms = HeadNorms(weight, weight, EPS) if normed else None
    first_tokens = [end - count for end, (_, count) in zip(ends, chunks, strict=True)]
    rows = made.rows.tolist()
    tiles = make_query_tiles((row, f, n, s) for row, f, (s, n) in zip(rows, first_tokens, chunks, strict=True))
    tiles = np.concatenate([tiles, np.zeros((2, 4), np.int32)])  # padding
    out = torch.full((ends[-1] + 1, heads, head_dim), 6e4, dtype=dtype, device=device)
    poison = out[0].clone()
    caches = made.key_cache, made.value_cache
    params = AttentionParams(norms, rotary, *caches, head_dim**-0.5, kernel_window or window)
    given = split.flatten(1), params, made.page_table, torch.from_numpy(tiles).to(device)
    prefill_attention(*given, out=out, max_queries=max_queries)
    covered = torch.zeros(len(out), dtype=torch.bool)
    for i, (first, (start, count)) in enumerate(zip(first_tokens, chunks, strict=True)):
        span = slice(first, first + count)
        positions = torch.arange(start, start + count, device=device)
        queries = rotated(split[span, :heads], norms and norms.query, rotary, positions)
        expected = dense_attention(queries, made.keys[i], made.values[i], start, head_dim**-0.5, window)
        assert_close(out[span], expected, dtype)
        covered[span] = True
    assert (out[~covered] == poison).all()


def test_query_tiles_cover_every_token_once_and_start_with_most_keys() -> None:
    chunks = [(3, 0, 1, 500), (1, 1, BLOCK_QUERIES, 0), (4, 1 + BLOCK_QUERIES, 2 * BLOCK_QUERIES + 5, 7)]
    tiles = make_query_tiles(chunks)
    assert tiles.dtype == np.int32
    assert tiles[:, 2].max() == BLOCK_QUERIES
    ends = tiles[:, 2] + tiles[:, 3]
    assert (np.diff(ends) <= 0).all()
    found = sorted((row, first + i, start + i) for row, first, count, start in tiles.tolist() for i in range(count))
    assert found == sorted((row, first + i, start + i) for row, first, count, start in chunks for i in range(count))


def test_query_tiles_of_an_empty_step() -> None:
    assert make_query_tiles([]).shape == (0, 4)


def test_tile_with_more_queries_than_promised_is_refused() -> None:
    made = make_sequences([5], 1, 64, torch.float32, torch.device("cpu"))
    params = AttentionParams(
        None, rotary_table(64, 5, 10_000.0, torch.device("cpu")), made.key_cache, made.value_cache, 1.0
    )
    tiles = torch.tensor([[int(made.rows[0]), 0, 5, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match="a tile of 5 queries; at most 4 were promised"):
        prefill_attention(torch.randn(5, 3 * 64), params, made.page_table, tiles, max_queries=4)


@pytest.mark.usefixtures("implementation")
def test_prefill_without_tiles_and_decode_without_sequences(device: torch.device) -> None:
    made = make_sequences([1], 1, 64, torch.float32, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    params = AttentionParams(None, rotary_table(64, 1, 10_000.0, device), made.key_cache, made.value_cache, 1.0)
    empty = torch.randn(0, 4 * 64, device=device)
    assert decode_attention(empty, params, none, made.page_table, none).shape == (0, 2, 64)
    tiles = torch.empty(0, 4, dtype=torch.int32, device=device)
    assert prefill_attention(empty, params, made.page_table, tiles).shape == (0, 2, 64)


@pytest.mark.parametrize("shared_bytes", [99 * 2**10, 163 * 2**10, H200_SHARED])
@pytest.mark.parametrize("sms", [1, 46, 132, 170])
@pytest.mark.parametrize("sequences", [1, 2, 10, 64, 256, 1000, 4096])
def test_decode_grid_is_bounded_and_a_power_of_two(sequences: int, sms: int, shared_bytes: int) -> None:
    launch = decode_launch(sequences, 8, 128, 2, 640, sms, shared_bytes)
    assert launch.splits & (launch.splits - 1) == 0
    assert launch.splits * sequences * 8 <= max(64 * sms, sequences * 8)
    assert 1 <= launch.split_pages <= 32


def test_few_sequences_leave_few_sm_slots_empty() -> None:
    """Two programs of four stages or three of three run on an SM of an H200; one of three on consumer GPUs."""
    found = {n: decode_launch(n, 8, 128, 2, 640, 132, H200_SHARED) for n in (1, 2, 8, 12, 16)}
    assert {n: (launch.splits, launch.stages) for n, launch in found.items()} == {
        1: (32, 4),
        2: (16, 4),
        8: (4, 4),
        12: (4, 3),
        16: (2, 4),
    }
    assert decode_launch(1, 8, 128, 2, 640, 128, 99 * 2**10).stages == 3


def test_short_page_table_is_split_no_further_than_its_pages() -> None:
    assert decode_launch(1, 8, 128, 2, 3, 132, H200_SHARED).splits == 2
