"""FP8 KV cache: stored values are rounded to e4m3, and attention uses the rounded values."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_tools import in_triton
from test_attention_kernels import (
    H200_SHARED,
    PAGE_SIZE,
    NewTokens,
    Sequences,
    dense_attention,
    forget_before,
    make_new_tokens,
    make_sequences,
    rotated,
)
from test_fp8_linear import conversions_of_fp8  # noqa: F401, applies here too
from triton.runtime.interpreter import InterpretedFunction

from meltcore.kernels.attention import blocks
from meltcore.kernels.attention.decode import DecodeLaunch, decode_attention, decode_launch
from meltcore.kernels.attention.kv_cache import store_kv
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms, make_query_tiles
from meltcore.kernels.attention.prefill import prefill_attention
from meltcore.kernels.attention.stream_k import StreamK
from meltcore.kernels.fp8.fp8 import FP8, FP8_MAX
from meltcore.kernels.rotary import rotary_table

HEADS, KV_HEADS, PROMPT = 4, 2, 100
PAGES = [3, 1]  # of the one sequence; page 0 is for padding, page 2 is free


@triton.jit
def evens_and_odds_in_triton(pairs):  # type: ignore[no-untyped-def]
    evens = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    odds = (pairs >> 8 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return evens, odds


@pytest.fixture(autouse=True)
def machine_instructions(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter has no inline assembly."""
    if device.type == "cpu":
        monkeypatch.setattr(blocks, "evens_and_odds", InterpretedFunction(evens_and_odds_in_triton.fn))


@triton.jit
def evens_and_odds_kernel(pairs, evens, odds, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    even, odd = blocks.evens_and_odds(tl.load(pairs + index))
    tl.store(evens + index, even)
    tl.store(odds + index, odd)


@pytest.mark.gpu
def test_evens_and_odds_of_every_pair(device: torch.device) -> None:
    pairs = torch.arange(2**16, device=device).to(torch.int16)
    evens, odds = torch.empty(2, 2**16, dtype=torch.float16, device=device)
    evens_and_odds_kernel[(64,)](pairs, evens, odds, COUNT=1024)
    expected = pairs.view(FP8).to(torch.float16).view(-1, 2)
    torch.testing.assert_close(torch.stack((evens, odds), 1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "window"),
    [
        (torch.bfloat16, 256, None),
        (torch.float32, 64, None),
        (torch.bfloat16, 128, 20),
        (torch.bfloat16, 256, 65),
    ],
)
@pytest.mark.usefixtures("implementation")
def test_attention_uses_the_rounded_values_of_an_fp8_cache(
    dtype: torch.dtype, head_dim: int, window: int | None, device: torch.device
) -> None:
    """A prompt and one new token, each with a value beyond the range of e4m3, which saturates."""
    torch.manual_seed(0)
    qkv = torch.randn(PROMPT + 1, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)
    qkv[7, -1], qkv[PROMPT, -2] = 500.0, -1e4
    norms = HeadNorms((torch.rand(head_dim) + 0.5).to(dtype), (torch.rand(head_dim) + 0.5).to(dtype), 1e-6)
    rotary, positions = rotary_table(head_dim, 128, 10_000.0, torch.device("cpu")), torch.arange(PROMPT + 1)
    slots = torch.tensor(PAGES)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    heads = qkv.unflatten(-1, (-1, head_dim))
    queries = rotated(heads[:, :HEADS], norms.query, rotary, positions)
    keys = rotated(heads[:, HEADS : HEADS + KV_HEADS], norms.key, rotary, positions)
    held_keys = keys.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).float()
    held_values = heads[:, HEADS + KV_HEADS :].float().clamp(-FP8_MAX, FP8_MAX).to(FP8).float()

    caches = [torch.zeros(4, PAGE_SIZE, KV_HEADS, head_dim, dtype=FP8, device=device) for _ in range(2)]
    table = torch.tensor([[0, 0, 0], [*PAGES, 0]], device=device)
    given, at = qkv.to(device), positions.to(device)
    there = HeadNorms(norms.query.to(device), norms.key.to(device), norms.eps)
    params = AttentionParams(there, rotary.to(device), *caches, head_dim**-0.5, window)
    store_kv(given[:PROMPT], params, at[:PROMPT], slots[:PROMPT].to(device))
    tiles = torch.from_numpy(make_query_tiles([(1, 0, PROMPT, 0)])).int().to(device)
    out = torch.zeros(PROMPT + 1, HEADS, head_dim, dtype=dtype, device=device)
    prefill_attention(given[:PROMPT], params, table, tiles, out=out[:PROMPT])
    window_out = torch.zeros_like(out[:PROMPT])
    tiles = torch.from_numpy(make_query_tiles([(1, PROMPT - 4, 4, PROMPT - 4)])).int().to(device)
    prefill_attention(given[:PROMPT], params, table, tiles, out=window_out, max_queries=4)
    row = torch.ones(1, dtype=torch.int64, device=device)
    launch = few_splits(1, 2, head_dim)
    decode_attention(given[PROMPT:], params, at[PROMPT:], table, row, out=out[PROMPT:], launch=launch)

    cached = [cache.cpu().flatten(0, 1).float()[slots] for cache in caches]
    for found, held in zip(cached, (held_keys, held_values), strict=True):
        # A key that was rounded to bfloat16 twice on its way may lie next to another boundary of e4m3.
        assert (found != held).double().mean() < 0.05
        torch.testing.assert_close(found, held, rtol=0.13, atol=0.02)
    assert found[7, -1, -1] == FP8_MAX
    assert found[PROMPT, -1, -2] == -FP8_MAX
    expected = dense_attention(queries, *cached, 0, head_dim**-0.5, window)
    assert (out.cpu().double() - expected).norm() <= 1e-2 * expected.norm()
    last = expected[PROMPT - 4 : PROMPT]
    assert (window_out[-4:].cpu().double() - last).norm() <= 1e-2 * last.norm()


