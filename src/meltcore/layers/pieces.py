"""Checkpoint tensors of which a rank holds a part: only that part is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from meltcore.layers.destination import Destination

Index = tuple[slice, ...]


class Pieces:
    """A checkpoint's tensor of `shape`: for each piece that is held, where it lies in the tensor and where it goes."""

    def __init__(self, shape: Sequence[int], *pieces: tuple[Index, Destination]) -> None:
        self.shape = torch.Size(shape)
        self.pieces = pieces

    def copy_(self, source: torch.Tensor) -> None:
        for index, target in self.pieces:
            target.copy_(source[index])


def piece(target: Destination, shape: Sequence[int], *index: slice) -> Destination:
    """Where a tensor of `shape` goes of which `target` is to hold what `index` says: all of it, or a piece."""
    return target if tuple(target.shape) == tuple(shape) else Pieces(shape, (index, target))


def stacked_piece(
    shape: Sequence[int], kept: Sequence[range], sizes: Sequence[int], targets: Sequence[Destination]
) -> Destination:
    """Where a tensor of `shape` goes in which matrices of `sizes` rows stand one below the other: of the i-th, the rows
    kept[i] are held by targets[i]."""
    first = np.cumsum([0, *sizes]).tolist()
    places = [range(start + rows.start, start + rows.stop) for start, rows in zip(first, kept, strict=False)]
    return Pieces(shape, *(((within(place),), target) for place, target in zip(places, targets, strict=True)))


def within(part: range) -> slice:
    return slice(part.start, part.stop)
