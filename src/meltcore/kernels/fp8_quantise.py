"""From wider types to FP8 with one float32 scale a row.

A row's largest magnitude becomes the largest that e4m3 holds. Weights have a scale for each output, tokens one each,
so that neither an unusual channel nor an unusual token costs the others their precision.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY, LARGEST
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm
from meltcore.kernels.overlap import overlaps

# Stands in for the largest magnitude of a row of zeros, whose scale must not be one.
LEAST = 1e-20
LEAST_CAPABILITY = FP8_CAPABILITY  # of this file's kernels


class Fp8Rows(NamedTuple):
    """values: [rows, size] e4m3; scales: [rows] float32. What they stand for is values * scales[:, None]."""

    values: torch.Tensor
    scales: torch.Tensor

    def wide(self) -> torch.Tensor:
        """[rows, size] float32."""
        return self.values.float() * self.scales[:, None]


def quantise(hidden: torch.Tensor, norm: Norm | None = None) -> Fp8Rows:
    """hidden: [rows, size] of any floating type, contiguous, normalised if `norm` is given.

    What a norm multiplies a whole row by goes into its scale: the values need not wait for it, and are not rounded in
    between.
    """
    body = _quantise_triton if use_triton(hidden) else _quantise_torch
    return body(hidden, norm)


def _quantise_torch(hidden: torch.Tensor, norm: Norm | None) -> Fp8Rows:
    wide = hidden.float()
    factor = wide.new_ones(())
    if norm:
        factor = torch.rsqrt(wide.pow(2).mean(-1) + norm.eps)
        wide = wide * norm.weight.float()
    largest = wide.abs().amax(-1).clamp(min=LEAST)
    # Not LARGEST / largest, which torch computes by a reciprocal that rounds once more.
    widen = torch.full_like(largest, LARGEST) / largest
    return Fp8Rows((wide * widen[:, None]).to(FP8), largest / LARGEST * factor)


@triton.jit(do_not_specialize=["rows"])
def _quantise_kernel(
    hidden_ptr,
    norm_ptr,
    values_ptr,
    scales_ptr,
    eps,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    inside = (row < rows)[:, None] & (column < SIZE)
    place = row.to(tl.int64)[:, None] * SIZE + column
    if NORMED:
        weight = tl.load(norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    wide = tl.load(hidden_ptr + place, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(wide * wide, axis=1)
    if NORMED:
        wide *= weight
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), LEAST)
    scale = tl.div_rn(largest, LARGEST)
    if NORMED:
        scale *= tl.rsqrt(squares / SIZE + eps)
    tl.store(values_ptr + place, (wide * tl.div_rn(LARGEST, largest)[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + row, scale, mask=row < rows)


def _quantise_triton(hidden: torch.Tensor, norm: Norm | None) -> Fp8Rows:
    rows, size = hidden.shape
    values = torch.empty(rows, size, dtype=FP8, device=hidden.device)
    scales = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    if rows == 0:
        return Fp8Rows(values, scales)
    if not hidden.is_contiguous():
        raise ValueError(f"hidden states of strides {hidden.stride()}: must be contiguous")
    block = triton.next_power_of_2(size)
    together = max(1, 1024 // block)
    norm_weight, eps = norm or (hidden, 0.0)
    overlap = overlaps(hidden.device)
    options = {"launch_pdl": True} if overlap else {}
    _quantise_kernel[(triton.cdiv(rows, together),)](
        hidden,
        norm_weight,
        values,
        scales,
        eps,
        rows,
        SIZE=size,
        BLOCK=block,
        ROWS=together,
        NORMED=norm is not None,
        LARGEST=LARGEST,
        LEAST=LEAST,
        OVERLAP=overlap,
        num_warps=min(16, together * block // 256),
        **options,
    )
    return Fp8Rows(values, scales)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    hidden = torch.empty(64, model.hidden_size, dtype=dtype, device="meta")
    gated = torch.empty(64, model.intermediate_size, dtype=dtype, device="meta")
    norm = Norm(torch.empty(model.hidden_size, dtype=dtype, device="meta"), 1e-6)
    return [lambda: _quantise_triton(hidden, norm), lambda: _quantise_triton(gated, None)]
