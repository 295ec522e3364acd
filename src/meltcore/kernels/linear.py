"""Products of tokens with a weight matrix, together with what stands around them in a block.

A block of a decoder adds to the residual stream twice: residual += W2 f(W1 norm(residual)). Each function here is one
product of it with its neighbours, because for few tokens a kernel of their own would take as long as the product.
"""

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.one_token import one_token, suits_one_token
from meltcore.kernels.swiglu import swiglu
from meltcore.kernels.tiled_product import suits_tiles, tiled_product


def linear(
    hidden: torch.Tensor, weight: torch.Tensor, norm: Norm | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """hidden [tokens, input_size], normalised if `norm` is given, times weight [output_size, input_size] transposed.

    Returns [tokens, output_size]; in the memory of `out`, where there is one, contiguous.
    """
    if use_triton(hidden) and suits_one_token(hidden, weight):
        return one_token(hidden, weight, norm, out=out)
    if use_triton(hidden) and suits_tiles(hidden, weight):
        product = tiled_product(_normalised(hidden, norm), weight)
        return product if out is None else out.copy_(product)
    if out is None:
        return _linear_torch(hidden, weight, norm)
    return torch.mm(_normalised(hidden, norm), weight.t(), out=out)


def gated_linear(hidden: torch.Tensor, weight: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
    """silu(gate) * up, where gate and up are the halves of `linear(hidden, weight, norm)`.

    weight: [2 * size, input_size]. Returns [tokens, size].
    """
    if use_triton(hidden) and suits_one_token(hidden, weight):
        return one_token(hidden, weight, norm, gated=True)
    if use_triton(hidden) and suits_tiles(hidden, weight):
        return tiled_product(_normalised(hidden, norm), weight, gated=True)
    return swiglu(_linear_torch(hidden, weight, norm))


def linear_add(residual: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add `linear(hidden, weight)` to residual [tokens, output_size], contiguous, in place, and return it."""
    if use_triton(hidden) and suits_one_token(hidden, weight):
        return one_token(hidden, weight, residual=residual)
    if use_triton(hidden) and suits_tiles(hidden, weight):
        return tiled_product(hidden, weight, residual=residual)
    return residual.addmm_(hidden, weight.t())


def _linear_torch(hidden: torch.Tensor, weight: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(_normalised(hidden, norm), weight)


def _normalised(hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return rms_norm(hidden, *norm) if norm else hidden
