"""From wider types to FP8 (e4m3; Micikevicius et al. 2022, arXiv:2209.05433) with one float32 scale a row.

A row's largest magnitude becomes the largest that e4m3 holds. Weights have a scale for each output, tokens one each,
so that neither an unusual channel nor an unusual token costs the others their precision.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm, rms_norm

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # torch.finfo(FP8).max
# Stands in for the largest magnitude of a row of zeros, whose scale must not be one.
LEAST = 1e-20
# Converting to and from e4m3 is an instruction from here on (PTX ISA, cvt).
LEAST_CAPABILITY = 89


class Fp8Rows(NamedTuple):
    """values: [rows, size] e4m3; scales: [rows] float32. What they stand for is values * scales[:, None]."""

    values: torch.Tensor
    scales: torch.Tensor

    def wide(self) -> torch.Tensor:
        """[rows, size] float32."""
        return self.values.float() * self.scales[:, None]


def quantise(hidden: torch.Tensor, norm: Norm | None = None) -> Fp8Rows:
    """hidden: [rows, size] of any floating type, contiguous, normalised first if `norm` is given."""
    body = _quantise_triton if use_triton(hidden) else _quantise_torch
    return body(hidden, norm)


def _quantise_torch(hidden: torch.Tensor, norm: Norm | None) -> Fp8Rows:
    wide = (rms_norm(hidden, *norm) if norm else hidden).float()
    scales = wide.abs().amax(-1).clamp(min=LEAST) / LARGEST
    return Fp8Rows((wide / scales[:, None]).to(FP8), scales)


@triton.jit
def row_scale(largest, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """The scale of a row with this largest magnitude."""
    return tl.div_rn(tl.maximum(largest, LEAST), LARGEST)


@triton.jit
def _quantise_kernel(
    hidden_ptr,
    norm_ptr,
    values_ptr,
    scales_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program: one row. It is rounded where the norm's own kernel rounds."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    wide = tl.load(hidden_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        dtype = hidden_ptr.dtype.element_ty
        wide = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)).to(dtype).to(tl.float32)
        wide *= tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(wide), axis=0), LARGEST, LEAST)
    tl.store(values_ptr + row * SIZE + column, tl.div_rn(wide, scale).to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + row, scale)


def _quantise_triton(hidden: torch.Tensor, norm: Norm | None) -> Fp8Rows:
    rows, size = hidden.shape
    values = torch.empty(rows, size, dtype=FP8, device=hidden.device)
    scales = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    if rows == 0:
        return Fp8Rows(values, scales)
    if not hidden.is_contiguous():
        raise ValueError(f"hidden states of strides {hidden.stride()}: must be contiguous")
    block = triton.next_power_of_2(size)
    norm_weight, eps = norm or (hidden, 0.0)
    _quantise_kernel[(rows,)](
        hidden,
        norm_weight,
        values,
        scales,
        eps,
        SIZE=size,
        BLOCK=block,
        NORMED=norm is not None,
        LARGEST=LARGEST,
        LEAST=LEAST,
        num_warps=max(1, min(16, block // 512)),
    )
    return Fp8Rows(values, scales)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    hidden = torch.empty(64, model.hidden_size, dtype=dtype, device="meta")
    gated = torch.empty(64, model.intermediate_size, dtype=dtype, device="meta")
    norm = Norm(torch.empty(model.hidden_size, dtype=dtype, device="meta"), 1e-6)
    return [lambda: _quantise_triton(hidden, norm), lambda: _quantise_triton(gated, None)]
