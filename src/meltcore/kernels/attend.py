"""What attention of new tokens (decode) and of chunks of prompts (prefill) share.

A cache is [pages, page_size, kv_heads, head_dim], contiguous. Softmax is computed online in float32 (Milakov and
Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).

A cache in FP8 (e4m3) holds keys and values as they are, without scales: they come out of a norm or of a product of one,
of which e4m3 keeps 4 significant bits from 2^-6 to 448. They are widened to the type of the queries as they are read.
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
def attend_block(queries, keys, values, visible, mixed, total, highest, scale_log2, MASKED: tl.constexpr):
    """One block of the online softmax, in powers of two. Returns the new (mixed, total, highest)."""
    if keys.dtype == tl.float8e4nv:
        queries = queries.to(tl.float16)
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
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
