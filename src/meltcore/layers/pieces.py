"""Checkpoint tensors of which a rank holds a part: only that part is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meltcore.layers.destination import Destination

Index = tuple[slice, ...]


class Sliceable(Protocol):
    """A tensor that is still in its file."""

    def __getitem__(self, index: Index, /) -> torch.Tensor: ...


class Pieces:
    """A checkpoint's tensor of `shape`: for each piece that is held, where it lies in the tensor and where it goes."""

    def __init__(self, shape: Sequence[int], *pieces: tuple[Index, Destination]) -> None:
        self.shape = torch.Size(shape)
        self._pieces = pieces

    def copy_(self, source: torch.Tensor | Sliceable) -> None:
        for index, target in self._pieces:
            target.copy_(source[index])


def piece(target: Destination, shape: Sequence[int], *index: slice) -> Destination:
    """Where a tensor of `shape` goes of which `target` is to hold what `index` says: all of it, or a piece."""
    return target if tuple(target.shape) == tuple(shape) else Pieces(shape, (index, target))


def within(part: range) -> slice:
    return slice(part.start, part.stop)
