"""One block of online softmax, for decode and prefill, over caches of 16 or 32 bits and of FP8.

Softmax is computed online in float32 (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022,
arXiv:2205.14135). Its running values have FlashAttention's names: `acc` is the weighted sum of values, `l_i` the sum of
exponentials, and `m_i` the largest score. Exponentials are powers of two.

An FP8 cache (e4m3) has keys and values without scales, since norms bound them, and e4m3 keeps 4 significant bits from
2^-6 to 448. They are multiplied as float16, which represents every e4m3 number. Decode loads pairs of neighboring dims:
ldmatrix transposes units of 16 bits only, and values loaded byte by byte reached 3.0 of 4.4 TB/s (H200, 2026-11-22).
Even and odd dims are then multiplied separately. A "part" is every second dim of such pairs, and all dims of other
caches.

A sliding window is an argument of the kernels, or None for full attention. Triton compiles None in as a constant: the
machine code of full attention has no trace of windows. A number is not specialized, so all windows share one binary. A
constant number would save a few instructions per program and none per block.
"""

from __future__ import annotations

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.norm import round_before_weight


@triton.jit
def oldest_key(position, window):
    """Return the position of the oldest key that the query at `position` sees, or 0 where `window` is None."""
    oldest = 0
    if window is not None:
        oldest = tl.maximum(position - window + 1, 0)
    return oldest


@triton.jit
def as_pairs(cache_ptr):
    """Return the cache as decode loads its blocks: e4m3 as pairs of neighboring dims, [..., head_dim // 2] int16."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        cache_ptr = cache_ptr.to(tl.pointer_type(tl.int16))
    return cache_ptr


@triton.jit
def split_parts(heads, cache_ptr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Split `heads` [ROWS, HEAD_DIM] into a tuple of the parts that blocks of this cache are multiplied in."""
    parts = (heads,)
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        parts = tl.split(tl.reshape(heads, (ROWS, HEAD_DIM // 2, 2)))
    return parts


@triton.jit
def join_parts(parts, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return heads [ROWS, HEAD_DIM] from their parts, the inverse of `split_parts`."""
    heads = parts[0]
    if len(parts) == 2:
        heads = tl.reshape(tl.join(heads, parts[1]), (ROWS, HEAD_DIM))
    return heads


@triton.jit
def to_dot_type(queries, cache_ptr):
    """Convert `queries` to the type that they and this cache's keys are multiplied in."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        queries = queries.to(tl.float16)
    return queries


@triton.jit
def evens_and_odds(pairs):
    """Return the even and the odd dims of a block of pairs of e4m3, each [KEYS, HEAD_DIM // 2] float16.

    A register has the pairs of two keys: three instructions sort its bytes and convert two at a time. Compiled from
    shifts and conversions of single bytes it takes ten.
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
def to_parts(block, dtype: tl.constexpr):
    """Return the parts of a loaded block of keys or values, in the type that they are multiplied in."""
    if block.dtype == tl.int16:
        parts = evens_and_odds(block)
    else:
        parts = (block.to(dtype),)
    return parts


@triton.jit
def attend_block(queries, keys, values, visible, acc, l_i, m_i, scale_log2, MASKED: tl.constexpr):
    """Add one block of keys and values to the online softmax. Returns the new (acc, l_i, m_i).

    queries, acc: tuples of parts of [ROWS, HEAD_DIM]; keys, values: one block each, int16 for pairs of e4m3.
    """
    dtype: tl.constexpr = queries[0].dtype
    keys, values = to_parts(keys, dtype), to_parts(values, dtype)
    scores = tl.dot(queries[0], tl.trans(keys[0]), input_precision="ieee") * scale_log2
    if len(keys) == 2:  # added after scaling: accumulated in one dot the second would wait for the first
        scores += tl.dot(queries[1], tl.trans(keys[1]), input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    alpha = tl.exp2(m_i - m_new)
    probs = tl.exp2(scores - m_new[:, None])
    l_i = l_i * alpha + tl.sum(probs, 1)
    probs = probs.to(dtype)
    first_part = tl.dot(probs, values[0], acc[0] * alpha[:, None], input_precision="ieee")
    if len(values) == 2:
        acc = (first_part, tl.dot(probs, values[1], acc[1] * alpha[:, None], input_precision="ieee"))
    else:
        acc = (first_part,)
    return acc, l_i, m_new


@triton.jit
def norm_and_rope_rows(
    heads, partners, weight_ptr, column, partner_column, cos, sin, eps, NORM: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Normalize and rotate heads [ROWS, HEAD_DIM], one per row.

    partners: for each element of `heads` the one that it rotates with, in the columns `partner_column`. Values are
    rounded where the reference rounds them.
    """
    dtype = heads.dtype
    if NORM:  # loads in flight before the heads, which may be in flight too, are waited for
        head_weight, partner_weight = tl.load(weight_ptr + column), tl.load(weight_ptr + partner_column)
    heads, partners = heads.to(tl.float32), partners.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(heads * heads, axis=1) / HEAD_DIM + eps)[:, None]
        heads = round_before_weight(heads * scale, weight_ptr, dtype) * head_weight.to(tl.float32)
        partners = round_before_weight(partners * scale, weight_ptr, dtype) * partner_weight.to(tl.float32)
        heads, partners = heads.to(dtype).to(tl.float32), partners.to(dtype).to(tl.float32)
    return (heads * cos + partners * sin).to(dtype)
