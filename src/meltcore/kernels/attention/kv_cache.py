"""Stores keys and values of the QKV projection in the paged cache, and computes rotated queries.

The attention kernels normalize and rotate queries as they load them. Writing and reading queries once more would double
the memory traffic of this kernel.
"""

from __future__ import annotations

import torch

from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.fp8.fp8 import FP8, FP8_MAX
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton
from meltcore.kernels.norm import rms_norm_reference, round_before_weight
from meltcore.kernels.rotary import apply_rope

# Elements of the heads that one program rotates. A thread then has 8 of each half of a head: 16-byte accesses in
# 16-bit types. One program per token for 8 key heads of 128.
_BLOCK = 1024


def store_kv(qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor, slots: torch.Tensor) -> None:
    """Normalize and rotate the keys of each head, and store keys and values in the cache.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values.
        params: the parameters of the layer.
        positions: [tokens] int64.
        slots: [tokens] int64. A slot is page * page_size + offset.
    """
    if not use_triton(qkv):
        store_kv_reference(qkv, params, positions, slots)
        return
    norms, rotary_table, key_cache, value_cache, *_ = params
    kv_heads, head_dim = key_cache.shape[2:]
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(max(1, _BLOCK // (2 * half)), triton.next_power_of_2(kv_heads))
    _store_kv_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        *(qkv[:, -2 * kv_heads * head_dim :], norms.key if norms else qkv, rotary_table, positions, slots),
        key_cache.view(-1, kv_heads, head_dim),  # raises where slots are not evenly spaced
        value_cache.view(-1, kv_heads, head_dim),
        *(norms.eps if norms else 0.0, qkv.stride(0)),
        NORM=norms is not None,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        HALF=half,
        num_warps=max(1, heads * half // 256),
    )


def store_kv_reference(
    qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """Compute `store_kv` in PyTorch, as its specification."""
    kv_heads, head_dim = params.key_cache.shape[2:]
    keys, values = qkv.unflatten(-1, (-1, head_dim))[:, -2 * kv_heads :].split(kv_heads, dim=1)
    if params.norms is not None:
        keys = rms_norm_reference(keys, params.norms.key, params.norms.eps)
    _store_reference(params.key_cache, slots, apply_rope(keys, params.rotary_table, positions))
    _store_reference(params.value_cache, slots, values)


def _store_reference(cache: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor) -> None:
    """Store heads [tokens, kv_heads, head_dim] at their tokens' slots, rounded to the type of the cache."""
    rows = cache.flatten(0, 1)
    if cache.dtype == FP8:
        # Beyond the largest number the conversion would give NaN; and index_copy_ takes bytes, but not e4m3.
        heads = heads.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        rows = rows.view(torch.uint8)
    rows.index_copy_(0, slots, heads)


def rotated_queries(qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor) -> torch.Tensor:
    """Return the queries of a QKV projection, normalized and rotated in PyTorch: [tokens, heads, head_dim]."""
    queries = qkv.unflatten(-1, (-1, params.key_cache.shape[3]))[:, : -2 * params.key_cache.shape[2]]
    if params.norms is not None:
        queries = rms_norm_reference(queries, params.norms.query, params.norms.eps)
    return apply_rope(queries, params.rotary_table, positions)


def attention_reference(
    queries: torch.Tensor, params: AttentionParams, pages: torch.Tensor, context_len: int
) -> torch.Tensor:
    """Compute dense causal attention of one sequence in PyTorch and in float32, as the kernels' specification.

    Keys before the first query's sliding window are not read.

    Args:
        queries: [queries, heads, head_dim]. Query i is at position context_len + i.
        params: the parameters of the layer.
        pages: the sequence's row of the page table.
        context_len: the number of tokens before the first query.
    """
    num_queries, heads, head_dim = queries.shape
    page_size, kv_heads = params.key_cache.shape[1:3]
    length, window = context_len + num_queries, params.sliding_window
    oldest_pos = 0 if window is None else max(context_len - window + 1, 0)
    used_pages = pages[oldest_pos // page_size : -(-length // page_size)]
    key_slice = slice(oldest_pos % page_size, oldest_pos % page_size + length - oldest_pos)
    keys, values = (
        cache[used_pages].flatten(0, 1)[key_slice].float() for cache in (params.key_cache, params.value_cache)
    )
    grouped_queries = queries.float().view(num_queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped_queries, keys) * params.scale
    positions = torch.arange(context_len, length, device=queries.device)[:, None]
    key_positions = torch.arange(oldest_pos, length, device=queries.device)
    is_masked = key_positions > positions
    if window is not None:
        is_masked |= key_positions <= positions - window
    probs = scores.masked_fill(is_masked, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", probs, values).reshape(num_queries, heads, head_dim).to(queries.dtype)


@triton.jit
def to_cache_type(heads, cache_ptr):
    """Round heads to the type of the cache; e4m3 saturates."""
    dtype = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        heads = tl.minimum(tl.maximum(heads.to(tl.float32), -448.0), 448.0)
    return heads.to(dtype)


@triton.jit
def norm_and_rope(head_ptrs, mask, weight_ptr, eps, cos, sin, NORM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the halves of the heads at `head_ptrs`, normalized and rotated: [HEADS, HALF] float32 each.

    Values are rounded where the reference rounds them.
    """
    first_half = tl.load(head_ptrs, mask=mask, other=0.0)
    dtype = first_half.dtype
    first_half = first_half.to(tl.float32)
    second_half = tl.load(head_ptrs + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        first_weight = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(first_half * first_half + second_half * second_half, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first_half = (
            (round_before_weight(first_half * scale, weight_ptr, dtype) * first_weight).to(dtype).to(tl.float32)
        )
        second_half = (
            (round_before_weight(second_half * scale, weight_ptr, dtype) * second_weight).to(dtype).to(tl.float32)
        )
    return first_half * cos - second_half * sin, second_half * cos + first_half * sin


# A step's positions and slots are slices at any offset: specialized on their alignment, each would be compiled anew.
@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def _store_kv_kernel(
    kv_ptr,
    weight_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    key_cache_ptr,
    value_cache_ptr,
    eps,
    qkv_stride,
    NORM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Each program stores the keys and values of HEADS heads of one token.

    Norm weights, cosines and sines are loaded as [HEADS, HALF] tiles, in the register layout of the keys. Broadcasting
    a single row would need a layout conversion through shared memory.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], (HEADS, HALF))
    in_half = column < HEAD_DIM // 2
    rotary_ptrs = table_ptr + tl.load(positions_ptr + token) * HEAD_DIM + column
    cos = tl.load(rotary_ptrs, mask=in_half, other=0.0)
    sin = tl.load(rotary_ptrs + HEAD_DIM // 2, mask=in_half, other=0.0)
    mask = (head < KV_HEADS) & in_half
    offset = head * HEAD_DIM + column
    cache_offset = tl.load(slots_ptr + token) * (KV_HEADS * HEAD_DIM) + offset
    key_ptrs = kv_ptr + token * qkv_stride + offset
    value_ptrs = key_ptrs + KV_HEADS * HEAD_DIM
    # Loaded before the keys are used, so that both loads are in flight together.
    value_first = tl.load(value_ptrs, mask=mask, other=0.0)
    value_second = tl.load(value_ptrs + HEAD_DIM // 2, mask=mask, other=0.0)
    first_half, second_half = norm_and_rope(key_ptrs, mask, weight_ptr + column, eps, cos, sin, NORM, HEAD_DIM)
    first_half, second_half = first_half.to(value_first.dtype), second_half.to(value_first.dtype)
    tl.store(key_cache_ptr + cache_offset, to_cache_type(first_half, key_cache_ptr), mask=mask)
    tl.store(key_cache_ptr + cache_offset + HEAD_DIM // 2, to_cache_type(second_half, key_cache_ptr), mask=mask)
    tl.store(value_cache_ptr + cache_offset, to_cache_type(value_first, value_cache_ptr), mask=mask)
    tl.store(value_cache_ptr + cache_offset + HEAD_DIM // 2, to_cache_type(value_second, value_cache_ptr), mask=mask)


@triton.jit
def load_queries(heads, rotary_rows, weight, eps, NORM: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the query heads at `heads`, normalized and rotated.

    heads, rotary_rows: [ROWS] pointers to the heads and to their rows of the rotary table.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], (ROWS, HALF))
    rotary_ptrs = rotary_rows[:, None] + column
    cos, sin = tl.load(rotary_ptrs), tl.load(rotary_ptrs + HALF)
    mask = tl.full((ROWS, HALF), True, tl.int1)
    head_ptrs = heads[:, None] + column
    first_half, second_half = norm_and_rope(head_ptrs, mask, weight + column, eps, cos, sin, NORM, HEAD_DIM)
    dtype = heads.dtype.element_ty
    halves = tl.join(first_half.to(dtype), second_half.to(dtype))
    return tl.reshape(tl.permute(halves, (0, 2, 1)), (ROWS, HEAD_DIM))
