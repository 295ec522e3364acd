"""Residual addition and layer normalization (Ba et al. 2016, arXiv:1607.06450) in one pass, computed in float32.

Diffusion transformers modulate both with vectors of each row: AdaLN-zero (Peebles and Xie 2023, arXiv:2212.09748)
multiplies the added term by a gate, and scales and shifts the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

_COLUMNS_PER_WARP = 256


def add_layer_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `added` to `residual` in place and return the layer norm of the sum.

    Args:
        residual: [..., size], contiguous. The result has the same shape and dtype.
        added: [..., size], contiguous, of the same dtype.
        weight: [size].
        bias: [size].
        eps: added to the variance.
    """
    if not use_triton(residual):
        return functional.layer_norm(residual.add_(added), weight.shape, weight, bias, eps)
    if not (residual.is_contiguous() and added.is_contiguous()):
        raise ValueError("the residual and what is added to it must be contiguous")
    output, size = torch.empty_like(residual), residual.shape[-1]
    if output.numel():
        _add_layer_norm_kernel[(residual.numel() // size,)](
            *(residual, added, weight, bias, output, eps), **_constants(residual)
        )
    return output


def modulated_layer_norm(hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """Return norm * (1 + scale) + shift, where norm is the layer norm of `hidden` without weights.

    The result is rounded once, to the dtype of `hidden`.

    Args:
        hidden: [rows, tokens, size], contiguous.
        scale: [rows or 1, size], rows of one contiguous table.
        shift: [rows or 1, size], rows of the same table.
        eps: added to the variance.
    """
    if not use_triton(hidden):
        return _modulated(hidden, scale, shift, eps)
    return _launch_modulated(hidden, hidden, None, scale, shift, eps)


def add_modulated_layer_norm(
    hidden: torch.Tensor,
    added: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Add gate * added to `hidden` in place and return `modulated_layer_norm` of the sum.

    The norm is computed from the sum after it was rounded to the dtype of `hidden`.

    Args:
        hidden: [rows, tokens, size], contiguous.
        added: [rows, tokens, size], contiguous, of the same dtype.
        gate: [rows or 1, size], rows of one contiguous table.
        scale: [rows or 1, size], rows of the same table.
        shift: [rows or 1, size], rows of the same table.
        eps: added to the variance.
    """
    if not use_triton(hidden):
        return _modulated(hidden.addcmul_(gate[:, None], added), scale, shift, eps)
    return _launch_modulated(hidden, added, gate, scale, shift, eps)


def _modulated(hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    normed = functional.layer_norm(hidden.float(), hidden.shape[-1:], eps=eps)
    return (normed * (1 + scale[:, None].float()) + shift[:, None].float()).to(hidden.dtype)


def _launch_modulated(
    hidden: torch.Tensor,
    added: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    if not (hidden.is_contiguous() and added.is_contiguous()):
        raise ValueError("the residual and what is added to it must be contiguous")
    rows, tokens, size = hidden.shape
    vectors = scale if gate is None else gate, scale, shift
    strides = {(vector.stride(0) if len(vector) > 1 else 0, vector.stride(1)) for vector in vectors}
    if len(strides) > 1 or {len(vector) for vector in vectors} - {1, rows}:
        raise ValueError(f"gate, scale and shift must be alike, of 1 or {rows} rows")
    [(row_stride, column_stride)] = strides
    if column_stride != 1 or row_stride % size:
        raise ValueError("gate, scale and shift must be rows of a contiguous table")
    output = torch.empty_like(hidden)
    if output.numel():
        _modulated_layer_norm_kernel[(tokens, rows)](
            *(hidden, added, *vectors, output, eps, row_stride // size), ADDS=gate is not None, **_constants(hidden)
        )
    return output


def _constants(hidden: torch.Tensor) -> dict[str, Any]:
    """Return the constants of a launch with one program per token."""
    block = triton.next_power_of_2(hidden.shape[-1])
    warps = max(1, min(16, block // _COLUMNS_PER_WARP))
    return {"SIZE": hidden.shape[-1], "BLOCK": block, "num_warps": warps, **pdl_options(hidden.device)}


@triton.jit
def _normalized(values, mask, eps, SIZE: tl.constexpr):
    """Return the layer norm of one token, float32, without weights."""
    centered = tl.where(mask, values - tl.sum(values, axis=0) / SIZE, 0.0)
    return centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / SIZE + eps)


# Rows of modulations are whole vectors apart, so that each is aligned as the first is; one row for all is none apart.
@triton.jit(do_not_specialize=["vectors_per_row"])
def _modulated_layer_norm_kernel(
    hidden_ptr,
    added_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    output_ptr,
    eps,
    vectors_per_row,
    ADDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program normalizes one token, after rounding the sum as the residual stores it."""
    pdl_sync(PDL)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    row = tl.program_id(1).to(tl.int64)
    vector = row * vectors_per_row * SIZE + columns
    offset = (row * tl.num_programs(0) + tl.program_id(0)) * SIZE + columns
    hidden = tl.load(hidden_ptr + offset, mask=mask, other=0.0)
    if ADDS:
        gate = tl.load(gate_ptr + vector, mask=mask, other=0.0).to(tl.float32)
        total = hidden.to(tl.float32) + gate * tl.load(added_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        hidden = total.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + offset, hidden, mask=mask)
    scale = tl.load(scale_ptr + vector, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + vector, mask=mask, other=0.0).to(tl.float32)
    result = _normalized(hidden.to(tl.float32), mask, eps, SIZE) * (1.0 + scale) + shift
    tl.store(output_ptr + offset, result.to(output_ptr.dtype.element_ty), mask=mask)


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
    normed = _normalized(rounded.to(tl.float32), mask, eps, SIZE)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output_ptr + offset, (normed * weight + bias).to(output_ptr.dtype.element_ty), mask=mask)
