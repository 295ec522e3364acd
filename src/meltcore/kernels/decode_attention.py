"""Attention over a paged cache of one new token of many sequences (decode), and what prefill shares with it.

A cache is [pages, page_size, kv_heads, head_dim], contiguous. The page table is the engine's persistent one,
[rows, max_pages] int64: entry p of a row is the cache page of that sequence's tokens p * page_size and on. Softmax is
computed online in float32 (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

# tl.dot takes no fewer rows; a group of query heads is padded to it.
_LEAST_ROWS = 16


def decode_attention(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query a sequence to the sequence's first `lengths` tokens, itself included.

    queries: [sequences, heads, head_dim]; heads is a multiple of kv_heads; rows: [sequences] int64, each sequence's
    row in the page table; lengths: [sequences] int64, 0 for the padding of a CUDA graph: zeros come out and neither
    the table nor the caches are read. splits: into how many shares at most a sequence's keys are divided, a power of
    two; None to choose. Returns [sequences, heads, head_dim], in `out` where it is given.
    """
    if out is None:
        out = queries.new_empty(queries.shape)
    body = _decode_triton if use_triton(queries) else _decode_torch
    body(queries, key_cache, value_cache, page_table, rows, lengths, scale, out, splits)
    return out


def _decode_torch(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    splits: int | None,
) -> None:
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        keys, values = gather_pages(key_cache, value_cache, page_table[row], length)
        out[i] = attend_torch(queries[i : i + 1], keys, values, length - 1, scale)[0]


