"""From the fused product of a token to what attention needs: its key and value in the paged cache, and its query.

Queries are normalised and rotated by the attention kernels themselves, as they read them: written and read once more,
they would be half of the traffic here.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.attend import as_cached, put_torch
from meltcore.kernels.capability import capability
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import before_weight, rms_norm
from meltcore.kernels.rotary import apply_rotary

# Elements of the heads that one program rotates. A thread then holds 8 of each half of a head: 16-byte accesses in
# 16-bit types. One program a token for 8 key heads of 128.
_BLOCK = 1024


class HeadNorms(NamedTuple):
    """Root-mean-square norms of single heads. query, key: [head_dim], their scales."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def store_kv(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """Normalise keys head by head, rotate them, and store them and the values at the tokens' slots.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], in that order; norms: None where heads are not normalised;
    rotary_table: [max_positions, head_dim] float32, see `rotary_table`; positions, slots: [tokens] int64, a slot is
    page * page_size + offset; the caches: [pages, page_size, kv_heads, head_dim], contiguous, changed in place.
    """
    body = _store_kv_triton if use_triton(qkv) else _store_kv_torch
    body(qkv, norms, rotary_table, positions, slots, key_cache, value_cache)


def turned_queries(
    qkv: torch.Tensor, norms: HeadNorms | None, rotary_table: torch.Tensor, positions: torch.Tensor, kv_heads: int
) -> torch.Tensor:
    """The queries of a fused product, normalised and rotated: [tokens, heads, head_dim]. For the torch bodies."""
    queries = qkv.unflatten(-1, (-1, rotary_table.shape[1]))[:, : -2 * kv_heads]
    if norms is not None:
        queries = rms_norm(queries, norms.query, norms.eps)
    return apply_rotary(queries, rotary_table, positions)


def _store_kv_torch(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    kv_heads, head_dim = key_cache.shape[2:]
    keys, values = qkv.unflatten(-1, (-1, head_dim))[:, -2 * kv_heads :].split(kv_heads, dim=1)
    if norms is not None:
        keys = rms_norm(keys, norms.key, norms.eps)
    put_torch(key_cache, slots, apply_rotary(keys, rotary_table, positions))
    put_torch(value_cache, slots, values)


@triton.jit
def norm_and_rotate(source, mask, weight_ptr, eps, cos, sin, NORMED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The halves of the heads at `source`, [HEADS, HALF] each; values are rounded where the torch body rounds them."""
    first = tl.load(source, mask=mask, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        weight_first = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
        weight_second = tl.load(weight_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = (before_weight(first * scale, weight_ptr, dtype) * weight_first).to(dtype).to(tl.float32)
        second = (before_weight(second * scale, weight_ptr, dtype) * weight_second).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


# Slices of a step's positions and slots start anywhere: without this, each new alignment would be compiled for anew.
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
    NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program: HEADS keys of one token, and the same heads' values.

    Weights and the rotation are read as whole [HEADS, HALF] tiles, laid out over the threads as the heads are, where a
    single row of them would have to be exchanged through shared memory.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], (HEADS, HALF))
    inside = column < HEAD_DIM // 2
    rotary = table_ptr + tl.load(positions_ptr + token) * HEAD_DIM + column
    cos = tl.load(rotary, mask=inside, other=0.0)
    sin = tl.load(rotary + HEAD_DIM // 2, mask=inside, other=0.0)
    mask = (head < KV_HEADS) & inside
    place = head * HEAD_DIM + column
    slot = tl.load(slots_ptr + token) * (KV_HEADS * HEAD_DIM) + place
    keys = kv_ptr + token * qkv_stride + place
    values = keys + KV_HEADS * HEAD_DIM
    # Asked for before the keys are worked on, so that both reads are under way together.
    value_first = tl.load(values, mask=mask, other=0.0)
    value_second = tl.load(values + HEAD_DIM // 2, mask=mask, other=0.0)
    first, second = norm_and_rotate(keys, mask, weight_ptr + column, eps, cos, sin, NORMED, HEAD_DIM)
    first, second = first.to(value_first.dtype), second.to(value_first.dtype)
    tl.store(key_cache_ptr + slot, as_cached(first, key_cache_ptr), mask=mask)
    tl.store(key_cache_ptr + slot + HEAD_DIM // 2, as_cached(second, key_cache_ptr), mask=mask)
    tl.store(value_cache_ptr + slot, as_cached(value_first, value_cache_ptr), mask=mask)
    tl.store(value_cache_ptr + slot + HEAD_DIM // 2, as_cached(value_second, value_cache_ptr), mask=mask)


def _store_kv_triton(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    kv_heads, head_dim = key_cache.shape[2:]
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(max(1, _BLOCK // (2 * half)), triton.next_power_of_2(kv_heads))
    _store_kv_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        qkv[:, -2 * kv_heads * head_dim :],
        norms.key if norms else qkv,
        rotary_table,
        positions,
        slots,
        key_cache.view(-1, kv_heads, head_dim),  # refuses a cache whose slots are not evenly spaced
        value_cache.view(-1, kv_heads, head_dim),
        norms.eps if norms else 0.0,
        qkv.stride(0),
        NORMED=norms is not None,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        HALF=half,
        num_warps=max(1, heads * half // 256),
    )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    tokens, width = 64, (model.heads + 2 * model.kv_heads) * model.head_dim
    qkv = torch.empty(tokens, width, dtype=dtype, device="meta")
    table = torch.empty(4096, model.head_dim, device="meta")
    indices = torch.empty(tokens, dtype=torch.int64, device="meta")
    cache = torch.empty(16, model.page_size, model.kv_heads, model.head_dim, dtype=dtype, device="meta")
    norms = HeadNorms(cache[0, 0, 0], cache[0, 0, 0], 1e-6)

    def case(norms: HeadNorms | None, cache: torch.Tensor = cache) -> CompileCase:
        return lambda: _store_kv_triton(qkv, norms, table, indices, indices, cache, cache)

    in_fp8 = [case(norms, cache.to(FP8))] if capability(cache.device) >= FP8_CAPABILITY else []
    return [case(norms), case(None), *in_fp8]
