"""Residual addition and layer normalization (Ba et al. 2016, arXiv:1607.06450) in one pass, computed in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

_COLUMNS_PER_WARP = 256


def add_layer_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `added` to `residual` in place and return the layer norm of the sum.

    residual, added: [..., size], contiguous, of one type. weight, bias: [size]. Returns the shape and type of
    `residual`.
    """
    if not use_triton(residual):
        return functional.layer_norm(residual.add_(added), weight.shape, weight, bias, eps)
    if not (residual.is_contiguous() and added.is_contiguous()):
        raise ValueError("the residual and what is added to it must be contiguous")
    output, size = torch.empty_like(residual), residual.shape[-1]
    if output.numel():
        block = triton.next_power_of_2(size)
        _add_layer_norm_kernel[(residual.numel() // size,)](
            *(residual, added, weight, bias, output, eps),
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, min(16, block // _COLUMNS_PER_WARP)),
            **pdl_options(residual.device),
        )
    return output


@triton.jit
def _add_layer_norm_kernel(
    residual_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program normalizes one row, after rounding the sum as the residual stores it."""
    pdl_sync(PDL)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    offset = tl.program_id(0).to(tl.int64) * SIZE + columns
    total = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(added_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + offset, rounded, mask=mask)
    values = rounded.to(tl.float32)
    centered = tl.where(mask, values - tl.sum(values, axis=0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output_ptr + offset, (centered * scale * weight + bias).to(output_ptr.dtype.element_ty), mask=mask)
