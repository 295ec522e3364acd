"""From the fused product of a token to what attention needs: queries, and keys and values in the paged cache.

One pass over memory in place of two norms, two rotations and two scattered writes.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import rms_norm
from meltcore.kernels.rotary import apply_rotary

# Elements of the heads that one program rotates. A thread then holds 8 of each half of a head: 16-byte accesses in
# 16-bit types. Three programs a token for 16 query and 8 key heads of 128.
_BLOCK = 1024


class HeadNorms(NamedTuple):
    """Root-mean-square norms of single heads. query, key: [head_dim], their scales."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def prepare_qkv(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    """Normalise queries and keys head by head, rotate them, and store keys and values at the tokens' slots.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], in that order; norms: None where heads are not normalised;
    rotary_table: [max_positions, head_dim] float32, see `rotary_table`; positions, slots: [tokens] int64, a slot is
    page * page_size + offset; the caches: [pages, page_size, kv_heads, head_dim], contiguous, changed in place.
    Returns the queries: [tokens, heads, head_dim].
    """
    body = _prepare_qkv_triton if use_triton(qkv) else _prepare_qkv_torch
    return body(qkv, norms, rotary_table, positions, slots, key_cache, value_cache)


def _prepare_qkv_torch(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    kv_heads, head_dim = key_cache.shape[2:]
    split = qkv.unflatten(-1, (-1, head_dim))
    queries, keys, values = split.split((split.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        queries, keys = rms_norm(queries, norms.query, norms.eps), rms_norm(keys, norms.key, norms.eps)
    queries = apply_rotary(queries, rotary_table, positions)
    keys = apply_rotary(keys, rotary_table, positions)
    key_cache.flatten(0, 1).index_copy_(0, slots, keys)
    value_cache.flatten(0, 1).index_copy_(0, slots, values)
    return queries


@triton.jit
def _norm_and_rotate(source, mask, weight_ptr, eps, cos, sin, NORMED: tl.constexpr, HEAD_DIM: tl.constexpr):
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
        first = ((first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


# Slices of a step's positions and slots start anywhere: without this, each new alignment would be compiled for anew.
@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def _prepare_qkv_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    queries_ptr,
    key_cache_ptr,
    value_cache_ptr,
    eps,
    qkv_stride,
    NORMED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program: one token and HEADS heads, either of its queries, or of its keys and the same heads' values.

    Weights and the rotation are read as whole [HEADS, HALF] tiles, laid out over the threads as the heads are, where a
    single row of them would have to be exchanged through shared memory.
    """
    token = tl.program_id(0).to(tl.int64)
    query_blocks = tl.cdiv(QUERY_HEADS, HEADS)
    block = tl.program_id(1)
    member = tl.arange(0, HEADS)[:, None]
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], (HEADS, HALF))
    inside = column < HEAD_DIM // 2
    rotary = table_ptr + tl.load(positions_ptr + token) * HEAD_DIM + column
    cos = tl.load(rotary, mask=inside, other=0.0)
    sin = tl.load(rotary + HEAD_DIM // 2, mask=inside, other=0.0)
    row = qkv_ptr + token * qkv_stride
    if block < query_blocks:
        head = block * HEADS + member
        mask = (head < QUERY_HEADS) & inside
        place = head * HEAD_DIM + column
        first, second = _norm_and_rotate(row + place, mask, query_weight_ptr + column, eps, cos, sin, NORMED, HEAD_DIM)
        queries = queries_ptr + token * (QUERY_HEADS * HEAD_DIM) + place
        tl.store(queries, first, mask=mask)
        tl.store(queries + HEAD_DIM // 2, second, mask=mask)
    else:
        head = (block - query_blocks) * HEADS + member
        mask = (head < KV_HEADS) & inside
        place = head * HEAD_DIM + column
        slot = tl.load(slots_ptr + token) * (KV_HEADS * HEAD_DIM) + place
        keys = row + QUERY_HEADS * HEAD_DIM + place
        values = keys + KV_HEADS * HEAD_DIM
        # Asked for before the keys are worked on, so that both reads are under way together.
        value_first = tl.load(values, mask=mask, other=0.0)
        value_second = tl.load(values + HEAD_DIM // 2, mask=mask, other=0.0)
        first, second = _norm_and_rotate(keys, mask, key_weight_ptr + column, eps, cos, sin, NORMED, HEAD_DIM)
        tl.store(key_cache_ptr + slot, first, mask=mask)
        tl.store(key_cache_ptr + slot + HEAD_DIM // 2, second, mask=mask)
        tl.store(value_cache_ptr + slot, value_first, mask=mask)
        tl.store(value_cache_ptr + slot + HEAD_DIM // 2, value_second, mask=mask)


def _prepare_qkv_triton(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    kv_heads, head_dim = key_cache.shape[2:]
    tokens, query_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
    queries = torch.empty(tokens, query_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return queries
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(max(1, _BLOCK // (2 * half)), triton.next_power_of_2(max(query_heads, kv_heads)))
    grid = (tokens, triton.cdiv(query_heads, heads) + triton.cdiv(kv_heads, heads))
    _prepare_qkv_kernel[grid](
        qkv,
        norms.query if norms else qkv,
        norms.key if norms else qkv,
        rotary_table,
        positions,
        slots,
        queries,
        key_cache.view(-1, kv_heads, head_dim),  # refuses a cache whose slots are not evenly spaced
        value_cache.view(-1, kv_heads, head_dim),
        norms.eps if norms else 0.0,
        qkv.stride(0),
        NORMED=norms is not None,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        HALF=half,
        num_warps=max(1, heads * half // 256),
    )
    return queries


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    tokens, width = 64, (model.heads + 2 * model.kv_heads) * model.head_dim
    qkv = torch.empty(tokens, width, dtype=dtype, device="meta")
    table = torch.empty(4096, model.head_dim, device="meta")
    indices = torch.empty(tokens, dtype=torch.int64, device="meta")
    cache = torch.empty(16, model.page_size, model.kv_heads, model.head_dim, dtype=dtype, device="meta")
    norms = HeadNorms(cache[0, 0, 0], cache[0, 0, 0], 1e-6)

    def case(norms: HeadNorms | None) -> CompileCase:
        return lambda: _prepare_qkv_triton(qkv, norms, table, indices, indices, cache, cache)

    return [case(norms), case(None)]
