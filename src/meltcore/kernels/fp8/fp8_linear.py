"""Matrix multiplication of tokens with an FP8 weight: both operands in e4m3 with a scale per row, sums in float32.

Every kernel quantizes a token to the same values, so that an answer depends on the batch size as little as in wider
types.
"""

from __future__ import annotations

import torch

from meltcore.kernels.fp8 import fp8_gemv, fp8_split_k
from meltcore.kernels.fp8.fp8 import Fp8Tensor, quantize
from meltcore.kernels.gemm import tma
from meltcore.kernels.gemm.linear import apply_options
from meltcore.kernels.launch import use_triton
from meltcore.kernels.norm import Norm

# Of both sizes of a weight: the tensor cores' instructions read 16 bytes at a time (torch._scaled_mm checks it).
SIZE_MULTIPLE = 16
# Of tokens, up to which split-K tiles are faster than those by TMA on Hopper GPUs, without and with an activation.
_MAX_SPLIT_K_TOKENS, _MAX_GATED_SPLIT_K_TOKENS = 256, 128


def fp8_linear(
    hidden: torch.Tensor,
    weight: Fp8Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantize norm(hidden) per token and multiply it by an FP8 weight, by the kernel for this number of tokens.

    The options are explained at `linear` in gemm/linear.py. The result has the type of `hidden`.
    """
    in_triton = use_triton(hidden)
    is_skinny = in_triton and fp8_gemv.supports(hidden, weight)
    if is_skinny and hidden.shape[0] == 1:
        return fp8_gemv.fp8_gemv(hidden, weight, norm, gated=gated, residual=residual)
    quantized = quantize(hidden, norm)
    if is_skinny:
        return fp8_gemv.fp8_skinny_gemm(quantized, weight, hidden.dtype, gated=gated, residual=residual)
    if in_triton and uses_tma(quantized, weight, gated=gated):
        scales = quantized.scales, weight.scales
        return tma.tma_gemm(
            quantized.values, weight.values, hidden.dtype, scales=scales, gated=gated, residual=residual
        )
    if in_triton and fp8_split_k.supports(hidden, weight):
        return fp8_split_k.fp8_split_k_gemm(quantized, weight, hidden.dtype, gated=gated, residual=residual)
    output = (_scaled_mm if in_triton else _matmul_reference)(quantized, weight, hidden.dtype)
    return apply_options(output, gated=gated, residual=residual)


def uses_tma(hidden: Fp8Tensor, weight: Fp8Tensor, *, gated: bool) -> bool:
    """Return whether the GEMM with TMA supports these tensors and is faster than the other GEMMs."""
    max_tokens = _MAX_GATED_SPLIT_K_TOKENS if gated else _MAX_SPLIT_K_TOKENS
    return len(hidden.values) > max_tokens and tma.supports(hidden.values, weight.values)


def _matmul_reference(quantized: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype) -> torch.Tensor:
    sums = quantized.values.float() @ weight.values.float().t()
    return (sums * quantized.scales[:, None] * weight.scales).to(dtype)


def _scaled_mm(quantized: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply by torch's kernel with a scale per row, which has bfloat16 outputs only."""
    output = torch._scaled_mm(
        quantized.values,
        weight.values.t(),
        scale_a=quantized.scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return output.to(dtype)
