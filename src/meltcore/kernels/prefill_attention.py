"""Attention over a paged cache of chunks of prompts (prefill): causal, and ragged by tiles of queries."""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from meltcore.kernels.attend import as_multiplied, attend_block, attend_torch, gather_pages, require_layout
from meltcore.kernels.capability import capability, processors
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.qkv import HeadNorms, norm_and_rotate, turned_queries

# Most queries in a tile: with two heads of a group packed, 128 rows of a matrix instruction.
BLOCK_QUERIES = 64


def prefill_attention(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of chunks of prompts. The chunks' own keys and values are in the cache already.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], of which the queries are read, normalised and rotated by their
    positions (norms, rotary_table: see `store_kv`); tiles: [tiles, 4] int32 from `query_tiles`, on the device; those of
    no tokens are padding. Returns [tokens, heads, head_dim], in `out` where it is given. Tokens that no tile covers are
    left as they are.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    if out is None:
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)
    body = _prefill_triton if use_triton(qkv) else _prefill_torch
    body(qkv, norms, rotary_table, key_cache, value_cache, page_table, tiles, scale, out)
    return out


def query_tiles(chunks: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
    """Cut chunks (row in the page table, index of the first token, tokens, position of the first token) into tiles.

    Returns [tiles, 4] int32 of the same form, at most BLOCK_QUERIES tokens each, those with most keys first: the
    device starts them in this order, and short ones fill the gaps at the end.
    """
    table = np.array(list(chunks), dtype=np.int32).reshape(-1, 4)
    counts = -(-table[:, 2] // BLOCK_QUERIES)
    tiles = table.repeat(counts, axis=0)
    within = (np.arange(len(tiles)) - (counts.cumsum() - counts).repeat(counts)).astype(np.int32) * BLOCK_QUERIES
    tiles[:, 1] += within
    tiles[:, 2] = np.minimum(tiles[:, 2] - within, BLOCK_QUERIES)
    tiles[:, 3] += within
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")]


def _prefill_torch(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    for row, first, count, start in tiles.tolist():
        tokens, positions = slice(first, first + count), torch.arange(start, start + count, device=qkv.device)
        queries = turned_queries(qkv[tokens], norms, rotary_table, positions, key_cache.shape[2])
        keys, values = gather_pages(key_cache, value_cache, page_table[row], start + count)
        out[tokens] = attend_torch(queries, keys, values, start, scale)


class PrefillLaunch(NamedTuple):
    """How a tile is computed: heads of a group beside each other, keys a block, warps, stages of the key pipeline, and
    registers a thread where the compiler is not to choose them."""

    packed: int
    block_keys: int
    warps: int
    stages: int
    registers: int | None = None


def prefill_launch(head_dim: int, element_bytes: int) -> PrefillLaunch:
    """64 queries of one head a program.

    A block of keys and one of values take 32 KiB; with three stages (two of them ahead) and the queries that is at most
    112 KiB on Hopper, which keeps a third block for its asynchronous matrix instructions, and less elsewhere, within
    consumer GPUs. Heads of 256 do with two stages: 258 and 375 TFLOP/s; by 8 warps, in smaller or larger blocks or with
    a third stage 82 to 189 and 96 to 305. Float32 is a path for checking, without matrix units, and needs one stage
    where the queries alone are 64 KiB.
    """
    if element_bytes > 2:
        block_keys = max(16, 2**13 // (head_dim * element_bytes))
        return PrefillLaunch(1, block_keys, warps=8, stages=2 if head_dim <= 128 else 1)
    if head_dim > 128:
        return PrefillLaunch(1, 2**13 // head_dim, warps=4, stages=2)
    return PrefillLaunch(1, 64, warps=4, stages=3)


# Two heads of a group read each key once, and two such programs fit on a Hopper processor where a thread does with 128
# registers and blocks are one ahead: 28 prompts of 128 to 1,024 tokens take 183 us where single heads take 212, eight
# of 576 47 us for 54. One of 300, whose programs all run at once, takes 12.9 us for 9.4 (H200, 2026-11-21).
_PAIRED = PrefillLaunch(2, 64, warps=8, stages=2, registers=128)


def launch_for(qkv: torch.Tensor, key_cache: torch.Tensor, heads: int, tiles: int) -> PrefillLaunch:
    """For so many tiles of so many heads. Those of a graph are about half padding, which ends at once."""
    kv_heads, head_dim = key_cache.shape[2:]
    pairs = (
        capability(qkv.device) == 90
        and head_dim <= 128
        and qkv.element_size() == key_cache.element_size() == 2
        and heads // kv_heads % 2 == 0
    )
    if pairs and heads * tiles > 4 * processors(qkv.device):
        return _PAIRED
    return prefill_launch(head_dim, qkv.element_size())


def _prefill_triton(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    launch: PrefillLaunch | None = None,
) -> None:
    _, heads, head_dim = out.shape
    _, page_size, kv_heads, _ = key_cache.shape
    require_layout(qkv, key_cache, value_cache, page_table, out)
    if len(tiles) == 0:
        return
    launch = launch or launch_for(qkv, key_cache, heads, len(tiles))
    # Heads vary fastest, so that the tiles start in their order, most keys first.
    _prefill_kernel[(heads // launch.packed, len(tiles))](
        qkv,
        norms.query if norms else qkv,
        rotary_table,
        key_cache,
        value_cache,
        page_table,
        tiles,
        out,
        norms.eps if norms else 0.0,
        scale * math.log2(math.e),
        qkv.stride(0),
        page_table.stride(0),
        NORMED=norms is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PACKED=launch.packed,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_QUERIES=BLOCK_QUERIES,
        BLOCK_KEYS=launch.block_keys,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **({"maxnreg": launch.registers} if launch.registers else {}),
    )


@triton.jit
def _queries(heads, turns, weight, eps, NORMED: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The query heads at `heads`, normalised and turned by the table's rows at `turns`: [ROWS] pointers each."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], (ROWS, HALF))
    turn = turns[:, None] + column
    cos, sin = tl.load(turn), tl.load(turn + HALF)
    all_of_it = tl.full((ROWS, HALF), True, tl.int1)
    source = heads[:, None] + column
    first, second = norm_and_rotate(source, all_of_it, weight + column, eps, cos, sin, NORMED, HEAD_DIM)
    dtype = heads.dtype.element_ty
    halves = tl.join(first.to(dtype), second.to(dtype))
    return tl.reshape(tl.permute(halves, (0, 2, 1)), (ROWS, HEAD_DIM))


@triton.jit
def _page_of(pages, position, end, PAGE_SIZE: tl.constexpr):
    """The page of the key at `position`; 0 from `end` on, where nobody reads it."""
    return tl.load(pages + position // PAGE_SIZE, position < end, other=0)


@triton.jit
def _store(out, mixed, head, first_token, count, HEADS: tl.constexpr, PACKED: tl.constexpr):
    """[ROWS, HEAD_DIM] of the tile's `count` tokens, a token's heads in neighbouring rows."""
    HEAD_DIM: tl.constexpr = mixed.shape[1]
    member, dims = tl.arange(0, mixed.shape[0]), tl.arange(0, HEAD_DIM)
    column = (head + member % PACKED)[:, None] * HEAD_DIM + dims[None, :]
    places = (first_token + member // PACKED)[:, None] * (HEADS * HEAD_DIM) + column
    tl.store(out + places, mixed.to(out.dtype.element_ty), (member // PACKED < count)[:, None])


@triton.jit
def _prefill_kernel(
    qkv,
    query_weight,
    rotary_table,
    key_cache,
    value_cache,
    page_table,
    tiles,
    out,
    eps,
    scale_log2,
    qkv_stride,
    table_stride,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """One tile of queries for PACKED heads of one group; a query's heads are neighbouring rows."""
    head = tl.program_id(0) * PACKED
    kv_head = head // (HEADS // KV_HEADS)
    tile = tiles + tl.program_id(1) * 4
    table_row = tl.load(tile).to(tl.int64)
    first_token = tl.load(tile + 1).to(tl.int64)
    count = tl.load(tile + 2)
    start = tl.load(tile + 3)
    if count == 0:
        return  # padding

    member = tl.arange(0, BLOCK_QUERIES * PACKED)
    dims = tl.arange(0, HEAD_DIM)
    # Tokens past the end repeat the last one: cheaper than a mask on every load.
    within_tile = tl.minimum(member // PACKED, count - 1)
    queries = _queries(
        qkv + (first_token + within_tile) * qkv_stride + (head + member % PACKED) * HEAD_DIM,
        rotary_table + (start + within_tile).to(tl.int64) * HEAD_DIM,
        query_weight,
        eps,
        NORMED,
        BLOCK_QUERIES * PACKED,
        HEAD_DIM,
    )
    # One part, of all dims: Hopper's asynchronous products take blocks from shared memory, which they reach widened.
    queries = (as_multiplied(queries, key_cache),)
    mixed = (tl.zeros((BLOCK_QUERIES * PACKED, HEAD_DIM), tl.float32),)
    total = tl.zeros((BLOCK_QUERIES * PACKED,), tl.float32)
    highest = tl.full((BLOCK_QUERIES * PACKED,), float("-inf"), tl.float32)

    pages = page_table + table_row * table_stride
    block = tl.arange(0, BLOCK_KEYS)
    within = (block[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
    # Blocks that every query sees whole, without a mask.
    seen = (start + 1) // BLOCK_KEYS * BLOCK_KEYS
    page = tl.load(pages)
    for position in range(0, seen, BLOCK_KEYS):
        next_page = _page_of(pages, position + BLOCK_KEYS, start + count, PAGE_SIZE)
        base = (page * PAGE_SIZE + position % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
        keys = tl.load(key_cache + base + within)
        values = tl.load(value_cache + base + within)
        mixed, total, highest = attend_block(
            queries, keys, values, None, mixed, total, highest, scale_log2, MASKED=False
        )
        page = next_page
    for position in range(seen, start + count, BLOCK_KEYS):
        next_page = _page_of(pages, position + BLOCK_KEYS, start + count, PAGE_SIZE)
        base = (page * PAGE_SIZE + position % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
        exists = (position + block < start + count)[:, None]
        keys = tl.load(key_cache + base + within, exists, other=0.0)
        values = tl.load(value_cache + base + within, exists, other=0.0)
        visible = position + block[None, :] <= start + member[:, None] // PACKED
        mixed, total, highest = attend_block(
            queries, keys, values, visible, mixed, total, highest, scale_log2, MASKED=True
        )
        page = next_page
    _store(out, mixed[0] / total[:, None], head, first_token, count, HEADS, PACKED)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    qkv = torch.empty(64, width, dtype=dtype, device="meta")
    out = torch.empty(64, model.heads, model.head_dim, dtype=dtype, device="meta")
    cache = torch.empty(128, model.page_size, model.kv_heads, model.head_dim, dtype=dtype, device="meta")
    page_table = torch.empty(64, 640, dtype=torch.int64, device="meta")
    rotary = torch.empty(4096, model.head_dim, device="meta")

    def case(norms: HeadNorms | None, cache: torch.Tensor = cache, tiles: int = 4) -> CompileCase:
        table = torch.empty(tiles, 4, dtype=torch.int32, device="meta")
        return lambda: _prefill_triton(qkv, norms, rotary, cache, cache, page_table, table, 1.0, out)

    norms = HeadNorms(qkv[0], qkv[0], 1e-6)
    in_fp8 = [case(norms, cache.to(FP8))] if capability(cache.device) >= FP8_CAPABILITY else []
    return [case(norms), case(None), case(norms, tiles=512), *in_fp8]
