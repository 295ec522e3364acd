"""What the kernels of decode attention share: tiles of one size, and sequences cut into shares that are merged again.

A share of a sequence leaves its outputs and the logarithm of its exponentials' sum in rows of `partial` and `weights`;
`arrivals` counts the shares of each pair of a sequence and a key head.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache

import torch

from meltcore.kernels.attend import as_cached, as_multiplied, in_parts, rotated
from meltcore.kernels.jit import tl, triton

# Pairs of a sequence and a key head that can be split; more of them fill any GPU unsplit.
MOST_SPLIT_PAIRS = 2**16


def least_rows(group: int) -> int:
    """Rows of a tile for a group of query heads: tl.dot takes no fewer than 16."""
    return max(16, 1 << (group - 1).bit_length())


def block_keys_of(head_dim: int, element_bytes: int) -> int:
    """Keys of a block, of numbers in the cache of so many bytes. One of keys and one of values take at most 32 KiB: two
    in flight and three programs a processor keep 192 KiB on the way on Hopper (about 40 KiB would hide 1 us at
    4.4 TB/s), and 64 KiB still fits consumer GPUs.
    """
    return min(64, max(16, 2**14 // (head_dim * element_bytes)))


@lru_cache
def arrivals_of(device: torch.device) -> torch.Tensor:
    """How many shares of each sequence and key head are done: zeros before and after every launch.

    One for the device, since launches follow each other on one stream. Made once: captured graphs keep its address.
    """
    return torch.zeros(MOST_SPLIT_PAIRS, dtype=torch.int32, device=device)


@triton.jit
def merged(partial, weights, first, exists, share_stride, shares, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Heads whose first shares are in the rows `first`, [GROUP]: the outputs [GROUP, HEAD_DIM] of all their shares,
    weighted by the sums of their exponentials.

    Shares are always added in the same order. Other processors wrote them during this launch: reads go past the L1
    cache, which may hold older neighbours.
    """
    dims = tl.arange(0, HEAD_DIM)[None, None, :]
    split = tl.arange(0, BLOCK)[None, :]
    rows = first[:, None] + split * share_stride
    inside = exists[:, None] & (split < shares)
    # The first shares, most often all, are on their way before the largest weight is known.
    values = tl.load(partial + rows[:, :, None] * HEAD_DIM + dims, inside[:, :, None], other=0.0, cache_modifier=".cg")
    log = tl.load(weights + rows, inside, other=float("-inf"), cache_modifier=".cg")
    highest = tl.maximum(tl.max(log, 1), -1e38)  # finite in the rows that are no head
    weight = tl.exp2(log - highest[:, None])
    total = tl.sum(weight, 1)
    mixed = tl.sum(values * weight[:, :, None], 1)
    for done in range(BLOCK, shares, BLOCK):
        rows += BLOCK * share_stride
        inside = exists[:, None] & (done + split < shares)
        values = tl.load(
            partial + rows[:, :, None] * HEAD_DIM + dims, inside[:, :, None], other=0.0, cache_modifier=".cg"
        )
        log = tl.load(weights + rows, inside, other=float("-inf"), cache_modifier=".cg")
        raised = tl.maximum(highest, tl.max(log, 1))
        shrink = tl.exp2(highest - raised)
        weight = tl.exp2(log - raised[:, None])
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None] + tl.sum(values * weight[:, :, None], 1)
        highest = raised
    return mixed / tl.where(exists, total, 1.0)[:, None]


@triton.jit(noinline=True)
def all_written():
    """A barrier, out of sight: Triton 3.6 pipelines no loop in which it sees one.

    A called function must have no more to do: Triton 3.6 gives its shared memory the place of its caller's.
    """
    tl.debug_barrier()