def few_splits(sequences: int, splits: int, head_dim: int) -> DecodeLaunch:
    """The launch for the given numbers of sequences and KV splits."""
    return decode_launch(sequences, KV_HEADS, head_dim, 1, 640, 132, H200_SHARED)._replace(splits=splits)


DECODES = [
    # group, kv_heads, head_dim, lengths with the new token, sequences and splits of the launch, sliding window
    (2, 2, 64, [1, 64, 65, 130], (1000, 1), None),
    (3, 1, 128, [200, 2], (1000, 2), None),
    (8, 1, 256, [65, 300], (1000, 1), None),
    (8, 1, 256, [20, 130], (1, 4), None),
    (2, 2, 128, [1, 64, 129], (12, 4), None),
    (2, 2, 128, [33, 130, 64], StreamK(5, 2), None),
    (3, 1, 64, [300, 1, 65], StreamK(4, 1), None),
    (2, 1, 256, [300, 20], (1000, 1), 100),
    (2, 1, 256, [300, 20], (1, 4), 130),
    (2, 2, 128, [33, 230, 64], StreamK(5, 2), 65),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "lengths", "launch", "window"),
    DECODES,
    ids=[
        f"{group}x{kv_heads}x{head_dim}, {launch}, {window}" for group, kv_heads, head_dim, _, launch, window in DECODES
    ],
)
def test_every_decode_launch_attends_to_every_number_of_e4m3(
    group: int,
    kv_heads: int,
    head_dim: int,
    lengths: list[int],
    launch: tuple[int, int] | StreamK,
    window: int | None,
    device: torch.device,
) -> None:
    """Values are random bytes. What no sequence owns is NaN, and so is the slot of the new token."""
    torch.manual_seed(31)
    made = make_sequences(lengths, kv_heads, head_dim, torch.float16, device)
    given = make_new_tokens(made, group, normed=True)
    if window is not None:
        forget_before(made, given.positions.tolist(), window)
    caches = made.key_cache.to(FP8), with_random_bytes(made.value_cache)
    params = given.params._replace(key_cache=caches[0], value_cache=caches[1], sliding_window=window)
    if not isinstance(launch, StreamK):
        sequences, splits = launch
        launch = decode_launch(sequences, kv_heads, head_dim, 1, 640, 132, H200_SHARED)._replace(splits=splits)
    out = torch.full_like(given.queries, 6e4)
    for _ in range(2):  # the second launch finds the counters of arrivals as the first one did
        in_triton(decode_attention)(given.qkv, params, *given[2:5], out=out, launch=launch)
    expected = [dense_to_cached(made, given, caches, index, window) for index in range(len(lengths))]
    for found, wanted in zip(out.double(), torch.cat(expected), strict=True):
        assert (found - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("sequences", [1, 8, 12])
def test_few_sequences_in_fp8_have_as_many_bytes_in_flight(sequences: int, head_dim: int) -> None:
    in_fp8, wide = (
        decode_launch(sequences, 8, head_dim, element_bytes, 640, 132, H200_SHARED) for element_bytes in (1, 2)
    )
    assert (in_fp8.splits, in_fp8.warps) == (wide.splits, wide.warps)
    assert (in_fp8.stages - 1) * in_fp8.block_keys == 2 * (wide.stages - 1) * wide.block_keys


def with_random_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Random finite numbers of e4m3 instead of the finite ones; the others become NaN."""
    finite = torch.arange(256, dtype=torch.uint8)
    finite = finite[finite & 0x7F != 0x7F].to(cache.device)
    chosen = finite[torch.randint(len(finite), cache.shape, device=cache.device)]
    return torch.where(cache.isnan(), torch.tensor(0x7F, dtype=torch.uint8, device=cache.device), chosen).view(FP8)


def dense_to_cached(
    made: Sequences, given: NewTokens, caches: tuple[torch.Tensor, torch.Tensor], index: int, window: int | None
) -> torch.Tensor:
    """Attention of one sequence's new token to what the caches hold for it, which includes that token's own."""
    last = int(given.positions[index])
    positions = torch.arange(last + 1, device=caches[0].device)
    slots = made.page_table[made.rows[index], positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    keys, values = (cache.flatten(0, 1).float()[slots] for cache in caches)
    oldest = 0 if window is None else max(0, last - window + 1)
    assert not keys[oldest:].isnan().any()
    assert not values[oldest:].isnan().any()
    torch.testing.assert_close(values[last], given.values[index].to(FP8).float(), rtol=0, atol=0)
    torch.testing.assert_close(keys[last], given.keys[index].to(FP8).float(), rtol=0.13, atol=0.02)
    query, scale = given.queries[index : index + 1], made.key_cache.shape[-1] ** -0.5
    return dense_attention(query, keys, values, last, scale, window)
