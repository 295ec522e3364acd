"""Matrix multiplication of tokens with a weight, fused with the neighboring operations of a decoder block.

A block adds to the residual stream twice: residual += W2 f(W1 norm(residual)). For few tokens a separate kernel for the
norm, the activation or the addition would take as long as the matmul.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from meltcore.kernels.activation import swiglu
from meltcore.kernels.gemm import gemv as gemv_kernel
from meltcore.kernels.gemm import split_k, tma
from meltcore.kernels.launch import use_triton
from meltcore.kernels.norm import Norm, rms_norm


class LinearOptions(TypedDict, total=False):
    """Options of a matrix multiplication, as `linear` explains them. At most one may be given."""

    gated: bool
    residual: torch.Tensor | None
    out: torch.Tensor | None


def linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute norm(hidden) W^T by the fastest kernel: hidden [tokens, K], weight [N, K] -> [tokens, N].

    At most one of `gated`, `residual` and `out` may be given.

    Args:
        hidden: [tokens, K].
        weight: [N, K].
        norm: None means that `hidden` is normalized already.
        gated: whether the result is silu(gate) * up, [tokens, N / 2], where gate and up are the halves of the GEMM's
            columns.
        residual: [tokens, N], contiguous. The result is added to `residual` in place, and `residual` is returned.
        out: [tokens, N], contiguous. The result is written to `out`. A float32 `out` takes the sums without rounding
            them to the type of `hidden`.
    """
    in_triton = use_triton(hidden)
    if in_triton and gemv_kernel.supports(hidden, weight, gated=gated):
        return gemv_kernel.gemv(hidden, weight, norm, gated=gated, residual=residual, out=out)
    use_split_k = in_triton and split_k.supports(hidden, weight)
    hidden = rms_norm(hidden, *norm) if norm else hidden
    if use_split_k:
        return split_k.split_k_gemm(hidden, weight, gated=gated, residual=residual, out=out)
    if gated and in_triton and tma.is_faster(len(hidden), len(weight)) and tma.supports(hidden, weight):
        return tma.tma_gemm(hidden, weight, hidden.dtype, gated=True)
    if residual is not None:
        return residual.addmm_(hidden, weight.t())
    if out is not None:
        return multiply_into(hidden, weight, out)
    output = torch.nn.functional.linear(hidden, weight)
    return swiglu(output) if gated else output


def apply_options(
    sums: torch.Tensor,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply the options of `linear` to a finished hidden W^T, [tokens, N]. Rows of `out` may be strided."""
    if residual is not None:
        return residual.add_(sums)
    result = swiglu(sums) if gated else sums
    return result if out is None else out.copy_(result)


def multiply_into(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write hidden W^T to `out` by the library's GEMM: hidden [tokens, K], weight [N, K], out [tokens, N].

    `out` has the type of `hidden`, or float32 for sums that are not rounded. Its rows may be strided.
    """
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    if hidden.device.type == "cpu":  # torch has no such GEMM there
        return torch.mm(hidden.to(out.dtype), weight.to(out.dtype).t(), out=out)
    return torch.mm(hidden, weight.t(), out.dtype, out=out)