@triton.jit
def hand_in(
    out,
    partial,
    weights,
    arrivals,
    mixed,
    total,
    highest,
    pair,
    split,
    shares,
    first,
    head_stride,
    share_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Leave share `split` of `pair`, a sequence and key head; who hands in the last writes the outputs of its group.

    mixed: [ROWS, HEAD_DIM], divided by `total` already. Share i of the group's head h is in row
    `first + h * head_stride + i * share_stride` of `partial`; the merge reads BLOCK shares at once.
    """
    row = tl.arange(0, ROWS)
    part = first + row * head_stride + split * share_stride
    tl.store(partial + part[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], mixed, (row < GROUP)[:, None])
    tl.store(weights + part, highest + tl.log2(total), row < GROUP)
    all_written()  # all of this program's share, before it is counted
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == shares - 1:
        tl.store(arrivals + pair, 0)
        member = tl.arange(0, triton.next_power_of_2(GROUP))
        exists = member < GROUP
        whole = merged(partial, weights, first + member * head_stride, exists, share_stride, shares, HEAD_DIM, BLOCK)
        result = out + (pair * GROUP + member)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(result, whole.to(out.dtype.element_ty), exists[:, None])


@triton.jit
def nothing_seen(cache_ptr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """(mixed, total, highest) before the first key, mixed in parts. Below every score and finite: a block without a
    visible key then adds nothing, and no NaN."""
    return (
        in_parts(tl.zeros((ROWS, HEAD_DIM), tl.float32), cache_ptr, ROWS, HEAD_DIM),
        tl.zeros((ROWS,), tl.float32),
        tl.full((ROWS,), -1e38, tl.float32),
    )


@triton.jit
def no_queries(qkv, cache_ptr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """What stands in `begin_share`'s place before a loop that begins its shares itself: queries in parts, all zeros."""
    queries = tl.zeros((ROWS, HEAD_DIM), qkv.dtype.element_ty)
    return in_parts(as_multiplied(queries, cache_ptr), cache_ptr, ROWS, HEAD_DIM)


@triton.jit
def begin_share(
    qkv,
    query_weight,
    key_weight,
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
    NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A share's queries, and what they have seen before its cached keys. Returns (queries, mixed, total, highest), the
    first two in parts.

    Rows are the query heads of KEY_HEADS key heads, the `tile`-th so many. A sequence's last share begins with the new
    token, straight from the product: its key and value are stored, and attended to first. With OVERLAP the product, the
    kernel in front, is waited for here.
    """
    column = tl.broadcast_to(tl.arange(0, HEAD_DIM)[None, :], (ROWS, HEAD_DIM))
    partner = (column + HEAD_DIM // 2) % HEAD_DIM
    row = tl.arange(0, ROWS)
    # Rows past the heads repeat the last of them: cheaper than a mask on every load.
    member = tl.minimum(row, KEY_HEADS * GROUP - 1)
    kv_head = tile * KEY_HEADS + member // GROUP
    # All loads are on their way before the first is waited for, and what the product does not write before the product.
    newest = tl.load(pages + position // PAGE_SIZE, is_last, other=0)
    turn = rotary_table + tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + column % (HEAD_DIM // 2)
    cos, sin = tl.load(turn), tl.load(turn + HEAD_DIM // 2)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    token = qkv + sequence.to(tl.int64) * qkv_stride
    own = token + (tile * KEY_HEADS * GROUP + member)[:, None] * HEAD_DIM
    query, query_partner = tl.load(own + column), tl.load(own + partner)
    own = token + (KV_HEADS * GROUP + kv_head)[:, None] * HEAD_DIM
    key = tl.load(own + column, is_last, other=0.0)
    key_partner = tl.load(own + partner, is_last, other=0.0)
    value = tl.load(own + KV_HEADS * HEAD_DIM + column, is_last, other=0.0)
    sin = tl.where(column < HEAD_DIM // 2, -sin, sin)
    query = rotated(query, query_partner, query_weight, column, partner, cos, sin, eps, NORMED, HEAD_DIM)
    mixed, total, highest = nothing_seen(value_cache, ROWS, HEAD_DIM)
    if is_last:
        key = rotated(key, key_partner, key_weight, column, partner, cos, sin, eps, NORMED, HEAD_DIM)
        held_key, held_value = as_cached(key, key_cache), as_cached(value, value_cache)
        slot = ((newest * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column
        once = ((row % GROUP == 0) & (row < KEY_HEADS * GROUP))[:, None]
        tl.store(key_cache + slot, held_key, once)
        tl.store(value_cache + slot, held_value, once)
        mixed = in_parts(held_value.to(tl.float32), value_cache, ROWS, HEAD_DIM)
        total = tl.full((ROWS,), 1.0, tl.float32)
        highest = tl.sum(query.to(tl.float32) * held_key.to(tl.float32), 1) * scale_log2
    return in_parts(as_multiplied(query, key_cache), key_cache, ROWS, HEAD_DIM), mixed, total, highest
