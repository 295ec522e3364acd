"""Weight loaders copy a checkpoint tensor, or the slices that this rank needs, into parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

Index = tuple[slice, ...]


class WeightLoader(Protocol):
    """The target of a checkpoint tensor: a view of a parameter, or an object that stores the tensor in another form."""

    @property
    def shape(self) -> torch.Size:
        """The shape that the checkpoint tensor must have."""

    def copy_(self, source: torch.Tensor) -> object:
        """Store `source`, a tensor of `shape`."""


class ConvertingLoader(NamedTuple):
    """Passes a checkpoint tensor of `shape` to `store`, which converts and stores it."""

    shape: torch.Size
    store: Callable[[torch.Tensor], object]

    def copy_(self, source: torch.Tensor) -> None:
        """Convert and store `source`."""
        self.store(source)


class ShardLoader(NamedTuple):
    """Loads slices of a checkpoint tensor of `shape`, each into its own target. The rest is never read."""

    shape: torch.Size
    slices: tuple[tuple[Index, WeightLoader], ...]

    def copy_(self, source: torch.Tensor) -> None:
        """Store each slice of `source` in its target."""
        for index, target in self.slices:
            target.copy_(source[index])


def shard_loader(target: WeightLoader, shape: Sequence[int], *index: slice) -> WeightLoader:
    """Return a loader of the slice `index` of a checkpoint tensor of `shape`.

    Returns `target` itself if it has that shape, since the slice is then the whole tensor.
    """
    is_whole = tuple(target.shape) == tuple(shape)
    return target if is_whole else ShardLoader(torch.Size(shape), ((index, target),))


def merged_shard_loader(
    shape: Sequence[int], local_rows: Sequence[range], sizes: Sequence[int], targets: Sequence[WeightLoader]
) -> WeightLoader:
    """Return a loader for a checkpoint tensor of `shape` that concatenates matrices of sizes[i] rows.

    Rows local_rows[i] of matrix i are copied into targets[i].
    """
    starts = accumulate(sizes, initial=0)
    row_slices = [slice(start + rows.start, start + rows.stop) for start, rows in zip(starts, local_rows, strict=False)]
    return ShardLoader(
        torch.Size(shape), tuple(((rows,), target) for rows, target in zip(row_slices, targets, strict=True))
    )


def permuted_loader(target: WeightLoader, row_order: torch.Tensor | None) -> WeightLoader:
    """Return a loader that copies row row_order[i] of a checkpoint tensor into row i of `target`.

    row_order: [rows] int64; None keeps the order.
    """
    if row_order is None or torch.equal(row_order, torch.arange(len(row_order))):
        return target
    return ConvertingLoader(target.shape, lambda source: target.copy_(source[row_order.to(source.device)]))


def as_slice(index_range: range) -> slice:
    """Convert a range with step 1 to the slice that selects the same indices."""
    return slice(index_range.start, index_range.stop)
