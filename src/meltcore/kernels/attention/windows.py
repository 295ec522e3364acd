"""Causal attention of short chunks over a paged cache: a sequence's newest token and the draft tokens after it.

The prefill kernel gives a tile of queries to one program per head, which reads all keys: few windows leave most SMs
idle, and heads that share a key head read its keys once each. Here the queries of all heads that share a key head are
the rows of one tile, and splits of the keys fill the SMs, as in decode. The program that finishes last combines them.
"""

from __future__ import annotations

import math

import torch

from meltcore.kernels.attention.blocks import attend_block, oldest_key, to_dot_type
from meltcore.kernels.attention.kv_cache import load_queries
from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.attention.split_kv import (
    MAX_SPLIT_PAIRS,
    arrival_counters,
    block_keys,
    combine_splits,
    split_barrier,
    tile_rows,
)
from meltcore.kernels.capability import sm_count
from meltcore.kernels.jit import tl, triton

_MAX_ROWS = 64  # of a tile: with 256 dims a thread of 8 warps has 64 sums in registers
_MAX_SPLITS = 64
_COMBINED = 8  # splits that are combined at a time


def supports_windows(params: AttentionParams, heads: int, max_queries: int) -> bool:
    """Return whether `window_attention` computes tiles of this many queries, whose `heads` fit into one tile."""
    return heads // params.key_cache.shape[2] * max_queries <= _MAX_ROWS


def _stages(head_dim: int, element_bytes: int) -> int:
    """Return the stages of the pipeline of keys, with which a program takes at most 99 KiB of shared memory."""
    if head_dim <= 128:
        return 3 if element_bytes <= 2 else 2
    return 2 if element_bytes <= 2 else 1


