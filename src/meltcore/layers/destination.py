"""Where a tensor of a checkpoint goes."""

from typing import Protocol

import torch


class Destination(Protocol):
    """A view of a parameter, or what stores a tensor in another form."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: torch.Tensor) -> object: ...


class Reordered:
    """Rows of a checkpoint's tensor in another order: `order[i]` is which of them becomes row i of `target`."""

    def __init__(self, target: Destination, order: torch.Tensor) -> None:
        if order.shape[0] != target.shape[0]:
            raise ValueError(f"an order of {order.shape[0]} rows for a tensor of {list(target.shape)}")
        self._target, self._order = target, order

    @property
    def shape(self) -> torch.Size:
        return self._target.shape

    def copy_(self, source: torch.Tensor) -> None:
        self._target.copy_(source[self._order.to(source.device)])
