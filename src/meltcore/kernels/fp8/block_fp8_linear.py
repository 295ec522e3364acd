"""Matrix multiplication of tokens with an FP8 weight that has a scale per block: both operands in e4m3.

Every kernel quantizes a token to the same values, per block of 128 columns. So an answer depends on the batch size as
little as in wider types.
"""

from __future__ import annotations

import torch

from meltcore.kernels.fp8 import block_fp8_wgmma
from meltcore.kernels.fp8.block_fp8 import BlockFp8Tensor, quantize_tokens
from meltcore.kernels.fp8.block_fp8_gemm import block_fp8_gemm
from meltcore.kernels.gemm.gemv import output_tensor
from meltcore.kernels.gemm.linear import apply_options
from meltcore.kernels.launch import use_triton
from meltcore.kernels.norm import Norm
from meltcore.kernels.quant import ggml_skinny_gemm


def block_fp8_linear(
    hidden: torch.Tensor,
    weight: BlockFp8Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute norm(hidden) W^T: hidden [tokens, K], weight [N, K] -> [tokens, N] in the type of `hidden`.

    The options are explained at `linear` in gemm/linear.py, and rows of `out` may be strided.
    """
    tokens = len(hidden)
    if not use_triton(hidden):
        sums = block_fp8_linear_reference(hidden, weight, norm)
        return apply_options(sums, gated=gated, residual=residual, out=out)
    output = output_tensor(hidden, weight.values, gated, residual, out)
    if tokens == 0:
        return output
    as_bytes = weight.as_bytes() if tokens == 1 else None
    if as_bytes is not None and ggml_skinny_gemm.stages(hidden, as_bytes, norm):
        out = output if residual is None else None
        return ggml_skinny_gemm.ggml_skinny_gemm(hidden, as_bytes, norm, gated=gated, residual=residual, out=out)
    inputs, has_residual = quantize_tokens(hidden, weight, norm), residual is not None
    if block_fp8_wgmma.is_faster(hidden, weight, output, gated=gated):
        return block_fp8_wgmma.block_fp8_wgmma(inputs, weight, output, gated=gated, has_residual=has_residual)
    return block_fp8_gemm(inputs, weight, output, gated=gated, has_residual=has_residual)


def block_fp8_linear_reference(hidden: torch.Tensor, weight: BlockFp8Tensor, norm: Norm | None = None) -> torch.Tensor:
    """Compute norm(hidden) W^T in PyTorch in float32, as the specification of the GEMM."""
    quantized = quantize_tokens(hidden, weight, norm)
    return (quantized.dequantize() @ weight.dequantize().t()).to(hidden.dtype)
