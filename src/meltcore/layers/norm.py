"""Normalisation layers."""

from collections.abc import Callable

import torch
from torch import nn

from meltcore.kernels import norm as kernels
from meltcore.layers.destination import Destination


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    @property
    def destination(self) -> Destination:
        """Where a checkpoint's weight goes."""
        return self.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(hidden, self.weight, self.eps)

    def parts(self) -> kernels.Norm:
        """For kernels that normalise on the way."""
        return kernels.Norm(self.weight, self.eps)


class ZeroCentredNorm(RMSNorm):
    """A norm whose published weight is the distance of the scale from one.

    The scale itself is what is held, in float32 whatever the model's type: 16 bits would lose most of what was
    published.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, torch.float32)

    @property
    def destination(self) -> Destination:
        return _OneMore(self.weight)


# What makes a layer's norms, from their size.
MakeNorm = Callable[[int], RMSNorm]


class _OneMore:
    """What arrives is stored plus one."""

    def __init__(self, scale: torch.Tensor) -> None:
        self._scale = scale

    @property
    def shape(self) -> torch.Size:
        return self._scale.shape

    def copy_(self, source: torch.Tensor) -> None:
        self._scale.copy_(source.float() + 1)
