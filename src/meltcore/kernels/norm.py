"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

import torch


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each last-dimension row to unit mean square, then by `weight`.

    hidden: [..., size] any float type; weight: [size]. Returns the shape and type of `hidden`.
    """
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(hidden.dtype) * weight


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `hidden` to the residual stream and normalise the sum: one pass over memory where it is fused.

    hidden, residual: [tokens, size]. Returns (normalised, new residual).
    """
    residual = residual + hidden
    return rms_norm(residual, weight, eps), residual