def gather_pages(
    key_cache: torch.Tensor, value_cache: torch.Tensor, pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's keys and values: [length, kv_heads, head_dim]."""
    used = pages[: -(-length // key_cache.shape[1])]
    return key_cache[used].flatten(0, 1)[:length], value_cache[used].flatten(0, 1)[:length]


def attend_torch(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """Dense causal attention in float32. Query i sits at position start + i. Without keys, zeros."""
    count, heads, head_dim = queries.shape
    length, kv_heads, _ = keys.shape
    grouped = queries.float().view(count, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.float()) * scale
    position = torch.arange(start, start + count, device=queries.device)
    hidden = torch.arange(length, device=queries.device) > position[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = torch.einsum("hgqk,khd->qhgd", weights, values.float())
    return mixed.reshape(count, heads, head_dim).to(queries.dtype)


class DecodeLaunch(NamedTuple):
    """How the work of a decode step is cut up. See `decode_launch`."""

    splits: int
    share_pages: int
    block_keys: int
    warps: int
    stages: int


def decode_launch(
    sequences: int, kv_heads: int, head_dim: int, element_bytes: int, max_pages: int, processors: int
) -> DecodeLaunch:
    """Fixed by the shapes alone, so that a graph can capture it; lengths are known to the device only.

    A share is `share_pages` pages, or more where a sequence has more than `splits` such shares: long sequences get
    more programs, and all programs are of about one length. Few sequences are cut finely, so that every processor
    has work; with many, a share is long enough (8 pages) to repay its start and its place in the merge. Programs past a
    sequence's end still cost their start, so the grid is held to 64 a processor, and only up to 64 pages (4,096
    tokens) is a sequence cut as finely as this.
    """
    pairs = sequences * kv_heads
    share_pages = min(8, max(1, 4 * pairs // processors))
    most = min(64 // share_pages, max(1, 64 * processors // pairs), -(-max_pages // share_pages))
    splits = 1 << (most.bit_length() - 1)
    # A block of keys and one of values take at most 32 KiB: two in flight and three programs a processor keep 192 KiB
    # on the way on Hopper (about 40 KiB would hide 1 us at 4.4 TB/s), and 64 KiB still fits consumer GPUs.
    block_keys = min(64, max(16, 2**14 // (head_dim * element_bytes)))
    return DecodeLaunch(splits, share_pages, block_keys, warps=4, stages=3)


def _decode_triton(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    splits: int | None,
    launch: DecodeLaunch | None = None,
) -> None:
    sequences, heads, head_dim = queries.shape
    _, page_size, kv_heads, _ = key_cache.shape
    require_layout(queries, key_cache, value_cache, page_table, out)
    if sequences == 0:
        return
    if launch is None:
        processors = _processors(queries.device)
        launch = decode_launch(sequences, kv_heads, head_dim, queries.element_size(), page_table.shape[1], processors)
    if splits is not None:
        launch = launch._replace(splits=splits)
    # In tokens: a multiple of 16 and never 1, so that one compiled kernel serves every value.
    least_share = launch.share_pages * page_size
    partial, weights = out, out  # unused where there is nothing to merge
    if launch.splits > 1:
        partial = torch.empty(sequences, heads, launch.splits, head_dim, dtype=torch.float32, device=out.device)
        weights = torch.empty(sequences, heads, launch.splits, dtype=torch.float32, device=out.device)
    # Key heads vary fastest: programs that run together read neighbouring parts of the same pages. Splits vary
    # slowest: the programs without work are the last.
    _decode_kernel[(kv_heads, sequences, launch.splits)](
        queries,
        key_cache,
        value_cache,
        page_table,
        rows,
        lengths,
        out,
        partial,
        weights,
        scale * math.log2(math.e),
        least_share,
        queries.stride(0),
        page_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(heads // kv_heads)),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_KEYS=launch.block_keys,
        MERGED=launch.splits > 1,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if launch.splits > 1:
        _merge_kernel[(heads, sequences)](
            partial,
            weights,
            lengths,
            out,
            least_share,
            HEADS=heads,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            SPLITS=launch.splits,
            num_warps=4,
        )


def require_layout(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Queries may be a part of a fused projection's output; the rest must be plain."""
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and out.is_contiguous()):
        raise ValueError("caches and output must be contiguous")
    if queries.stride()[1:] != (queries.shape[2], 1) or page_table.stride(1) != 1:
        raise ValueError("a query's heads and a sequence's page numbers must be contiguous")


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def attend_block(queries, keys, values, visible, mixed, total, highest, scale_log2, MASKED: tl.constexpr):
    """One block of the online softmax, in powers of two. Returns the new (mixed, total, highest)."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp2(highest - raised)
    weights = tl.exp2(scores - raised[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return mixed, total, raised


@triton.jit
def _share(length, splits, least_share, PAGE_SIZE: tl.constexpr):
    """Tokens in a split's share of a sequence: whole pages."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, PAGE_SIZE), splits) * PAGE_SIZE, least_share)


@triton.jit
def _decode_kernel(
    queries,
    key_cache,
    value_cache,
    page_table,
    rows,
    lengths,
    out,
    partial,
    weights,
    scale_log2,
    least_share,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One share of one sequence for one key head: its query heads are the rows of a tile."""
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    share = _share(length, splits, least_share, PAGE_SIZE)
    first = split * share
    last = tl.minimum(first + share, length)
    if MERGED and first >= length:
        return

    member = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + member
    in_group = member < GROUP
    query = tl.load(
        queries + sequence * query_stride + head[:, None] * HEAD_DIM + dims[None, :], in_group[:, None], other=0.0
    )
    mixed = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)

    pages = page_table + tl.load(rows + sequence) * table_stride
    block = tl.arange(0, BLOCK_KEYS)
    within = (block[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
    # A page's number is loaded one block ahead of its keys, whose addresses wait for it.
    page = tl.load(pages + first // PAGE_SIZE, first < last, other=0)
    for start in range(first, last, BLOCK_KEYS):
        following = start + BLOCK_KEYS
        next_page = tl.load(pages + following // PAGE_SIZE, following < last, other=0)
        base = (page * PAGE_SIZE + start % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
        exists = start + block < last
        keys = tl.load(key_cache + base + within, exists[:, None], other=0.0)
        values = tl.load(value_cache + base + within, exists[:, None], other=0.0)
        mixed, total, highest = attend_block(
            query, keys, values, exists[None, :], mixed, total, highest, scale_log2, MASKED=True
        )
        page = next_page

    place = sequence * KV_HEADS * GROUP + head
    if MERGED:
        place = place * splits + split
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], mixed / total[:, None], in_group[:, None])
        tl.store(weights + place, highest + tl.log2(total), in_group)
    else:
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], mixed.to(out.dtype.element_ty), in_group[:, None])


@triton.jit
def _merge_kernel(
    partial,
    weights,
    lengths,
    out,
    least_share,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One head of one sequence: its shares' outputs, weighted by the sums of their exponentials."""
    place = tl.program_id(1).to(tl.int64) * HEADS + tl.program_id(0)
    length = tl.load(lengths + tl.program_id(1)).to(tl.int32)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    exists = splits * _share(length, SPLITS, least_share, PAGE_SIZE) < length
    weight = tl.load(weights + place * SPLITS + splits, exists, other=float("-inf"))
    # A finite floor, so that a sequence without shares gives zeros, not NaN.
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), -1e38))
    parts = tl.load(partial + (place * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :], exists[:, None], other=0.0)
    total = tl.sum(weight, 0)
    mixed = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * HEAD_DIM + dims, mixed.to(out.dtype.element_ty))


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    queries = torch.empty(64, model.heads, model.head_dim, dtype=dtype, device="meta")
    cache = torch.empty(128, model.page_size, model.kv_heads, model.head_dim, dtype=dtype, device="meta")
    table = torch.empty(64, 640, dtype=torch.int64, device="meta")
    return [
        lambda: _decode_triton(queries, cache, cache, table, table[:, 0], table[:, 0], 1.0, queries, 1),
        lambda: _decode_triton(queries, cache, cache, table, table[:, 0], table[:, 0], 1.0, queries, 16),
    ]
