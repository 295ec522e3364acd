"""Stores keys and values of the QKV projection in the paged cache, and computes rotated queries.

Queries are normalized and rotated by the attention kernels themselves, as they load them: written and read once more,
they would be half of the memory traffic here.
"""

from __future__ import annotations

import torch

from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton
from meltcore.kernels.norm import rms_norm_reference, round_before_weight
from meltcore.kernels.quant.fp8 import FP8, FP8_MAX
from meltcore.kernels.rotary import apply_rope

# Elements of the heads that one program rotates. A thread then has 8 of each half of a head: 16-byte accesses in
# 16-bit types. One program per token for 8 key heads of 128.
_BLOCK = 1024


def store_kv(qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor, slots: torch.Tensor) -> None:
    """Normalize and rotate keys head by head, and store them and the values in the cache.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], in that order; positions, slots: [tokens] int64, a slot is
    page * page_size + offset.
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
    """`store_kv` in PyTorch."""
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
    """The queries of a QKV projection, normalized and rotated, in PyTorch: [tokens, heads, head_dim]."""
    queries = qkv.unflatten(-1, (-1, params.key_cache.shape[3]))[:, : -2 * params.key_cache.shape[2]]
    if params.norms is not None:
        queries = rms_norm_reference(queries, params.norms.query, params.norms.eps)
    return apply_rope(queries, params.rotary_table, positions)


def attention_reference(
    queries: torch.Tensor, params: AttentionParams, pages: torch.Tensor, start: int
) -> torch.Tensor:
    """Dense causal attention of one sequence in PyTorch, computed in float32.

    queries: [count, heads, head_dim], query i at position start + i; pages: the sequence's row of the page table. What
    precedes the first query's sliding window is not read.
    """
    count, heads, head_dim = queries.shape
    page_size, kv_heads = params.key_cache.shape[1:3]
    length, window = start + count, params.sliding_window
    oldest = 0 if window is None else max(start - window + 1, 0)
    used = pages[oldest // page_size : -(-length // page_size)]
    span = slice(oldest % page_size, oldest % page_size + length - oldest)
    keys, values = (cache[used].flatten(0, 1)[span].float() for cache in (params.key_cache, params.value_cache))
    grouped = queries.float().view(count, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * params.scale
    positions = torch.arange(start, length, device=queries.device)[:, None]
    key_positions = torch.arange(oldest, length, device=queries.device)
    masked = key_positions > positions
    if window is not None:
        masked |= key_positions <= positions - window
    weights = scores.masked_fill(masked, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(count, heads, head_dim).to(queries.dtype)


@triton.jit
def to_cache_type(heads, cache_ptr):
    """Round heads to the type of the cache; e4m3 saturates."""
    dtype = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        heads = tl.minimum(tl.maximum(heads.to(tl.float32), -448.0), 448.0)
    return heads.to(dtype)


@triton.jit
def norm_and_rope(source, mask, weight_ptr, eps, cos, sin, NORM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The halves of the heads at `source`, normalized and rotated: [HEADS, HALF] float32 each.

    Values are rounded where the reference rounds them.
    """
    first = tl.load(source, mask=mask, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        weight_first = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
        weight_second = tl.load(weight_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = (round_before_weight(first * scale, weight_ptr, dtype) * weight_first).to(dtype).to(tl.float32)
        second = (round_before_weight(second * scale, weight_ptr, dtype) * weight_second).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


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
    rotary = table_ptr + tl.load(positions_ptr + token) * HEAD_DIM + column
    cos = tl.load(rotary, mask=in_half, other=0.0)
    sin = tl.load(rotary + HEAD_DIM // 2, mask=in_half, other=0.0)
    mask = (head < KV_HEADS) & in_half
    offset = head * HEAD_DIM + column
    slot = tl.load(slots_ptr + token) * (KV_HEADS * HEAD_DIM) + offset
    keys = kv_ptr + token * qkv_stride + offset
    values = keys + KV_HEADS * HEAD_DIM
    # Loaded before the keys are used, so that both loads are in flight together.
    value_first = tl.load(values, mask=mask, other=0.0)
    value_second = tl.load(values + HEAD_DIM // 2, mask=mask, other=0.0)
    first, second = norm_and_rope(keys, mask, weight_ptr + column, eps, cos, sin, NORM, HEAD_DIM)
    first, second = first.to(value_first.dtype), second.to(value_first.dtype)
    tl.store(key_cache_ptr + slot, to_cache_type(first, key_cache_ptr), mask=mask)
    tl.store(key_cache_ptr + slot + HEAD_DIM // 2, to_cache_type(second, key_cache_ptr), mask=mask)
    tl.store(value_cache_ptr + slot, to_cache_type(value_first, value_cache_ptr), mask=mask)
    tl.store(value_cache_ptr + slot + HEAD_DIM // 2, to_cache_type(value_second, value_cache_ptr), mask=mask)
