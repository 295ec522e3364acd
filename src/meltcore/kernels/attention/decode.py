"""Attention of one new token of many sequences (decode) over a paged cache.

A cache is [pages, page_size, kv_heads, head_dim], contiguous. The page table is the engine's persistent table, [rows,
max_pages] int64. Entry p of a row is the cache page of the sequence's tokens from p * page_size on.

One kernel takes a token from the QKV projection to its attention. The program of a sequence's last split stores the new
key and value. The program that finishes last combines the sequence's KV splits. This replaces three launches per layer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meltcore.kernels.attention.blocks import as_pairs, attend_block, join_parts, oldest_key
from meltcore.kernels.attention.kv_cache import attention_reference, rotated_queries, store_kv_reference
from meltcore.kernels.attention.metadata import AttentionParams, require_layout
from meltcore.kernels.attention.split_kv import (
    MAX_SPLIT_PAIRS,
    arrival_counters,
    begin_split,
    block_keys,
    decode_tensors,
    empty_softmax,
    finish_split,
    tile_rows,
    zero_queries,
)
from meltcore.kernels.attention.stream_k import StreamK, decode_stream_k, stream_k_for
from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait, use_triton

# Shared memory of a program by its stages: one block of keys and values less, 32 KiB each, and a little more.
_PROGRAM_BYTES = {3: 72 * 2**10, 4: 104 * 2**10}
# KV splits of a sequence. More would take longer to combine than they save.
_MAX_SPLITS = 64
# So few pairs of a sequence and a key head leave most SMs idle: combining their splits takes as long as attending.
_FEW_PAIRS_WARPS, _FEW_PAIRS_STAGES, _FEW_PAIRS_COMBINED = 8, 2, 32


class DecodeLaunch(NamedTuple):
    """The launch parameters of a decode step, which divide its work. See `decode_launch`.

    Args:
        splits: the maximum number of KV splits of a sequence, a power of two.
        combined: the number of splits that are combined at a time.
        prefetch: whether a split starts, and loads its first blocks, before the previous kernel has ended.
    """

    splits: int
    split_pages: int
    block_keys: int
    warps: int
    stages: int
    prefetch: bool
    combined: int = 8


def decode_attention(
    qkv: torch.Tensor,
    params: AttentionParams,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    page_table_rows: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    launch: DecodeLaunch | StreamK | None = None,
) -> torch.Tensor:
    """Store the key and value of one new token per sequence as `store_kv` does, and attend to the token's sequence.

    Args:
        qkv: [sequences, (heads + 2 * kv_heads) * head_dim], heads a multiple of kv_heads (grouped-query attention).
        params: the parameters of the layer.
        positions: [sequences] int64, positions of the new tokens, or -1 for the padding of a CUDA graph. Outputs of
            padding are zeros, and neither the page table nor the caches are accessed.
        page_table: [rows, max_pages] int64. Entries before the page of a window's oldest key, and their pages, are not
            read.
        page_table_rows: [sequences] int64, each sequence's row in the page table.
        out: memory for the result. None allocates new memory.
        launch: the launch parameters. None selects them by size.

    Returns [sequences, heads, head_dim].
    """
    if out is None:
        out = params.empty_output(qkv)
    if not use_triton(qkv):
        decode_attention_reference(qkv, params, positions, page_table, page_table_rows, out)
        return out
    require_layout(qkv, params, page_table, out)
    if qkv.shape[0] == 0:  # len() of a tensor costs a microsecond more
        return out
    launch = launch or _select_launch(out, params, page_table)
    if isinstance(launch, StreamK):
        decode_stream_k(qkv, params, positions, page_table, page_table_rows, out, launch)
    else:
        _decode_split_kv(qkv, params, positions, page_table, page_table_rows, out, launch)
    return out


def decode_attention_reference(
    qkv: torch.Tensor,
    params: AttentionParams,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    page_table_rows: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute `decode_attention` in PyTorch, as its specification."""
    out.zero_()
    valid = (positions >= 0).nonzero()[:, 0]
    positions, page_table_rows = positions[valid], page_table_rows[valid]
    page_size = params.key_cache.shape[1]
    slots = page_table[page_table_rows, positions // page_size] * page_size + positions % page_size
    store_kv_reference(qkv[valid], params, positions, slots)
    queries = rotated_queries(qkv[valid], params, positions)
    for i, (row, position) in enumerate(zip(page_table_rows.tolist(), positions.tolist(), strict=True)):
        out[valid[i]] = attention_reference(queries[i : i + 1], params, page_table[row], position)[0]


def decode_launch(
    sequences: int,
    kv_heads: int,
    head_dim: int,
    element_bytes: int,
    max_pages: int,
    sms: int,
    shared_bytes: int,
) -> DecodeLaunch:
    """Return the launch parameters for these shapes. They do not depend on lengths, so a graph can capture the launch.

    A split is about `split_pages` pages, or more if a sequence would have more than `splits` such splits. All splits of
    a sequence have about the same length.

    With few sequences, programs start early, and a sequence gets as many splits as can run concurrently. Such programs
    have three or four stages, whichever leaves less shared memory empty. Many sequences are best left whole (400
    sequences of 640 tokens: 97 % of read bandwidth, 89 % in two splits each; H200, 2026-11-21). Very long sequences
    among many are still split, since each would delay the end of the launch. A second program per sequence costs almost
    nothing if it finds no split. With heads of 256 the second program costs time: 206 instead of 165 us at 256
    sequences of 1,280 tokens (2026-11-22).

    For a sequence of 4 key heads, or of 2 with 256 dims, programs have 8 warps and combine up to 32 splits at a time.
    This saves 2.3 us for a layer of Qwen3-30B-A3B and 5 us for a layer of Qwen3.5-35B-A3B, both with 1,166 tokens
    (2026-11-29).

    Args:
        sequences: the number of sequences.
        kv_heads: the number of key heads.
        head_dim: the size of a head.
        element_bytes: the bytes of a cache element.
        max_pages: the maximum number of pages with keys of one query.
        sms: the number of SMs of the device.
        shared_bytes: the shared memory of an SM.
    """
    num_pairs = sequences * kv_heads
    prefetch = num_pairs < sms
    few_pairs_splits = 32 if head_dim <= 128 else _MAX_SPLITS
    if num_pairs * few_pairs_splits <= sms and element_bytes > 1:
        return DecodeLaunch(
            splits=1 << (min(few_pairs_splits, max_pages).bit_length() - 1),
            split_pages=1,
            block_keys=block_keys(head_dim, element_bytes),
            warps=_FEW_PAIRS_WARPS,
            stages=_FEW_PAIRS_STAGES,
            prefetch=prefetch,
            combined=_FEW_PAIRS_COMBINED,
        )
    if prefetch:
        split_pages = 1
        stages, launch_max_splits = _splits_for_small_batch(num_pairs, sms, shared_bytes)
    else:
        split_pages, stages, launch_max_splits = 32, 3, 2 if num_pairs <= 32 * sms and head_dim <= 128 else 1
    splits = 1 << (min(launch_max_splits, _MAX_SPLITS, -(-max_pages // split_pages)).bit_length() - 1)
    # Heads of 256: 165 us by 8 warps and 179 by 4 at 256 sequences of 1,280 tokens, but 80 and 59 at 64; in FP8 100 and
    # 97 at 256 (H200, 2026-11-22).
    warps = 8 if head_dim > 128 and not prefetch and element_bytes > 1 else 4
    if element_bytes == 1 and not prefetch:
        # Blocks have half the bytes and take as many instructions; with 128 dims four programs still fit. With 256 dims
        # they have all bytes again, and the fourth stage takes 106 KiB in all.
        stages = 4 if head_dim <= 128 or shared_bytes > 106 * 2**10 else 3
    elif element_bytes == 1 and head_dim <= 128:
        stages = 2 * stages - 1  # twice as many blocks of half the bytes in flight
    return DecodeLaunch(splits, split_pages, block_keys(head_dim, element_bytes), warps, stages, prefetch)


def _splits_for_small_batch(num_pairs: int, sms: int, shared_bytes: int) -> tuple[int, int]:
    """Return the stages and maximum splits (a power of two) of a sequence that leave the fewest SM slots empty."""
    candidates = []
    for stages, program_bytes in _PROGRAM_BYTES.items():
        programs = sms * (shared_bytes // program_bytes)
        splits = 1 << (max(1, programs // num_pairs).bit_length() - 1)
        candidates.append((num_pairs * splits / programs if programs else 0.0, stages, splits))
    _, stages, splits = max(candidates)
    return stages, splits


def _select_launch(out: torch.Tensor, params: AttentionParams, page_table: torch.Tensor) -> DecodeLaunch | StreamK:
    (sequences, heads, head_dim), kv_heads, device = out.shape, params.key_cache.shape[2], out.device
    return stream_k_for(sequences, heads, kv_heads, head_dim, device) or decode_launch(
        *(sequences, kv_heads, head_dim, params.key_cache.element_size(), params.max_query_pages(page_table.shape[1])),
        *(sm_count(device), shared_memory_bytes(device)),
    )


def _decode_split_kv(
    qkv: torch.Tensor,
    params: AttentionParams,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    page_table_rows: torch.Tensor,
    out: torch.Tensor,
    launch: DecodeLaunch,
) -> None:
    sequences, heads, head_dim = out.shape
    _, page_size, kv_heads, _ = params.key_cache.shape
    norms, splits = params.norms, launch.splits
    partial = lse = arrivals = out  # unused where sequences are whole
    if splits > 1:
        if sequences * kv_heads > MAX_SPLIT_PAIRS:
            raise ValueError(f"{sequences} sequences of {kv_heads} key heads cannot be split")
        partial = torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(sequences, heads, splits, dtype=torch.float32, device=out.device)
        arrivals = arrival_counters(out.device)
    # Key heads vary fastest: programs that run together read neighboring parts of the same pages. Splits vary
    # slowest: programs without work are the last.
    _decode_kernel[(kv_heads, sequences, splits)](
        *decode_tensors(qkv, params, positions, page_table, page_table_rows, out),
        *(partial, lse, arrivals, norms.eps if norms else 0.0, params.scale * math.log2(math.e)),
        *(launch.split_pages, qkv.stride(0), page_table.stride(0), params.sliding_window),
        NORM=norms is not None,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        ROWS=tile_rows(heads // kv_heads),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_KEYS=launch.block_keys,
        SPLIT=splits > 1,
        PREFETCH=launch.prefetch,
        COMBINED=launch.combined,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **pdl_options(qkv.device, launch.prefetch),
    )


@triton.jit(do_not_specialize=["min_pages", "window"])
def _decode_kernel(
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
    eps,
    scale_log2,
    min_pages,
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
    PREFETCH: tl.constexpr,
    COMBINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes one KV split of one sequence and key head, whose query heads are the rows of a tile."""
    READ_DIM: tl.constexpr = HEAD_DIM // 2 if key_cache.dtype.element_ty == tl.float8e4nv else HEAD_DIM
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split, max_splits = tl.program_id(2), tl.num_programs(2)
    pdl_launch_dependents(PDL)
    position = tl.load(positions + sequence).to(tl.int32)
    pages = page_table + tl.load(rows + sequence) * table_stride
    # Splits are multiples of the page size and have about one length. The first begins at the first block with a key in
    # the window. The new token, not in the cache yet, counts as the last key.
    oldest_pos = oldest_key(position, window)
    first_key = oldest_pos // BLOCK_KEYS * BLOCK_KEYS
    used_pages = tl.maximum(tl.cdiv(position + 1 - first_key, PAGE_SIZE), 1)
    split_keys = tl.cdiv(used_pages, tl.minimum(tl.cdiv(used_pages, min_pages), max_splits)) * PAGE_SIZE
    split_start = first_key + split * split_keys
    split_end = tl.minimum(split_start + split_keys, position)
    row = tl.arange(0, ROWS)
    in_group = (row < GROUP)[:, None]
    dims = tl.arange(0, HEAD_DIM)
    head = (sequence * KV_HEADS + kv_head) * GROUP + row
    out_ptrs = out + head[:, None] * HEAD_DIM + dims[None, :]
    if split_start > position:
        # Before any program may exit: this kernel must not end before the previous one.
        pdl_wait(PDL)
        if position < 0 and split == 0:
            tl.store(out_ptrs, tl.zeros((ROWS, HEAD_DIM), out.dtype.element_ty), in_group)
        return

    page = tl.load(pages + split_start // PAGE_SIZE)
    key_offset = tl.arange(0, BLOCK_KEYS)
    block_offsets = (key_offset[:, None] * KV_HEADS + kv_head) * READ_DIM + tl.arange(0, READ_DIM)[None, :]
    key_blocks, value_blocks = as_pairs(key_cache), as_pairs(value_cache)
    is_last = position < split_start + split_keys
    if PREFETCH:
        queries = zero_queries(qkv, key_cache, ROWS, HEAD_DIM)
        acc, l_i, m_i = empty_softmax(value_cache, ROWS, HEAD_DIM)
    else:
        queries, acc, l_i, m_i = begin_split(
            *(qkv, q_norm_weight, k_norm_weight, rotary_table, key_cache, value_cache, pages, sequence, position),
            *(is_last, kv_head, eps, scale_log2, qkv_stride),
            *(NORM, KV_HEADS, GROUP, 1, ROWS, HEAD_DIM, PAGE_SIZE, PDL),
        )
    # At least one block, if only to begin. A page number is loaded one block ahead of its keys, whose addresses need
    # it.
    for block_key in range(split_start, tl.maximum(split_end, split_start + 1), BLOCK_KEYS):
        next_block = block_key + BLOCK_KEYS
        next_page = tl.load(pages + next_block // PAGE_SIZE, next_block < split_end, other=0)
        block_start = (page * PAGE_SIZE + block_key % PAGE_SIZE) * (KV_HEADS * READ_DIM)
        key_mask = block_key + key_offset < split_end
        if window is not None:
            key_mask &= block_key + key_offset >= oldest_pos
        keys = tl.load(key_blocks + block_start + block_offsets, key_mask[:, None], other=0.0)
        values = tl.load(value_blocks + block_start + block_offsets, key_mask[:, None], other=0.0)
        if PREFETCH and block_key == split_start:  # in the loop, whose first blocks are in flight before it is entered
            queries, acc, l_i, m_i = begin_split(
                *(qkv, q_norm_weight, k_norm_weight, rotary_table, key_cache, value_cache, pages, sequence, position),
                *(is_last, kv_head, eps, scale_log2, qkv_stride),
                *(NORM, KV_HEADS, GROUP, 1, ROWS, HEAD_DIM, PAGE_SIZE, PDL),
            )
        acc, l_i, m_i = attend_block(queries, keys, values, key_mask[None, :], acc, l_i, m_i, scale_log2, MASKED=True)
        page = next_page

    acc = join_parts(acc, ROWS, HEAD_DIM) / l_i[:, None]
    splits = tl.cdiv(position + 1 - first_key, split_keys)
    if not SPLIT:  # noqa: SIM114, a constant: the combine is not compiled in
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), in_group)
    elif splits == 1:
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), in_group)
    else:
        pair = sequence * KV_HEADS + kv_head
        first_row = pair * GROUP * max_splits
        finish_split(
            *(out, partial, lse, arrivals, acc, l_i, m_i, pair, split, splits, first_row, max_splits, 1),
            *(ROWS, GROUP, HEAD_DIM, COMBINED),
        )
