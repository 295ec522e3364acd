"""Device functions of the decode attention kernels: KV splits of a sequence, and the combine of partial outputs.

A KV split of a sequence writes its partial output and the logarithm of its sum of exponentials (log-sum-exp) to rows of
`partial` and `lse`. `arrivals` counts the finished splits of each pair of a sequence and a key head; the program that
finishes the last split combines them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from meltcore.kernels.attention.blocks import norm_and_rope_rows, split_parts, to_dot_type
from meltcore.kernels.attention.kv_cache import to_cache_type
from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_wait

# Pairs of a sequence and a key head that can be split; more of them fill any GPU unsplit.
MAX_SPLIT_PAIRS = 2**16


def tile_rows(heads: int) -> int:
    """Return the rows of a tile for this number of query heads, at least 16, since tl.dot requires 16 rows."""
    return max(16, 1 << (heads - 1).bit_length())


def block_keys(head_dim: int, element_bytes: int) -> int:
    """Return the number of keys of a block, by the bytes of a cache element.

    A block of keys and one of values take at most 32 KiB. Two in flight and three programs per SM keep 192 KiB in
    flight on Hopper (about 40 KiB would hide 1 us at 4.4 TB/s). 64 KiB still fits consumer GPUs.
    """
    return min(64, max(16, 2**14 // (head_dim * element_bytes)))


@lru_cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """Return the counters of finished splits per sequence and key head. They are zeros before and after every launch.

    A device has one tensor, since launches follow each other on one stream. It is always the same tensor, because
    captured graphs keep its address.
    """
    return torch.zeros(MAX_SPLIT_PAIRS, dtype=torch.int32, device=device)


def decode_tensors(
    qkv: torch.Tensor,
    params: AttentionParams,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    page_table_rows: torch.Tensor,
    out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the first arguments of the decode kernels."""
    norms, rotary_table, key_cache, value_cache, *_ = params
    norm_weights = (norms.query, norms.key) if norms else (qkv, qkv)
    return (qkv, *norm_weights, rotary_table, positions, key_cache, value_cache, page_table, page_table_rows, out)


