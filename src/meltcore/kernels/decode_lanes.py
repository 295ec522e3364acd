"""Decode attention of a middling number of sequences: enough to fill the device, too few to leave its rounds even.

With a program for each sequence and key head, 100 sequences of 8 key heads are 800 programs where 396 run at a time:
two rounds, and a third for the rest. Here the blocks of all sequences are laid in one line, cut into lanes of one
length, as many as run at once, and every lane is walked by one program for each pair of key heads. Where a lane ends
within a sequence the sequence is shared, and the last of its programs to end merges the shares (the schedule of
Stream-K, Osama et al. 2023, arXiv:2301.03598, for attention).

A lane is walked in one loop, past the ends of sequences: a share is begun and handed in between two blocks, while the
blocks after them, of the next sequence too, are on their way. So are the first ones while the kernel in front runs.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meltcore.kernels.attend import attend_block, in_pairs, put_together
from meltcore.kernels.capability import capability, processors, shared_bytes
from meltcore.kernels.decode_share import (
    arrivals_of,
    begin_share,
    block_keys_of,
    hand_in,
    least_rows,
    no_queries,
    nothing_seen,
)
from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps
from meltcore.kernels.qkv import HeadNorms

# Every program adds up the blocks of this many sequences; more of them leave their rounds even enough.
MOST_SEQUENCES = 128
MOST_HEAD_DIM = 128
_STAGES = 3
# Of blocks of half the bytes: 61.4 us at 64 sequences of 1,280 tokens, 64.9 with five (H200, 2026-11-22).
_STAGES_IN_FP8 = 4
_WARPS = 4


class Lanes(NamedTuple):
    """How a decode step is cut up. key_heads: a divisor of their number, that one program walks a lane for."""

    number: int
    key_heads: int


def lanes_of(sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> Lanes | None:
    """The lanes of a decode step; None where it is better left to `decode_attention`'s own kernel.

    As many programs as run at once: shared memory holds three blocks of keys and of values for each, one of them under
    way, so two to a processor on Hopper. (The registers of a third fit only smaller blocks, which are slower.)
    Two key heads are neighbours on a page, and where their query heads fit in the rows of one tile, which tl.dot does
    not take smaller, cost no more arithmetic than one: 1 % faster. Four or eight are slower, since the shares of their
    more lanes take longer to merge (H200, 2026-11-21).
    """
    programs = processors(device) * max(1, shared_bytes(device) // (96 * 2**10))
    if sequences > MOST_SEQUENCES or sequences * kv_heads < processors(device) or head_dim > MOST_HEAD_DIM:
        return None
    key_heads = 2 if kv_heads % 2 == 0 and 2 * heads // kv_heads <= least_rows(1) else 1
    return Lanes(max(1, programs * key_heads // kv_heads), key_heads)


def decode_in_lanes(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lanes: Lanes,
) -> None:
    """`decode_attention` of at most MOST_SEQUENCES sequences, into `out`."""
    sequences, heads, head_dim = out.shape
    _, page_size, kv_heads, _ = key_cache.shape
    if sequences > MOST_SEQUENCES:
        raise ValueError(f"{sequences} sequences; lanes are cut for at most {MOST_SEQUENCES}")
    # Neighbouring lanes meet in one sequence at most, so lane + sequence names each share of a cut sequence.
    partial = torch.empty(lanes.number + sequences, heads, head_dim, dtype=torch.float32, device=out.device)
    weights = torch.empty(lanes.number + sequences, heads, dtype=torch.float32, device=out.device)
    overlap = overlaps(qkv.device)
    _lanes_kernel[(kv_heads // lanes.key_heads, lanes.number)](
        qkv,
        norms.query if norms else qkv,
        norms.key if norms else qkv,
        rotary_table,
        positions,
        key_cache,
        value_cache,
        page_table,
        rows,
        out,
        partial,
        weights,
        arrivals_of(out.device),
        sequences,
        norms.eps if norms else 0.0,
        scale * math.log2(math.e),
        qkv.stride(0),
        page_table.stride(0),
        NORMED=norms is not None,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        KEY_HEADS=lanes.key_heads,
        ROWS=least_rows(heads // kv_heads * lanes.key_heads),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_TOKENS=block_keys_of(head_dim, key_cache.element_size()) // lanes.key_heads,
        BLOCK_SEQUENCES=MOST_SEQUENCES,
        OVERLAP=overlap,
        num_warps=_WARPS,
        num_stages=_STAGES_IN_FP8 if key_cache.dtype == FP8 else _STAGES,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def _line(positions, rows, sequences, BLOCK_TOKENS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr):
    """Of BLOCK_SEQUENCES places: positions, rows of the page table, where each one's blocks end; and all blocks."""
    index = tl.arange(0, BLOCK_SEQUENCES)
    position = tl.load(positions + index, index < sequences, other=0).to(tl.int32)
    row = tl.load(rows + index, index < sequences, other=0)
    # Padding counts as a block, so that some program writes its zeros.
    held = tl.where(index < sequences, tl.maximum(tl.cdiv(position + 1, BLOCK_TOKENS), 1), 0)
    return position, row, tl.cumsum(held, 0), tl.sum(held, 0)


