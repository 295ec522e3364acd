"""Products of tokens with an FP8 weight matrix: both sides in e4m3 with a scale a row, sums in float32.

The forms are those of kernels/linear.py. A token is quantised to the same values by every body, so that an answer
depends as little on the size of the batch as it does in wider types.
"""

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.fp8_few_tokens import fp8_few_tokens, fp8_one_token, suits_fp8_few_tokens
from meltcore.kernels.fp8_quantise import Fp8Rows, quantise
from meltcore.kernels.fp8_tiles import fp8_tiles, suits_fp8_tiles
from meltcore.kernels.norm import Norm
from meltcore.kernels.swiglu import swiglu

# Of both sizes of a weight: the tensor cores' instructions read 16 bytes at a time (torch._scaled_mm checks it).
SIZE_MULTIPLE = 16


def fp8_linear(hidden: torch.Tensor, weight: Fp8Rows, norm: Norm | None = None) -> torch.Tensor:
    """hidden [tokens, input_size], normalised if `norm` is given, times weight [output_size, input_size] transposed.

    Returns [tokens, output_size] in the type of `hidden`.
    """
    return _product(hidden, weight, norm)


def fp8_gated_linear(hidden: torch.Tensor, weight: Fp8Rows, norm: Norm | None = None) -> torch.Tensor:
    """silu(gate) * up, where gate and up are the halves of `fp8_linear(hidden, weight, norm)`."""
    return _product(hidden, weight, norm, gated=True)


def fp8_linear_add(residual: torch.Tensor, hidden: torch.Tensor, weight: Fp8Rows) -> torch.Tensor:
    """Add `fp8_linear(hidden, weight)` to residual [tokens, output_size], contiguous, in place, and return it."""
    return _product(hidden, weight, residual=residual)


def _product(
    hidden: torch.Tensor,
    weight: Fp8Rows,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """By the body that suits the number of tokens."""
    in_triton = use_triton(hidden)
    if in_triton and hidden.shape[0] == 1 and suits_fp8_few_tokens(hidden, weight):
        return fp8_one_token(hidden, weight, norm, gated=gated, residual=residual)
    tokens = quantise(hidden, norm)
    if in_triton and suits_fp8_few_tokens(hidden, weight):
        return fp8_few_tokens(tokens, weight, hidden.dtype, gated=gated, residual=residual)
    if in_triton and suits_fp8_tiles(hidden, weight):
        return fp8_tiles(tokens, weight, hidden.dtype, gated=gated, residual=residual)
    product = (_scaled_mm if in_triton else _product_torch)(tokens, weight, hidden.dtype)
    if gated:
        return swiglu(product)
    return product if residual is None else residual.add_(product)


def _product_torch(tokens: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
    sums = tokens.values.float() @ weight.values.float().t()
    return (sums * tokens.scales[:, None] * weight.scales).to(dtype)


def _scaled_mm(tokens: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
    """By torch's kernel for scales a row, whose output is bfloat16 only."""
    product = torch._scaled_mm(
        tokens.values,
        weight.values.t(),
        scale_a=tokens.scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product.to(dtype)
