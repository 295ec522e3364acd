"""What attention of new tokens (decode) and of chunks of prompts (prefill) share.

A cache is [pages, page_size, kv_heads, head_dim], contiguous. Softmax is computed online in float32 (Milakov and
Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).

A cache in FP8 (e4m3) holds keys and values as they are, without scales: they come out of a norm or of a product of one,
of which e4m3 keeps 4 significant bits from 2^-6 to 448. They are multiplied as float16, which holds every one of them.
Decode reads them in pairs of neighbouring dims: what loads the matrix units' operands (ldmatrix) transposes units of 16
bits, none of 8, and values read byte by byte came at 3.0 of 4.4 TB/s (H200, 2026-11-22). Even and odd dims are then
multiplied apart: a "part" below is all dims, or in pairs every other.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.fp8 import FP8, LARGEST
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.norm import before_weight


def gather_pages(
    key_cache: torch.Tensor, value_cache: torch.Tensor, pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's keys and values, as cached: [length, kv_heads, head_dim]."""
    used = pages[: -(-length // key_cache.shape[1])]
    return key_cache[used].flatten(0, 1)[:length], value_cache[used].flatten(0, 1)[:length]


def put_torch(cache: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor) -> None:
    """Store heads [tokens, kv_heads, head_dim] at their tokens' slots, rounded to the type of the cache."""
    places = cache.flatten(0, 1)
    if cache.dtype == FP8:
        # Past the largest number the conversion would give NaN; and torch copies no e4m3 by index, but does bytes.
        heads = heads.float().clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
        places = places.view(torch.uint8)
    places.index_copy_(0, slots, heads)


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


def require_layout(
    tokens: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The rows of `tokens` may be a part of a fused projection's output; the rest must be plain."""
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and out.is_contiguous()):
        raise ValueError("caches and output must be contiguous")
    if len(tokens) and not tokens[0].is_contiguous():
        raise ValueError("a token's heads must be contiguous")
    if page_table.stride(1) != 1:
        raise ValueError("a sequence's page numbers must be contiguous")


@triton.jit
def as_cached(heads, cache_ptr):
    """`heads` rounded to what the cache holds."""
    dtype = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        heads = tl.minimum(tl.maximum(heads.to(tl.float32), -448.0), 448.0)
    return heads.to(dtype)


@triton.jit
def in_pairs(cache_ptr):
    """The cache as decode loads blocks from it: e4m3 in pairs of neighbouring dims, [..., head_dim // 2] int16."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        cache_ptr = cache_ptr.to(tl.pointer_type(tl.int16))
    return cache_ptr


@triton.jit
def in_parts(heads, cache_ptr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """`heads` [ROWS, HEAD_DIM] as a tuple of the parts that blocks of this cache are multiplied in."""
    parts = (heads,)
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        parts = tl.split(tl.reshape(heads, (ROWS, HEAD_DIM // 2, 2)))
    return parts


@triton.jit
def as_multiplied(queries, cache_ptr):
    """`queries` in the type of this cache's products."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        queries = queries.to(tl.float16)
    return queries


@triton.jit
def put_together(parts, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The heads [ROWS, HEAD_DIM] that `in_parts` takes apart."""
    heads = parts[0]
    if len(parts) == 2:
        heads = tl.reshape(tl.join(heads, parts[1]), (ROWS, HEAD_DIM))
    return heads


@triton.jit
def evens_and_odds(pairs):
    """The even and the odd dims of a block of pairs of e4m3, each [KEYS, HEAD_DIM // 2] float16.

    A register holds two keys' pairs: three instructions sort its bytes and convert two at a time. Compiled from shifts
    and conversions of single bytes it takes ten.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 ordered;
            .reg .b16 evens, odds;
            prmt.b32 ordered, $2, 0, 0x3120;
            mov.b32 {evens, odds}, ordered;
            cvt.rn.f16x2.e4m3x2 $0, evens;
            cvt.rn.f16x2.e4m3x2 $1, odds;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def widened(block, dtype: tl.constexpr):
    """The parts of a block of keys or values, in the type of the products."""
    if block.dtype == tl.int16:
        parts = evens_and_odds(block)
    else:
        parts = (block.to(dtype),)
    return parts


@triton.jit
def attend_block(queries, keys, values, visible, mixed, total, highest, scale_log2, MASKED: tl.constexpr):
    """One block of the online softmax, in powers of two. Returns the new (mixed, total, highest).

    queries, mixed: tuples of parts of [ROWS, HEAD_DIM]; keys, values: a block each, of int16 where in pairs.
    """
    dtype: tl.constexpr = queries[0].dtype
    keys, values = widened(keys, dtype), widened(values, dtype)
    scores = tl.dot(queries[0], tl.trans(keys[0]), input_precision="ieee") * scale_log2
    if len(keys) == 2:  # added when scaled: as one sum the second product would wait for the first
        scores += tl.dot(queries[1], tl.trans(keys[1]), input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp2(highest - raised)
    weights = tl.exp2(scores - raised[:, None])
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(dtype)
    first = tl.dot(weights, values[0], mixed[0] * shrink[:, None], input_precision="ieee")
    if len(values) == 2:
        mixed = (first, tl.dot(weights, values[1], mixed[1] * shrink[:, None], input_precision="ieee"))
    else:
        mixed = (first,)
    return mixed, total, raised


@triton.jit
def rotated(own, other, weight_ptr, column, partner, cos, sin, eps, NORMED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Heads, one a row, normalised and rotated. own: [ROWS, HEAD_DIM] as loaded; other: what each element turns with.

    Values are rounded where the torch body rounds them.
    """
    dtype = own.dtype
    if NORMED:  # on their way before the heads, which may be as well, are waited for
        own_weight, other_weight = tl.load(weight_ptr + column), tl.load(weight_ptr + partner)
    own, other = own.to(tl.float32), other.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        own = before_weight(own * scale, weight_ptr, dtype) * own_weight.to(tl.float32)
        other = before_weight(other * scale, weight_ptr, dtype) * other_weight.to(tl.float32)
        own, other = own.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
    return (own * cos + other * sin).to(dtype)