@triton.jit
def combine_splits(
    partial, lse, first_rows, head_mask, split_stride, splits, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Combine the splits of GROUP heads into outputs [GROUP, HEAD_DIM]; `first_rows` [GROUP] hold their first splits.

    Splits are weighted by their sums of exponentials and always added in the same order. Other SMs wrote them during
    this launch: loads bypass the L1 cache, which may have stale lines.
    """
    dims = tl.arange(0, HEAD_DIM)[None, None, :]
    split = tl.arange(0, BLOCK)[None, :]
    rows = first_rows[:, None] + split * split_stride
    mask = head_mask[:, None] & (split < splits)
    # The first splits, usually all, are in flight before the largest weight is known.
    partial_out = tl.load(
        partial + rows[:, :, None] * HEAD_DIM + dims, mask[:, :, None], other=0.0, cache_modifier=".cg"
    )
    split_lse = tl.load(lse + rows, mask, other=float("-inf"), cache_modifier=".cg")
    m_i = tl.maximum(tl.max(split_lse, 1), -1e38)  # finite in rows without a head
    weight = tl.exp2(split_lse - m_i[:, None])
    l_i = tl.sum(weight, 1)
    acc = tl.sum(partial_out * weight[:, :, None], 1)
    for split_start in range(BLOCK, splits, BLOCK):
        rows += BLOCK * split_stride
        mask = head_mask[:, None] & (split_start + split < splits)
        partial_out = tl.load(
            partial + rows[:, :, None] * HEAD_DIM + dims, mask[:, :, None], other=0.0, cache_modifier=".cg"
        )
        split_lse = tl.load(lse + rows, mask, other=float("-inf"), cache_modifier=".cg")
        m_new = tl.maximum(m_i, tl.max(split_lse, 1))
        alpha = tl.exp2(m_i - m_new)
        weight = tl.exp2(split_lse - m_new[:, None])
        l_i = l_i * alpha + tl.sum(weight, 1)
        acc = acc * alpha[:, None] + tl.sum(partial_out * weight[:, :, None], 1)
        m_i = m_new
    return acc / tl.where(head_mask, l_i, 1.0)[:, None]


@triton.jit(noinline=True)
def split_barrier():
    """Synchronize the program's threads, as a function: Triton 3.6 does not pipeline a loop that contains a barrier.

    The function must do nothing else: Triton 3.6 gives a called function the shared memory of its caller.
    """
    tl.debug_barrier()


@triton.jit
def finish_split(
    out,
    partial,
    lse,
    arrivals,
    acc,
    l_i,
    m_i,
    pair,
    split,
    splits,
    first_rows,
    head_stride,
    split_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write partial output `split` of `pair`, a sequence and key head; the last to finish combines all of them.

    acc: [ROWS, HEAD_DIM], divided by `l_i` already. Split i of the group's head h is in row
    `first + h * head_stride + i * split_stride` of `partial`; the combine loads BLOCK splits at a time.
    """
    row = tl.arange(0, ROWS)
    split_row = first_rows + row * head_stride + split * split_stride
    tl.store(partial + split_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], acc, (row < GROUP)[:, None])
    tl.store(lse + split_row, m_i + tl.log2(l_i), row < GROUP)
    split_barrier()  # all of this program's partial output is written before it is counted
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == splits - 1:
        tl.store(arrivals + pair, 0)
        head = tl.arange(0, triton.next_power_of_2(GROUP))
        head_mask = head < GROUP
        head_rows = first_rows + head * head_stride
        combined = combine_splits(partial, lse, head_rows, head_mask, split_stride, splits, HEAD_DIM, BLOCK)
        out_ptrs = out + (pair * GROUP + head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(out_ptrs, combined.to(out.dtype.element_ty), head_mask[:, None])


@triton.jit
def empty_softmax(cache_ptr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the initial values (acc, l_i, m_i) of the online softmax, before the first key. acc is in parts.

    m_i is below every score but finite, so that a block without a visible key adds nothing, and no NaN.
    """
    return (
        split_parts(tl.zeros((ROWS, HEAD_DIM), tl.float32), cache_ptr, ROWS, HEAD_DIM),
        tl.zeros((ROWS,), tl.float32),
        tl.full((ROWS,), -1e38, tl.float32),
    )


@triton.jit
def zero_queries(qkv, cache_ptr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return queries in parts, all zeros, for a loop that calls `begin_split` itself."""
    queries = tl.zeros((ROWS, HEAD_DIM), qkv.dtype.element_ty)
    return split_parts(to_dot_type(queries, cache_ptr), cache_ptr, ROWS, HEAD_DIM)


@triton.jit
def begin_split(
    qkv,
    q_norm_weight,
    k_norm_weight,
    rotary_table,
    key_cache,
    value_cache,
    pages,
    sequence,
    position,
    is_last,
    tile,
    eps,
    scale_log2,
    qkv_stride,
    NORM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return a split's queries and its softmax before any cached key.

    Returns (queries, acc, l_i, m_i), the first two in parts.

    Rows are the query heads of KEY_HEADS key heads, those of tile `tile`. A sequence's last split begins with the new
    token, taken from the QKV projection: its key and value are stored and attended to first. With PDL the projection,
    the previous kernel, is waited for here.
    """
    column = tl.broadcast_to(tl.arange(0, HEAD_DIM)[None, :], (ROWS, HEAD_DIM))
    partner_column = (column + HEAD_DIM // 2) % HEAD_DIM
    row = tl.arange(0, ROWS)
    # Rows past the heads repeat the last head: cheaper than a mask on every load.
    head = tl.minimum(row, KEY_HEADS * GROUP - 1)
    kv_head = tile * KEY_HEADS + head // GROUP
    # All loads are in flight before the first is waited for, and those of older data before the projection.
    new_page = tl.load(pages + position // PAGE_SIZE, is_last, other=0)
    rotary_ptrs = rotary_table + tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + column % (HEAD_DIM // 2)
    cos, sin = tl.load(rotary_ptrs), tl.load(rotary_ptrs + HEAD_DIM // 2)
    pdl_wait(PDL)
    token_ptr = qkv + sequence.to(tl.int64) * qkv_stride
    head_ptr = token_ptr + (tile * KEY_HEADS * GROUP + head)[:, None] * HEAD_DIM
    query, query_partners = tl.load(head_ptr + column), tl.load(head_ptr + partner_column)
    head_ptr = token_ptr + (KV_HEADS * GROUP + kv_head)[:, None] * HEAD_DIM
    key = tl.load(head_ptr + column, is_last, other=0.0)
    key_partners = tl.load(head_ptr + partner_column, is_last, other=0.0)
    value = tl.load(head_ptr + KV_HEADS * HEAD_DIM + column, is_last, other=0.0)
    sin = tl.where(column < HEAD_DIM // 2, -sin, sin)
    query = norm_and_rope_rows(
        query, query_partners, q_norm_weight, column, partner_column, cos, sin, eps, NORM, HEAD_DIM
    )
    acc, l_i, m_i = empty_softmax(value_cache, ROWS, HEAD_DIM)
    if is_last:
        key = norm_and_rope_rows(
            key, key_partners, k_norm_weight, column, partner_column, cos, sin, eps, NORM, HEAD_DIM
        )
        cached_key, cached_value = to_cache_type(key, key_cache), to_cache_type(value, value_cache)
        slot = ((new_page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column
        store_mask = ((row % GROUP == 0) & (row < KEY_HEADS * GROUP))[:, None]
        tl.store(key_cache + slot, cached_key, store_mask)
        tl.store(value_cache + slot, cached_value, store_mask)
        acc = split_parts(cached_value.to(tl.float32), value_cache, ROWS, HEAD_DIM)
        l_i = tl.full((ROWS,), 1.0, tl.float32)
        m_i = tl.sum(query.to(tl.float32) * cached_key.to(tl.float32), 1) * scale_log2
    return split_parts(to_dot_type(query, key_cache), key_cache, ROWS, HEAD_DIM), acc, l_i, m_i
