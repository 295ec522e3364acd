"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps


class Norm(NamedTuple):
    """What normalises a row. weight: [size]."""

    weight: torch.Tensor
    eps: float


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each last-dimension row to unit mean square, then by `weight`.

    hidden: [..., size] any float type, rows may be strided; weight: [size], in the type of `hidden`, and then it is
    multiplied by what was rounded to that type (Llama's way), or in float32, and then rounding comes after. Returns the
    shape and type of `hidden`.
    """
    body = _rms_norm_triton if use_triton(hidden) else _rms_norm_torch
    return body(hidden, weight, eps)


def add_rms_norm(residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add to `residual` in place, and return what it then is, normalised.

    residual, added: [rows, size], contiguous, of one type.
    """
    if use_triton(residual):
        return _rms_norm_triton(residual, weight, eps, added)
    return _rms_norm_torch(residual.add_(added), weight, eps)


def _rms_norm_torch(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(hidden.dtype)


@triton.jit
def before_weight(normalised, weight_ptr, dtype: tl.constexpr):
    """float32 as it is multiplied by its weight, in float32: rounded to `dtype` first where the torch body does so."""
    if weight_ptr.dtype.element_ty != tl.float32:
        normalised = normalised.to(dtype).to(tl.float32)
    return normalised


@triton.jit
def normalise(wide, weight_ptr, columns, eps, dtype: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, BLOCK] float32 -> the same, normalised, rounded where the torch body rounds and scaled by the weight."""
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    return before_weight(wide * scale[:, None], weight_ptr, dtype) * weight


@triton.jit
def _tile(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """This program's row numbers [ROWS, 1], its columns and which elements exist.

    Columns come as a whole [ROWS, BLOCK]: weights are then read as the data is laid out over the threads, where a
    single row of them would have to be exchanged through shared memory.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    return row, columns, (row < rows) & (columns < SIZE)


# Counts of rows change from step to step. Triton would compile again, in the middle of serving, for 1 and for multiples
# of 16.
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
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows come as [outer, inner], each of the two with a stride of its own; the output is contiguous.

    ADDED: something contiguous is added to them, in place, first.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, columns, mask = _tile(rows, SIZE, BLOCK, ROWS)
    start = (row // inner_rows).to(tl.int64) * outer_stride + (row % inner_rows).to(tl.int64) * inner_stride
    wide = tl.load(hidden_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * SIZE + columns
    if ADDED:
        wide += tl.load(added_ptr + place, mask=mask, other=0.0).to(tl.float32)
        total = wide.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + start + columns, total, mask=mask)
        wide = total.to(tl.float32)
    normalised = normalise(wide, weight_ptr, columns, eps, output_ptr.dtype.element_ty, SIZE)
    tl.store(output_ptr + place, normalised, mask=mask)


class _Tile(NamedTuple):
    """What one program covers. A thread holds 8 to 16 elements: 16-byte accesses in 16-bit types."""

    rows: int
    block: int
    warps: int

    @classmethod
    def of(cls, size: int) -> _Tile:
        block = triton.next_power_of_2(size)
        rows = max(1, 1024 // block)
        return cls(rows, block, min(16, rows * block // 256))


def _rms_norm_triton(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> torch.Tensor:
    size = hidden.shape[-1]
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if output.numel() == 0:
        return output
    # Heads within a fused row keep their strides; only leading dimensions that do not collapse are copied.
    grouped = hidden.reshape(-1, hidden.shape[-2] if hidden.dim() > 1 else 1, size)
    grouped = grouped if grouped.stride(-1) == 1 else grouped.contiguous()
    rows, tile = output.numel() // size, _Tile.of(size)
    overlap = overlaps(hidden.device)
    _rms_norm_kernel[(triton.cdiv(rows, tile.rows),)](
        grouped,
        weight if added is None else added,
        weight,
        output,
        eps,
        rows,
        grouped.shape[1],
        grouped.stride(0),
        grouped.stride(1),
        SIZE=size,
        BLOCK=tile.block,
        ROWS=tile.rows,
        ADDED=added is not None,
        OVERLAP=overlap,
        num_warps=tile.warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    hidden = torch.empty(64, model.hidden_size, dtype=dtype, device="meta")
    heads = torch.empty(64, model.heads, model.head_dim, dtype=dtype, device="meta")
    return [
        lambda: _rms_norm_triton(hidden, hidden[0], 1e-6),
        lambda: _rms_norm_triton(hidden, hidden[0], 1e-6, hidden),
        lambda: _rms_norm_triton(heads, heads[0, 0], 1e-6),
    ]
