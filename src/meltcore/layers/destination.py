"""Where a tensor of a checkpoint goes."""

from typing import Protocol

import torch


class Destination(Protocol):
    """A view of a parameter, or what stores a tensor in another form."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: torch.Tensor) -> object: ...


def reordered(target: Destination, order: torch.Tensor | None) -> Destination:
    """For a tensor whose row order[i] is to be row i of `target`. order: [rows] int64, None for the same order."""
    if order is None or torch.equal(order, torch.arange(len(order))):
        return target
    return _Reordered(target, order)


class _Reordered:
    def __init__(self, target: Destination, order: torch.Tensor) -> None:
        self._target, self._order = target, order

    @property
    def shape(self) -> torch.Size:
        return self._target.shape

    def copy_(self, source: torch.Tensor) -> None:
        self._target.copy_(source[self._order.to(source.device)])
