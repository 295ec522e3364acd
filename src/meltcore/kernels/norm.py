"""Root-mean-square (RMS) normalization (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32.

The weight is read before the previous kernel has ended, so that kernel must not write it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton


class Norm(NamedTuple):
    """The parameters of an RMS norm. weight: [size]."""

    weight: torch.Tensor
    eps: float


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each last-dimension row to unit mean square, then by `weight`.

    hidden: [..., size] of any float type, rows may be strided. weight: [size]. A weight of the type of `hidden`
    multiplies the row rounded to that type (as Llama does). With a float32 weight the result is rounded after the
    multiplication. Returns the shape and type of `hidden`.
    """
    if not use_triton(hidden):
        return rms_norm_reference(hidden, weight, eps)
    return _launch(hidden, weight, eps)


def add_rms_norm(residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `added` to `residual` in place and return the norm of the sum.

    residual, added: [rows, size], contiguous, of one type.
    """
    if not use_triton(residual):
        return rms_norm_reference(residual.add_(added), weight, eps)
    return _launch(residual, weight, eps, added)


def norm_add_rms_norm(residual: torch.Tensor, output: torch.Tensor, post_norm: Norm, norm: Norm) -> torch.Tensor:
    """Add post_norm(output) to `residual` in place and return norm(residual), as Gemma's blocks do.

    residual, output: [rows, size], contiguous, of one type.
    """
    if not use_triton(residual):
        residual.add_(rms_norm_reference(output, *post_norm))
        return rms_norm_reference(residual, *norm)
    normalized = torch.empty_like(residual)
    rows, size = residual.shape
    if rows:
        block, tile_rows, warps = _tile(size)
        _norm_add_rms_norm_kernel[(triton.cdiv(rows, tile_rows),)](
            *(residual, output, post_norm.weight, norm.weight, normalized, post_norm.eps, norm.eps, rows),
            SIZE=size,
            BLOCK=block,
            ROWS=tile_rows,
            num_warps=warps,
            **pdl_options(residual.device),
        )
    return normalized


def rms_norm_reference(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `rms_norm` in PyTorch, as its specification."""
    if hidden.dtype == weight.dtype == torch.float32:  # the same operations by one call, in half the time
        return torch.nn.functional.rms_norm(hidden, weight.shape, weight, eps)
    hidden_f32 = hidden.float()
    scale = torch.rsqrt(hidden_f32.pow(2).mean(-1, keepdim=True) + eps)
    return ((hidden_f32 * scale).to(weight.dtype) * weight).to(hidden.dtype)


@triton.jit
def round_before_weight(normalized, weight_ptr, dtype: tl.constexpr):
    """Round float32 values to `dtype` and back, unless the weight is float32.

    The reference rounds so before it multiplies by the weight.
    """
    if weight_ptr.dtype.element_ty != tl.float32:
        normalized = normalized.to(dtype).to(tl.float32)
    return normalized


@triton.jit
def normalize_rows(hidden_f32, weight, eps, dtype: tl.constexpr, SIZE: tl.constexpr):
    """Normalize rows [ROWS, BLOCK] float32 and multiply them by the weight, with the reference's rounding.

    weight: as it is in memory, with zeros past the end. A kernel loads it before it waits for the previous kernel. In a
    decode step it is not in the L2 cache, so a load after the sum would wait for memory once more.
    """
    scale = tl.rsqrt(tl.sum(hidden_f32 * hidden_f32, axis=1) / SIZE + eps)
    normalized = hidden_f32 * scale[:, None]
    if weight.dtype != tl.float32:
        normalized = normalized.to(dtype).to(tl.float32)
    return normalized * weight.to(tl.float32)


# The number of rows changes from step to step. Specialized on it, Triton would compile again while serving, for 1 and
# for multiples of 16.
@triton.jit(do_not_specialize=["rows", "inner_rows"])
def _rms_norm_kernel(
    hidden_ptr,
    added_ptr,
    weight_ptr,
    output_ptr,
    eps,
    rows,
    inner_rows,
    outer_stride,
    inner_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program normalizes ROWS rows of [outer, inner, SIZE]. Rows may be strided; the output is contiguous.

    ADD: first add `added`, which is contiguous, to the rows in place.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    # A whole [ROWS, BLOCK]: weights are then loaded in the layout of the data. A single row of them would have to be
    # exchanged through shared memory.
    columns = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    pdl_sync(PDL)
    mask = (row < rows) & (columns < SIZE)
    start = (row // inner_rows).to(tl.int64) * outer_stride + (row % inner_rows).to(tl.int64) * inner_stride
    hidden_f32 = tl.load(hidden_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    offset = row.to(tl.int64) * SIZE + columns
    if ADD:
        hidden_f32 += tl.load(added_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        total = hidden_f32.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + start + columns, total, mask=mask)
        hidden_f32 = total.to(tl.float32)
    normalized = normalize_rows(hidden_f32, weight, eps, output_ptr.dtype.element_ty, SIZE)
    tl.store(output_ptr + offset, normalized, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _norm_add_rms_norm_kernel(
    residual_ptr,
    output_ptr,
    post_weight_ptr,
    weight_ptr,
    normalized_ptr,
    post_eps,
    eps,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes ROWS contiguous rows, with the rounding of three separate operations."""
    dtype = residual_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    post_weight = tl.load(post_weight_ptr + columns, mask=columns < SIZE, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    pdl_sync(PDL)
    mask = (row < rows) & (columns < SIZE)
    offset = row.to(tl.int64) * SIZE + columns
    wide = tl.load(output_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    added = normalize_rows(wide, post_weight, post_eps, dtype, SIZE).to(dtype).to(tl.float32)
    total = (tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32) + added).to(dtype)
    tl.store(residual_ptr + offset, total, mask=mask)
    normalized = normalize_rows(total.to(tl.float32), weight, eps, dtype, SIZE)
    tl.store(normalized_ptr + offset, normalized, mask=mask)


@cache
def _tile(size: int) -> tuple[int, int, int]:
    """Return columns, rows and warps of a program. A thread has 8 to 16 elements, so 16-bit accesses have 16 bytes."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    return block, rows, min(16, rows * block // 256)


def _launch(hidden: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None) -> torch.Tensor:
    size = hidden.shape[-1]
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if output.numel() == 0:
        return output
    # Heads within a fused row keep their strides; only leading dimensions that do not collapse are copied.
    strided_rows = hidden.reshape(-1, hidden.shape[-2] if hidden.dim() > 1 else 1, size)
    strided_rows = strided_rows if strided_rows.stride(-1) == 1 else strided_rows.contiguous()
    rows, (block, tile_rows, warps) = output.numel() // size, _tile(size)
    _rms_norm_kernel[(triton.cdiv(rows, tile_rows),)](
        *(strided_rows, weight if added is None else added, weight, output, eps, rows),
        *(strided_rows.shape[1], strided_rows.stride(0), strided_rows.stride(1)),
        SIZE=size,
        BLOCK=block,
        ROWS=tile_rows,
        ADD=added is not None,
        num_warps=warps,
        **pdl_options(hidden.device),
    )
    return output
