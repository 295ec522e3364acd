"""A cache in FP8: what is stored is the nearest that e4m3 holds, and attention is to what is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from test_attention_kernels import (  # noqa: F401, the fixture applies here too
    H200_SHARED,
    PAGE_SIZE,
    NewTokens,
    Sequences,
    dense_attention,
    interpreter_of_loops_and_dots,
    make_new_tokens,
    make_sequences,
    turned,
)
from test_fp8_kernels import conversions_of_fp8  # noqa: F401, this one too
from triton.runtime.interpreter import InterpretedFunction

from meltcore.kernels import attend as attend_file
from meltcore.kernels import decode_attention as decode_file
from meltcore.kernels import prefill_attention as prefill_file
from meltcore.kernels import qkv as qkv_file
from meltcore.kernels.attention import query_tiles
from meltcore.kernels.decode_lanes import Lanes, decode_in_lanes
from meltcore.kernels.fp8 import FP8, LARGEST
from meltcore.kernels.qkv import HeadNorms
from meltcore.kernels.rotary import rotary_table

HEADS, KV_HEADS, PROMPT = 4, 2, 100
PAGES = [3, 1]  # of the one sequence; page 0 is for padding, page 2 nobody's

BODIES = {
    "torch": (qkv_file._store_kv_torch, prefill_file._prefill_torch, decode_file._decode_torch),
    "triton": (qkv_file._store_kv_triton, prefill_file._prefill_triton, decode_file._decode_triton),
}


@triton.jit
def evens_and_odds_in_triton(pairs):  # type: ignore[no-untyped-def]
    evens = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    odds = (pairs >> 8 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return evens, odds


@pytest.fixture(autouse=True)
def machine_instructions(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter knows none."""
    if device.type == "cpu":
        monkeypatch.setattr(attend_file, "evens_and_odds", InterpretedFunction(evens_and_odds_in_triton.fn))