def window_attention(
    qkv: torch.Tensor,
    params: AttentionParams,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    max_queries: int,
    out: torch.Tensor,
    splits: int | None = None,
) -> None:
    """Compute `prefill_attention` for tiles of at most `max_queries` queries into `out`.

    `splits` is the maximum number of splits of a tile's keys. None selects it by the number of tiles.
    """
    norms, rotary_table, key_cache, value_cache, scale, window = params
    (_, heads, head_dim), (_, page_size, kv_heads, _) = out.shape, key_cache.shape
    group, pairs = heads // kv_heads, len(tiles) * kv_heads
    rows = tile_rows(group * max_queries)
    if splits is None:
        most = min(_MAX_SPLITS, params.max_query_pages(page_table.shape[1]))
        splits = max(1, min(most, 2 * sm_count(out.device) // pairs))
    partial = lse = arrivals = out  # unused where sequences are whole
    if splits > 1:
        if pairs > MAX_SPLIT_PAIRS:
            raise ValueError(f"{len(tiles)} tiles of {kv_heads} key heads cannot be split")
        partial = torch.empty(pairs, splits, rows, head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(pairs, splits, rows, dtype=torch.float32, device=out.device)
        arrivals = arrival_counters(out.device)
    _window_attention_kernel[(kv_heads, len(tiles), splits)](
        *(qkv, norms.query if norms else qkv, rotary_table, key_cache, value_cache, page_table, tiles, out),
        *(partial, lse, arrivals, norms.eps if norms else 0.0, scale * math.log2(math.e)),
        *(qkv.stride(0), page_table.stride(0), window),
        NORM=norms is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_KEYS=block_keys(head_dim, qkv.element_size()),  # to which an FP8 cache's are converted
        SPLIT=splits > 1,
        COMBINED=_COMBINED,
        COMBINED_ROWS=16 if head_dim <= 128 else 8,
        SPLIT_PAGES=1 if head_dim <= 128 else 2,
        num_warps=8 if rows * head_dim > 2**13 else 4,
        num_stages=_stages(head_dim, qkv.element_size()),
    )


@triton.jit(do_not_specialize=["window"])
def _window_attention_kernel(
    qkv,
    q_norm_weight,
    rotary_table,
    key_cache,
    value_cache,
    page_table,
    tiles,
    out,
    partial,
    lse,
    arrivals,
    eps,
    scale_log2,
    qkv_stride,
    table_stride,
    window,
    NORM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    COMBINED: tl.constexpr,
    COMBINED_ROWS: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
):
    """Each program computes one split of the keys of one tile and key head. A query's heads are neighboring rows.

    A split has at least SPLIT_PAGES pages. COMBINED splits of COMBINED_ROWS rows are combined at a time.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head, split, max_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    tile = tiles + tl.program_id(1) * 4
    table_row = tl.load(tile).to(tl.int64)
    first_token = tl.load(tile + 1).to(tl.int64)
    num_queries = tl.load(tile + 2)
    context_len = tl.load(tile + 3)
    # Splits are multiples of the page size and have about one length. The first begins at the first block with a key
    # that a query sees.
    oldest_pos, end = oldest_key(context_len, window), context_len + num_queries
    first_key = oldest_pos // BLOCK_KEYS * BLOCK_KEYS
    used_pages = tl.maximum(tl.cdiv(end - first_key, PAGE_SIZE), 1)
    most_splits = tl.minimum(tl.cdiv(used_pages, SPLIT_PAGES), max_splits)
    split_keys = tl.cdiv(used_pages, most_splits) * PAGE_SIZE
    split_start = first_key + split * split_keys
    split_end = tl.minimum(split_start + split_keys, end)
    if (num_queries == 0) | (split_start >= end):
        return

    row, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    # Rows past the end repeat the last token: cheaper than a mask on every load.
    token = tl.minimum(row // GROUP, num_queries - 1)
    head = kv_head * GROUP + row % GROUP
    queries = load_queries(
        qkv + (first_token + token) * qkv_stride + head * HEAD_DIM,
        rotary_table + (context_len + token).to(tl.int64) * HEAD_DIM,
        q_norm_weight,
        eps,
        NORM,
        ROWS,
        HEAD_DIM,
    )
    queries = (to_dot_type(queries, key_cache),)
    acc = (tl.zeros((ROWS, HEAD_DIM), tl.float32),)
    l_i = tl.zeros((ROWS,), tl.float32)
    m_i = tl.full((ROWS,), -1e38, tl.float32)  # finite, since a split may have no key that the first queries see
    pages = page_table + table_row * table_stride
    key_offset = tl.arange(0, BLOCK_KEYS)
    block_offsets = (key_offset[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
    page = tl.load(pages + split_start // PAGE_SIZE)
    for block_key in range(split_start, split_end, BLOCK_KEYS):
        next_block = block_key + BLOCK_KEYS
        next_page = tl.load(pages + next_block // PAGE_SIZE, next_block < split_end, other=0)
        block_start = (page * PAGE_SIZE + block_key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
        key = block_key + key_offset
        key_mask = key < split_end
        visible = key[None, :] <= (context_len + token)[:, None]
        if window is not None:
            key_mask &= key >= oldest_pos
            visible &= key[None, :] > (context_len + token)[:, None] - window
        keys = tl.load(key_cache + block_start + block_offsets, key_mask[:, None], other=0.0)
        values = tl.load(value_cache + block_start + block_offsets, key_mask[:, None], other=0.0)
        visible &= key_mask[None, :]
        acc, l_i, m_i = attend_block(queries, keys, values, visible, acc, l_i, m_i, scale_log2, MASKED=True)
        page = next_page

    has_keys = l_i > 0
    output = acc[0] / tl.where(has_keys, l_i, 1.0)[:, None]
    is_row = row < num_queries * GROUP
    if not SPLIT:
        out_ptrs = out + ((first_token + token) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, output.to(out.dtype.element_ty), is_row[:, None])
        return

    pair = (tl.program_id(1) * KV_HEADS + kv_head).to(tl.int64)
    pair_row = pair * max_splits * ROWS
    split_row = pair_row + split * ROWS + row
    tl.store(partial + split_row[:, None] * HEAD_DIM + dims[None, :], output, is_row[:, None])
    tl.store(lse + split_row, tl.where(has_keys, m_i + tl.log2(tl.where(has_keys, l_i, 1.0)), float("-inf")), is_row)
    split_barrier()  # all of this program's partial output is written before it is counted
    used_splits = tl.cdiv(end - first_key, split_keys)
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == used_splits - 1:
        tl.store(arrivals + pair, 0)
        for first_row in range(0, num_queries * GROUP, COMBINED_ROWS):
            line = first_row + tl.arange(0, COMBINED_ROWS)
            mask = line < num_queries * GROUP
            combined = combine_splits(partial, lse, pair_row + line, mask, ROWS, used_splits, HEAD_DIM, COMBINED)
            heads = (first_token + line // GROUP) * HEADS + kv_head * GROUP + line % GROUP
            combined_ptrs = out + heads[:, None] * HEAD_DIM + dims[None, :]
            tl.store(combined_ptrs, combined.to(out.dtype.element_ty), mask[:, None])
