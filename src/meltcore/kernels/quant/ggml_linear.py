"""Multiplies tokens by a block-quantized weight, with the kernel that is fastest for the number of tokens."""

from __future__ import annotations

import torch

from meltcore.kernels.activation import swiglu
from meltcore.kernels.gemm.linear import multiply_into
from meltcore.kernels.launch import use_triton
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.quant import ggml_gemm, ggml_skinny_gemm, ggml_wgmma_gemm
from meltcore.kernels.quant.ggml import GgmlTensor
from meltcore.kernels.quant.ggml_decode import dequantize

# Of a matrix that is dequantized for the library's GEMM, slice by slice: 128 MiB in 16-bit types. The torch body on a
# CPU, whose intermediate results are several times as large, takes slices that fit into its caches.
SLICE_VALUES, _CPU_SLICE_VALUES = 2**26, 2**20
_TILE_ROWS = 256  # rows of a library's tile, of which a slice has whole ones


def ggml_linear(
    hidden: torch.Tensor,
    weight: GgmlTensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute norm(hidden) W^T: hidden [tokens, K], weight [N, K] -> [tokens, N].

    The options are explained at `linear` in gemm/linear.py, and rows of `out` may be strided. For few tokens, blocks
    are decoded in registers. For more tokens, slices of the weight are dequantized for the library's GEMM. The skinny
    GEMM multiplies sums of quantized values by scales in float32. The other GEMMs round the same dequantized values to
    the type of `hidden`.
    """
    if norm and use_triton(hidden) and ggml_skinny_gemm.stages(hidden, weight, norm):
        return ggml_skinny_gemm.ggml_skinny_gemm(hidden, weight, norm, gated=gated, residual=residual, out=out)
    hidden = rms_norm(hidden, *norm) if norm else hidden
    if use_triton(hidden) and ggml_wgmma_gemm.is_faster(hidden, weight):
        return ggml_wgmma_gemm.ggml_wgmma_gemm(hidden, weight, gated=gated, residual=residual, out=out)
    if use_triton(hidden) and ggml_skinny_gemm.supports(hidden, weight):
        return ggml_skinny_gemm.ggml_skinny_gemm(hidden, weight, gated=gated, residual=residual, out=out)
    if use_triton(hidden) and ggml_gemm.is_faster(hidden, weight):
        return ggml_gemm.ggml_gemm(hidden, weight, gated=gated, residual=residual, out=out)
    if residual is not None:
        return _multiply_slices(hidden, weight, residual, add=True)
    if out is None or gated:
        result = _multiply_slices(hidden, weight, hidden.new_empty(len(hidden), len(weight.values)), add=False)
        output = swiglu(result) if gated else result
        return output if out is None else out.copy_(output)
    return _multiply_slices(hidden, weight, out, add=False)


def scratch_values(weight: GgmlTensor, device: torch.device) -> int:
    """Return how many values of `weight` are dequantized at a time for many tokens on `device`."""
    return slice_rows(len(weight.values), weight.columns, device) * weight.columns


def slice_rows(num_rows: int, columns: int, device: torch.device) -> int:
    """Return the number of rows per slice of a weight [num_rows, columns]. Slices have about equal sizes."""
    num_values = SLICE_VALUES if device.type == "cuda" else _CPU_SLICE_VALUES
    slices = -(-num_rows * columns // num_values)
    return min(num_rows, -(-num_rows // (slices * _TILE_ROWS)) * _TILE_ROWS)


def _multiply_slices(hidden: torch.Tensor, weight: GgmlTensor, output: torch.Tensor, *, add: bool) -> torch.Tensor:
    """Write hidden W^T to `output`, or add it, by dequantizing a bounded number of rows of the weight at a time."""
    rows = slice_rows(len(weight.values), weight.columns, hidden.device)
    scratch = hidden.new_empty(rows, weight.columns)
    for start in range(0, len(weight.values), rows):
        part = weight.rows(slice(start, start + rows))
        dense = dequantize(part, scratch[: len(part.values)])
        columns = output[:, start : start + rows]
        if add:
            columns.addmm_(hidden, dense.t())
        else:
            multiply_into(hidden, dense, columns)
    return output
