"""FP8 tensors: e4m3, 4 significant bits from 2^-6 to 448 (Micikevicius et al. 2022, arXiv:2209.05433).

Each row has one float32 scale, by which its largest magnitude becomes the largest e4m3 number. Weights have a scale per
output channel and activations per token, so that an outlier channel or token costs no other channel or token precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.norm import Norm

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # torch.finfo(FP8).max
# From here on converting to and from e4m3 is an instruction (PTX ISA, cvt).
FP8_CAPABILITY = 89
MIN_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
# Lower bound of a row's largest magnitude: the scale of a row of zeros must not be zero.
MIN_AMAX = 1e-20


class Fp8Tensor(NamedTuple):
    """A quantized matrix. values: [rows, size] e4m3; scales: [rows] float32."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the values of the quantized matrix, [rows, size] float32."""
        return self.values.float() * self.scales[:, None]


def quantize_reference(hidden: torch.Tensor, norm: Norm | None = None) -> Fp8Tensor:
    """Compute `quantize` in PyTorch, as its specification."""
    hidden_f32 = hidden.float()
    factor = hidden_f32.new_ones(())
    if norm:
        factor = torch.rsqrt(hidden_f32.pow(2).mean(-1) + norm.eps)
        hidden_f32 = hidden_f32 * norm.weight.float()
    amax = hidden_f32.abs().amax(-1).clamp(min=MIN_AMAX)
    # Not FP8_MAX / amax, which torch computes by a reciprocal that rounds once more.
    inverse_scale = torch.full_like(amax, FP8_MAX) / amax
    return Fp8Tensor((hidden_f32 * inverse_scale[:, None]).to(FP8), amax / FP8_MAX * factor)


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(
    hidden_ptr,
    norm_ptr,
    values_ptr,
    scales_ptr,
    eps,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program quantizes ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    mask = (row < rows)[:, None] & (column < SIZE)
    offset = row.to(tl.int64)[:, None] * SIZE + column
    if HAS_NORM:
        weight = tl.load(norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    pdl_sync(PDL)
    hidden_f32 = tl.load(hidden_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(hidden_f32 * hidden_f32, axis=1)
    if HAS_NORM:
        hidden_f32 *= weight
    amax = tl.maximum(tl.max(tl.abs(hidden_f32), axis=1), MIN_AMAX)
    scale = tl.div_rn(amax, FP8_MAX)
    if HAS_NORM:
        scale *= tl.rsqrt(squares / SIZE + eps)
    tl.store(values_ptr + offset, (hidden_f32 * tl.div_rn(FP8_MAX, amax)[:, None]).to(tl.float8e4nv), mask=mask)
    tl.store(scales_ptr + row, scale, mask=row < rows)


def quantize(hidden: torch.Tensor, norm: Norm | None = None) -> Fp8Tensor:
    """Quantize norm(hidden) per row. hidden: [rows, size] of any floating type, contiguous.

    The norm's factor of a row is multiplied into the row's scale. So values are quantized without waiting for the
    factor, and are rounded once.
    """
    if not use_triton(hidden):
        return quantize_reference(hidden, norm)
    rows, size = hidden.shape
    values = torch.empty(rows, size, dtype=FP8, device=hidden.device)
    scales = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    if rows == 0:
        return Fp8Tensor(values, scales)
    if not hidden.is_contiguous():
        raise ValueError(f"hidden states of strides {hidden.stride()}: must be contiguous")
    block = triton.next_power_of_2(size)
    rows_per_program = max(1, 1024 // block)
    norm_weight, eps = norm or (hidden, 0.0)
    _quantize_kernel[(triton.cdiv(rows, rows_per_program),)](
        hidden,
        norm_weight,
        values,
        scales,
        eps,
        rows,
        SIZE=size,
        BLOCK=block,
        ROWS=rows_per_program,
        HAS_NORM=norm is not None,
        FP8_MAX=FP8_MAX,
        MIN_AMAX=MIN_AMAX,
        num_warps=min(16, rows_per_program * block // 256),
        **pdl_options(hidden.device),
    )
    return Fp8Tensor(values, scales)