@triton.jit(do_not_specialize=["sequences"])
def _lanes_kernel(
    qkv,
    query_weight,
    key_weight,
    rotary_table,
    positions,
    key_cache,
    value_cache,
    page_table,
    rows,
    out,
    partial,
    weights,
    arrivals,
    sequences,
    eps,
    scale_log2,
    qkv_stride,
    table_stride,
    NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One lane for KEY_HEADS key heads: their query heads are the rows of a tile."""
    PAGE_BLOCKS: tl.constexpr = PAGE_SIZE // BLOCK_TOKENS
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    READ_DIM: tl.constexpr = HEAD_DIM // 2 if key_cache.dtype.element_ty == tl.float8e4nv else HEAD_DIM
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    lane = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # No recent kernel wrote positions, rows, page numbers and what is cached: until a share begins, all is read before
    # the kernel in front has ended.
    each, each_row, ends, total_blocks = _line(positions, rows, sequences, BLOCK_TOKENS, BLOCK_SEQUENCES)
    index = tl.arange(0, BLOCK_SEQUENCES)
    # Every lane has a block, so that the shares of a sequence can be counted.
    lanes = tl.minimum(tl.num_programs(1), total_blocks)
    begin = tl.minimum(lane, lanes) * total_blocks // lanes
    end = tl.minimum(lane + 1, lanes) * total_blocks // lanes
    sequence = tl.sum((ends <= begin).to(tl.int32), 0)
    origin = tl.max(tl.where(ends <= begin, ends, 0), 0)  # the block of the line where `sequence` begins
    position = tl.sum(tl.where(index == sequence, each, 0), 0)
    pages = page_table + tl.sum(tl.where(index == sequence, each_row, 0), 0) * table_stride
    page = tl.load(pages + (begin - origin) // PAGE_BLOCKS, begin < end, other=0)

    dims = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, BLOCK_TOKENS * KEY_HEADS)
    token, key_head = key // KEY_HEADS, key % KEY_HEADS
    within = (token * KV_HEADS + tile * KEY_HEADS + key_head)[:, None] * READ_DIM
    within += tl.arange(0, READ_DIM)[None, :]
    keys_at, values_at = in_pairs(key_cache), in_pairs(value_cache)
    row = tl.arange(0, ROWS)
    queries = no_queries(qkv, key_cache, ROWS, HEAD_DIM)
    mixed, total, highest = nothing_seen(value_cache, ROWS, HEAD_DIM)
    share_begin = begin
    for place in range(begin, end):
        block = place - origin
        count = tl.maximum(tl.cdiv(position + 1, BLOCK_TOKENS), 1)
        ends_here = block + 1 == count
        # The page after this block is looked up a block ahead of its keys, whose addresses wait for it.
        goes_on = place + 1 < end
        next_sequence, next_origin, next_position, next_pages = sequence, origin, position, pages
        if ends_here & goes_on:
            next_sequence, next_origin = sequence + 1, place + 1
            next_position = tl.load(positions + next_sequence).to(tl.int32)
            next_pages = page_table + tl.load(rows + next_sequence) * table_stride
        next_page = tl.load(next_pages + (place + 1 - next_origin) // PAGE_BLOCKS, goes_on, other=0)

        base = (page * PAGE_SIZE + block % PAGE_BLOCKS * BLOCK_TOKENS) * (KV_HEADS * READ_DIM)
        filled = block * BLOCK_TOKENS + token < position
        keys = tl.load(keys_at + base + within, filled[:, None], other=0.0)
        values = tl.load(values_at + base + within, filled[:, None], other=0.0)
        if (block == 0) | (place == begin):
            share_begin = place
            is_last = (origin + count <= end) & (position >= 0)
            queries, mixed, total, highest = begin_share(
                *(qkv, query_weight, key_weight, rotary_table, key_cache, value_cache, pages, sequence, position),
                *(is_last, tile, eps, scale_log2, qkv_stride),
                *(NORMED, KV_HEADS, GROUP, KEY_HEADS, ROWS, HEAD_DIM, PAGE_SIZE, OVERLAP),
            )
        visible = filled[None, :]
        if KEY_HEADS > 1:
            visible &= tl.minimum(row // GROUP, KEY_HEADS - 1)[:, None] == key_head[None, :]
        mixed, total, highest = attend_block(
            queries, keys, values, visible, mixed, total, highest, scale_log2, MASKED=True
        )
        if ends_here | (place + 1 == end):
            seen = tl.where(total > 0, total, 1.0)  # padding has seen nothing
            share = put_together(mixed, ROWS, HEAD_DIM) / seen[:, None]
            if place + 1 - share_begin == count:
                head = (sequence.to(tl.int64) * tiles + tile) * HEADS + row
                result = out + head[:, None] * HEAD_DIM + dims[None, :]
                tl.store(result, share.to(out.dtype.element_ty), (row < HEADS)[:, None])
            else:
                first_lane = ((origin + 1) * lanes - 1) // total_blocks
                shares = ((origin + count) * lanes - 1) // total_blocks - first_lane + 1
                pair, rows_from = sequence * tiles + tile, ((first_lane + sequence) * tiles + tile) * HEADS
                hand_in(
                    *(out, partial, weights, arrivals, share, total, highest, pair, lane - first_lane, shares),
                    *(rows_from, 1, KV_HEADS * GROUP, ROWS, HEADS, HEAD_DIM, 4),
                )
        sequence, origin, position, pages, page = next_sequence, next_origin, next_position, next_pages, next_page
    if OVERLAP:
        # Programs without a block too, before any may end: or this launch could be over before the one in front.
        tl.extra.cuda.gdc_wait()


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    qkv = torch.empty(64, width, dtype=dtype, device="meta")
    out = torch.empty(64, model.heads, model.head_dim, dtype=dtype, device="meta")
    page_table = torch.empty(64, 640, dtype=torch.int64, device="meta")
    rotary = torch.empty(4096, model.head_dim, device="meta")
    column = page_table[:, 0]

    def case(norms: HeadNorms | None, kind: torch.dtype) -> CompileCase:
        cache = torch.empty(128, model.page_size, model.kv_heads, model.head_dim, dtype=kind, device="meta")
        given = qkv, norms, rotary, column, cache, cache, page_table, column
        lanes = lanes_of(64, model.heads, model.kv_heads, model.head_dim, qkv.device) or Lanes(1, 1)
        return lambda: decode_in_lanes(*given, 1.0, out, lanes)

    norms = HeadNorms(qkv[0], qkv[0], 1e-6)
    in_fp8 = [case(norms, FP8)] if capability(qkv.device) >= FP8_CAPABILITY else []
    return [case(norms, dtype), case(None, dtype), *in_fp8]
