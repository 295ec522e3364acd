"""Words of 32 bits in which reductions move numbers: one float32, or two 16-bit floats, lower half first."""

from __future__ import annotations

import torch

from meltcore.kernels.comm.symmetric_memory import avoid_empty
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.norm import round_before_weight

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
ALIGNMENT_BYTES = 16  # of a load


def triton_dtype(values: torch.Tensor) -> object:
    """Return Triton's type of the numbers."""
    return getattr(tl, _DTYPES[values.dtype])


def row_words(values: torch.Tensor) -> int:
    """Return the number of words per row of [rows, size]."""
    return values.shape[1] * values.element_size() // 4


def as_words(values: torch.Tensor) -> torch.Tensor:
    """Return a view of contiguous numbers as words, [words] int32."""
    return values.view(-1).view(torch.int32)


@triton.jit
def unpack(words, dtype: tl.constexpr):
    """Return the two 16-bit floats of each word as float32, lower half first. A float32 word is returned twice."""
    if dtype == tl.float32:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def pack(low, high, dtype: tl.constexpr):
    """Pack two float32 values per word as 16-bit floats, the inverse of `unpack`."""
    if dtype == tl.float32:
        words = low.to(tl.int32, bitcast=True)
    else:
        words = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        words |= high.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32) << 16
    return words


@triton.jit
def normalize(
    words, low_weight, high_weight, weight_ptr, eps, DTYPE: tl.constexpr, PER_WORD: tl.constexpr, ROW: tl.constexpr
):
    """Normalize rows of words [..., BLOCK] with the rounding of kernels/norm.py.

    Words past a row's end must be zeros. PER_WORD: floats per word. ROW: words per row.
    """
    low, high = unpack(words, DTYPE)
    squares = low * low
    if PER_WORD == 2:
        squares += high * high
    scale = tl.rsqrt(tl.sum(squares, axis=-1, keep_dims=True) / (ROW * PER_WORD) + eps)
    low = round_before_weight(low * scale, weight_ptr, DTYPE) * low_weight
    high = round_before_weight(high * scale, weight_ptr, DTYPE) * high_weight
    return pack(low, high, DTYPE)


@triton.jit
def norm_weights(weight_ptr, column, PER_WORD: tl.constexpr, ROW: tl.constexpr):
    """Load the norm weights of the lower and the upper floats of a row.

    No kernel writes them, so they may be loaded before the previous kernel has ended.
    """
    weight = weight_ptr + column * PER_WORD
    low = tl.load(weight, mask=column < ROW, other=0.0).to(tl.float32)
    return low, tl.load(weight + PER_WORD - 1, mask=column < ROW, other=0.0).to(tl.float32)


@triton.jit
def partial_sum_words(
    values_ptr,
    topk_weights_ptr,
    row,
    column,
    mask,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROW: tl.constexpr,
):
    """Load the words of this rank's partial sum of a row. With TOP_K > 0, compute it as a weighted sum of experts."""
    if TOP_K == 0:
        words = tl.load(values_ptr + row * ROW + column, mask=mask, other=0)
    else:
        low, high = tl.zeros(column.shape, dtype=tl.float32), tl.zeros(column.shape, dtype=tl.float32)
        for k in tl.static_range(TOP_K):
            pair = row * TOP_K + k
            weight = tl.load(topk_weights_ptr + pair)
            low_values, high_values = unpack(tl.load(values_ptr + pair * ROW + column, mask=mask, other=0), DTYPE)
            low += weight * low_values
            high += weight * high_values
        words = pack(low, high, DTYPE)
    return avoid_empty(words)
