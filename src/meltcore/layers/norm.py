"""Normalisation layers."""

import torch
from torch import nn

from meltcore.kernels import norm as kernels


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(hidden, self.weight, self.eps)

    def parts(self) -> kernels.Norm:
        """For kernels that normalise on the way."""
        return kernels.Norm(self.weight, self.eps)
