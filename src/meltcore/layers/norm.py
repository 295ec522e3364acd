"""Normalization layers."""

from collections.abc import Callable

import torch
from torch import nn

from meltcore.kernels import norm as kernels
from meltcore.layers.weight_loader import ConvertingLoader, WeightLoader


class RMSNorm(nn.Module):
    """Applies a root-mean-square norm with a learned scale. weight: [size]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    @property
    def loader(self) -> WeightLoader:
        """The weight loader of the checkpoint's weight."""
        return self.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension of `hidden` [..., size]. Returns the same shape and type."""
        return kernels.rms_norm(hidden, self.weight, self.eps)

    def parameters_for_fusion(self) -> kernels.Norm:
        """Return weight and eps for a kernel that fuses this norm."""
        return kernels.Norm(self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """An RMS norm whose checkpoint stores its scale minus 1.

    `weight` is the scale itself, in float32 whatever the model's type: 16 bits would lose most of the stored digits.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, torch.float32)

    @property
    def loader(self) -> WeightLoader:
        """The weight loader of the checkpoint's weight. It adds one."""
        return ConvertingLoader(self.weight.shape, lambda source: self.weight.copy_(source.float() + 1))


# Makes a norm of a given size.
NormFactory = Callable[[int], RMSNorm]
