"""Decode attention of about 17 to 128 sequences: enough to fill the device, too few for even waves of programs.

With one program per sequence and key head, 100 sequences of 8 key heads are 800 programs, of which 396 run
concurrently. The third wave would be almost empty. Here the key blocks of all sequences form one range, which is cut
into equal work ranges, as many as run concurrently. One program per tile of key heads walks each range (the schedule of
Stream-K, Osama et al. 2023, arXiv:2301.03598, for attention). Where a work range ends within a sequence, the sequence
is split, and the program that finishes last combines its splits.

A program walks its work range in one loop over the ends of sequences. A split begins and is finished between two
blocks, while the blocks after them, also of the next sequence, are in flight. The first blocks are in flight while the
previous kernel runs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meltcore.kernels.attention.blocks import as_pairs, attend_block, join_parts, oldest_key
from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.attention.split_kv import (
    arrival_counters,
    begin_split,
    block_keys,
    decode_tensors,
    empty_softmax,
    finish_split,
    tile_rows,
    zero_queries,
)
from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait

# Every program adds up the blocks of this many sequences; more of them make even enough waves.
MAX_SEQUENCES = 128
_MAX_HEAD_DIM = 128
_STAGES = 3
# For blocks of half the bytes: 61.4 us at 64 sequences of 1,280 tokens, 64.9 with five (H200, 2026-11-22).
_FP8_STAGES = 4
_WARPS = 4


class StreamK(NamedTuple):
    """The division of a decode step: the number of work ranges for each tile of `key_heads` key heads."""

    work_ranges: int
    key_heads: int


def stream_k_for(sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> StreamK | None:
    """Return the work ranges of a decode step. Returns None if one program per sequence and key head is better.

    There are as many programs as run concurrently. Shared memory holds three blocks of keys and values for each
    program, one of them in flight. So Hopper runs two programs per SM. (The registers of a third program would allow
    only smaller blocks, which are slower.)

    Two key heads are neighbors on a page. If their query heads fit in the 16 rows that tl.dot needs, two key heads cost
    no more arithmetic than one and are 1 % faster. Programs of four or eight key heads are slower. They have more work
    ranges, whose splits take longer to combine (H200, 2026-11-21).
    """
    programs = sm_count(device) * max(1, shared_memory_bytes(device) // (96 * 2**10))
    if sequences > MAX_SEQUENCES or sequences * kv_heads < sm_count(device) or head_dim > _MAX_HEAD_DIM:
        return None
    key_heads = 2 if kv_heads % 2 == 0 and 2 * heads // kv_heads <= tile_rows(1) else 1
    return StreamK(max(1, programs * key_heads // kv_heads), key_heads)


def decode_stream_k(
    qkv: torch.Tensor,
    params: AttentionParams,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    page_table_rows: torch.Tensor,
    out: torch.Tensor,
    launch: StreamK,
) -> None:
    """Compute `decode_attention` of at most MAX_SEQUENCES sequences into `out`.

    Raises ValueError for more sequences.
    """
    sequences, heads, head_dim = out.shape
    _, page_size, kv_heads, _ = params.key_cache.shape
    norms, (num_ranges, key_heads) = params.norms, launch
    if sequences > MAX_SEQUENCES:
        raise ValueError(f"{sequences} sequences; Stream-K decode takes at most {MAX_SEQUENCES}")
    # Neighboring work ranges share at most one sequence, so range + sequence identifies each split.
    partial = torch.empty(num_ranges + sequences, heads, head_dim, dtype=torch.float32, device=out.device)
    lse = torch.empty(num_ranges + sequences, heads, dtype=torch.float32, device=out.device)
    _decode_stream_k_kernel[(kv_heads // key_heads, num_ranges)](
        *decode_tensors(qkv, params, positions, page_table, page_table_rows, out),
        *(partial, lse, arrival_counters(out.device), sequences, norms.eps if norms else 0.0),
        *(params.scale * math.log2(math.e), qkv.stride(0), page_table.stride(0), params.sliding_window),
        NORM=norms is not None,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        KEY_HEADS=key_heads,
        ROWS=tile_rows(heads // kv_heads * key_heads),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_TOKENS=block_keys(head_dim, params.key_cache.element_size()) // key_heads,
        BLOCK_SEQUENCES=MAX_SEQUENCES,
        num_warps=_WARPS,
        num_stages=_FP8_STAGES if params.key_cache.dtype == FP8 else _STAGES,
        **pdl_options(qkv.device),
    )


@triton.jit
def _block_ends(positions, rows, sequences, window, BLOCK_TOKENS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr):
    """Return positions, page-table rows and block ends of BLOCK_SEQUENCES sequences, and their number of blocks."""
    index = tl.arange(0, BLOCK_SEQUENCES)
    position = tl.load(positions + index, index < sequences, other=0).to(tl.int32)
    row = tl.load(rows + index, index < sequences, other=0)
    # Padding counts as one block, so that a program writes its zeros.
    blocks = tl.maximum(tl.cdiv(position + 1, BLOCK_TOKENS) - oldest_key(position, window) // BLOCK_TOKENS, 1)
    blocks = tl.where(index < sequences, blocks, 0)
    return position, row, tl.cumsum(blocks, 0), tl.sum(blocks, 0)


@triton.jit(do_not_specialize=["sequences", "window"])
def _decode_stream_k_kernel(
    qkv,
    q_norm_weight,
    k_norm_weight,
    rotary_table,
    positions,
    key_cache,
    value_cache,
    page_table,
    rows,
    out,
    partial,
    lse,
    arrivals,
    sequences,
    eps,
    scale_log2,
    qkv_stride,
    table_stride,
    window,
    NORM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes one work range for KEY_HEADS key heads, whose query heads are the rows of a tile."""
    PAGE_BLOCKS: tl.constexpr = PAGE_SIZE // BLOCK_TOKENS
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    READ_DIM: tl.constexpr = HEAD_DIM // 2 if key_cache.dtype.element_ty == tl.float8e4nv else HEAD_DIM
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    work_range = tl.program_id(1)
    pdl_launch_dependents(PDL)
    # No recent kernel wrote positions, rows, page numbers and the cached keys: until a split begins, everything is
    # loaded before the previous kernel has ended.
    seq_positions, seq_rows, block_ends, total_blocks = _block_ends(
        positions, rows, sequences, window, BLOCK_TOKENS, BLOCK_SEQUENCES
    )
    index = tl.arange(0, BLOCK_SEQUENCES)
    # Every work range has a block, so that the splits of a sequence can be counted.
    num_ranges = tl.minimum(tl.num_programs(1), total_blocks)
    range_begin = tl.minimum(work_range, num_ranges) * total_blocks // num_ranges
    range_end = tl.minimum(work_range + 1, num_ranges) * total_blocks // num_ranges
    sequence = tl.sum((block_ends <= range_begin).to(tl.int32), 0)
    # Number of block 0 of `sequence`. Its first block in the window is `first_block`; those before it have no number.
    origin = tl.max(tl.where(block_ends <= range_begin, block_ends, 0), 0)
    position = tl.sum(tl.where(index == sequence, seq_positions, 0), 0)
    origin -= oldest_key(position, window) // BLOCK_TOKENS
    pages = page_table + tl.sum(tl.where(index == sequence, seq_rows, 0), 0) * table_stride
    page = tl.load(pages + (range_begin - origin) // PAGE_BLOCKS, range_begin < range_end, other=0)

    dims = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, BLOCK_TOKENS * KEY_HEADS)
    token, key_head = key // KEY_HEADS, key % KEY_HEADS
    block_offsets = (token * KV_HEADS + tile * KEY_HEADS + key_head)[:, None] * READ_DIM
    block_offsets += tl.arange(0, READ_DIM)[None, :]
    key_blocks, value_blocks = as_pairs(key_cache), as_pairs(value_cache)
    row = tl.arange(0, ROWS)
    queries = zero_queries(qkv, key_cache, ROWS, HEAD_DIM)
    acc, l_i, m_i = empty_softmax(value_cache, ROWS, HEAD_DIM)
    split_begin = range_begin
    for block_number in range(range_begin, range_end):
        block = block_number - origin
        oldest_pos = oldest_key(position, window)
        first_block = oldest_pos // BLOCK_TOKENS
        num_blocks = tl.maximum(tl.cdiv(position + 1, BLOCK_TOKENS), 1)
        is_last_block = block + 1 == num_blocks
        # The page after this block is looked up one block ahead of its keys, whose addresses need it.
        has_next = block_number + 1 < range_end
        next_sequence, next_origin, next_position, next_pages = sequence, origin, position, pages
        if is_last_block & has_next:
            next_sequence, next_origin = sequence + 1, block_number + 1
            next_position = tl.load(positions + next_sequence).to(tl.int32)
            next_origin -= oldest_key(next_position, window) // BLOCK_TOKENS
            next_pages = page_table + tl.load(rows + next_sequence) * table_stride
        next_page = tl.load(next_pages + (block_number + 1 - next_origin) // PAGE_BLOCKS, has_next, other=0)

        block_start = (page * PAGE_SIZE + block % PAGE_BLOCKS * BLOCK_TOKENS) * (KV_HEADS * READ_DIM)
        key_mask = block * BLOCK_TOKENS + token < position
        if window is not None:
            key_mask &= block * BLOCK_TOKENS + token >= oldest_pos
        keys = tl.load(key_blocks + block_start + block_offsets, key_mask[:, None], other=0.0)
        values = tl.load(value_blocks + block_start + block_offsets, key_mask[:, None], other=0.0)
        if (block == first_block) | (block_number == range_begin):
            split_begin = block_number
            is_last = (origin + num_blocks <= range_end) & (position >= 0)
            queries, acc, l_i, m_i = begin_split(
                *(qkv, q_norm_weight, k_norm_weight, rotary_table, key_cache, value_cache, pages, sequence, position),
                *(is_last, tile, eps, scale_log2, qkv_stride),
                *(NORM, KV_HEADS, GROUP, KEY_HEADS, ROWS, HEAD_DIM, PAGE_SIZE, PDL),
            )
        visible = key_mask[None, :]
        if KEY_HEADS > 1:
            visible &= tl.minimum(row // GROUP, KEY_HEADS - 1)[:, None] == key_head[None, :]
        acc, l_i, m_i = attend_block(queries, keys, values, visible, acc, l_i, m_i, scale_log2, MASKED=True)
        if is_last_block | (block_number + 1 == range_end):
            divisor = tl.where(l_i > 0, l_i, 1.0)  # padding has attended to no key
            output = join_parts(acc, ROWS, HEAD_DIM) / divisor[:, None]
            if block_number + 1 - split_begin == num_blocks - first_block:
                head = (sequence.to(tl.int64) * tiles + tile) * HEADS + row
                out_ptrs = out + head[:, None] * HEAD_DIM + dims[None, :]
                tl.store(out_ptrs, output.to(out.dtype.element_ty), (row < HEADS)[:, None])
            else:
                first_range = ((origin + first_block + 1) * num_ranges - 1) // total_blocks
                splits = ((origin + num_blocks) * num_ranges - 1) // total_blocks - first_range + 1
                pair, first_row = sequence * tiles + tile, ((first_range + sequence) * tiles + tile) * HEADS
                finish_split(
                    *(out, partial, lse, arrivals, output, l_i, m_i, pair, work_range - first_range, splits),
                    *(first_row, 1, KV_HEADS * GROUP, ROWS, HEADS, HEAD_DIM, 4),
                )
        sequence, origin, position, pages, page = next_sequence, next_origin, next_position, next_pages, next_page
    # Also in programs without a block, before any may exit: this kernel must not end before the previous one.
    pdl_wait(PDL)