@triton.jit
def taken_apart_kernel(pairs, evens, odds, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    even, odd = attend_file.evens_and_odds(tl.load(pairs + index))
    tl.store(evens + index, even)
    tl.store(odds + index, odd)


@pytest.mark.gpu
def test_machine_instructions_take_every_pair_apart(device: torch.device) -> None:
    pairs = torch.arange(2**16, device=device).to(torch.int16)
    evens, odds = torch.empty(2, 2**16, dtype=torch.float16, device=device)
    taken_apart_kernel[(64,)](pairs, evens, odds, COUNT=1024)
    expected = pairs.view(FP8).to(torch.float16).view(-1, 2)
    torch.testing.assert_close(torch.stack((evens, odds), 1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 64)]
)
@pytest.mark.parametrize("body", BODIES)
def test_attention_is_to_what_an_fp8_cache_holds(
    body: str, dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    """A prompt and one new token, of which one value lies beyond the range of e4m3 and is held as its largest."""
    torch.manual_seed(0)
    store, prefill, decode = BODIES[body]
    qkv = torch.randn(PROMPT + 1, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)
    qkv[7, -1], qkv[PROMPT, -2] = 500.0, -1e4
    norms = HeadNorms((torch.rand(head_dim) + 0.5).to(dtype), (torch.rand(head_dim) + 0.5).to(dtype), 1e-6)
    rotary, positions = rotary_table(head_dim, 128, 10_000.0, torch.device("cpu")), torch.arange(PROMPT + 1)
    slots = torch.tensor(PAGES)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    heads = qkv.unflatten(-1, (-1, head_dim))
    queries = turned(heads[:, :HEADS], norms.query, rotary, positions)
    keys = turned(heads[:, HEADS : HEADS + KV_HEADS], norms.key, rotary, positions)
    held_keys = keys.float().clamp(-LARGEST, LARGEST).to(FP8).float()
    held_values = heads[:, HEADS + KV_HEADS :].float().clamp(-LARGEST, LARGEST).to(FP8).float()

    caches = [torch.zeros(4, PAGE_SIZE, KV_HEADS, head_dim, dtype=FP8, device=device) for _ in range(2)]
    table = torch.tensor([[0, 0, 0], [*PAGES, 0]], device=device)
    given, there = qkv.to(device), HeadNorms(norms.query.to(device), norms.key.to(device), norms.eps)
    turns, at = rotary.to(device), positions.to(device)
    store(given[:PROMPT], there, turns, at[:PROMPT], slots[:PROMPT].to(device), *caches)
    tiles = torch.from_numpy(query_tiles([(1, 0, PROMPT, 0)])).int().to(device)
    out = torch.zeros(PROMPT + 1, HEADS, head_dim, dtype=dtype, device=device)
    prefill(given[:PROMPT], there, turns, *caches, table, tiles, head_dim**-0.5, out[:PROMPT])
    row = torch.ones(1, dtype=torch.int64, device=device)
    decode(given[PROMPT:], there, turns, at[PROMPT:], *caches, table, row, head_dim**-0.5, out[PROMPT:], 2)

    cached = [cache.cpu().flatten(0, 1).float()[slots] for cache in caches]
    for found, held in zip(cached, (held_keys, held_values), strict=True):
        # A key that was rounded to bfloat16 twice on its way may lie next to another boundary of e4m3.
        assert (found != held).double().mean() < 0.05
        torch.testing.assert_close(found, held, rtol=0.13, atol=0.02)
    assert found[7, -1, -1] == LARGEST
    assert found[PROMPT, -1, -2] == -LARGEST
    expected = dense_attention(queries, *cached, 0, head_dim**-0.5)
    assert (out.cpu().double() - expected).norm() <= 1e-2 * expected.norm()


class Decode(NamedTuple):
    """How a decode step is launched: `launch` is given the tensors and the scale, and fills `out`."""

    name: str
    launch: Callable[..., None]


def whole(splits: int, sequences: int) -> Decode:
    """As for so many sequences."""

    def launch(*given: object, out: torch.Tensor) -> None:
        kv_heads, head_dim = given[4].shape[2:]
        form = decode_file.decode_launch(sequences, kv_heads, head_dim, 1, 640, 132, H200_SHARED)
        decode_file._decode_triton(*given, out, splits, form)

    return Decode(f"{splits} of {sequences}", launch)


def in_lanes(number: int, key_heads: int) -> Decode:
    def launch(*given: object, out: torch.Tensor) -> None:
        decode_in_lanes(*given, out, Lanes(number, key_heads))

    return Decode(f"{number} lanes", launch)


DECODES = [
    # group, kv_heads, head_dim, lengths with the new token
    (2, 2, 64, [1, 64, 65, 130], whole(1, 1000)),
    (3, 1, 128, [200, 2], whole(2, 1000)),
    (8, 1, 256, [65, 300], whole(1, 1000)),
    (8, 1, 256, [20, 130], whole(4, 1)),
    (2, 2, 128, [1, 64, 129], whole(4, 12)),
    (2, 2, 128, [33, 130, 64], in_lanes(5, 2)),
    (3, 1, 64, [300, 1, 65], in_lanes(4, 1)),
]


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "lengths", "decode"),
    DECODES,
    ids=[f"{group}x{kv_heads}x{head_dim}, {decode.name}" for group, kv_heads, head_dim, _, decode in DECODES],
)
def test_every_form_of_decode_attends_to_every_number_of_e4m3(
    group: int,
    kv_heads: int,
    head_dim: int,
    lengths: list[int],
    decode: Decode,
    device: torch.device,
) -> None:
    """Values are random bytes. What no sequence owns is NaN, the place of the new token too."""
    torch.manual_seed(31)
    made = make_sequences(lengths, kv_heads, head_dim, torch.float16, device)
    given = make_new_tokens(made, group, normed=True)
    caches = made.key_cache.to(FP8), with_random_bytes(made.value_cache)
    out = torch.full_like(given.queries, 6e4)
    for _ in range(2):  # the second launch finds the counters of arrivals as the first one did
        decode.launch(*given[:4], *caches, made.page_table, made.rows, head_dim**-0.5, out=out)
    expected = [dense_to_cached(made, given, caches, index) for index in range(len(lengths))]
    for found, wanted in zip(out.double(), torch.cat(expected), strict=True):
        assert (found - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("sequences", [1, 8, 12])
def test_few_sequences_in_fp8_have_as_many_bytes_on_their_way(sequences: int, head_dim: int) -> None:
    in_fp8, wide = (
        decode_file.decode_launch(sequences, 8, head_dim, element_bytes, 640, 132, H200_SHARED)
        for element_bytes in (1, 2)
    )
    assert (in_fp8.splits, in_fp8.warps) == (wide.splits, wide.warps)
    assert (in_fp8.stages - 1) * in_fp8.block_keys == 2 * (wide.stages - 1) * wide.block_keys


def with_random_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Finite numbers of e4m3, all equally likely, in the place of finite ones."""
    finite = torch.arange(256, dtype=torch.uint8)
    finite = finite[finite & 0x7F != 0x7F].to(cache.device)
    chosen = finite[torch.randint(len(finite), cache.shape, device=cache.device)]
    return torch.where(cache.isnan(), torch.tensor(0x7F, dtype=torch.uint8, device=cache.device), chosen).view(FP8)


def dense_to_cached(
    made: Sequences, given: NewTokens, caches: tuple[torch.Tensor, torch.Tensor], index: int
) -> torch.Tensor:
    """Attention of one sequence's new token to what the caches hold for it, which includes that token's own."""
    last = int(given.positions[index])
    positions = torch.arange(last + 1, device=caches[0].device)
    slots = made.page_table[made.rows[index], positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    keys, values = (cache.flatten(0, 1).float()[slots] for cache in caches)
    assert not keys.isnan().any()
    assert not values.isnan().any()
    torch.testing.assert_close(values[last], given.values[index].to(FP8).float(), rtol=0, atol=0)
    torch.testing.assert_close(keys[last], given.keys[index].to(FP8).float(), rtol=0.13, atol=0.02)
    return dense_attention(given.queries[index : index + 1], keys, values, last, made.key_cache.shape[-1] ** -0.5)
