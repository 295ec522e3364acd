"""Weight loaders copy a checkpoint tensor, or the slices that this rank needs, into parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
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
    """Passes a checkpoint tensor of `shape` to `store`, which converts and stores it.

    The tensor may be stored in one of `dtypes`; an empty tuple allows any type of unquantized weights. `rows` returns
    the loader of a range of rows, or None if a tensor of several rows can only be stored as a whole.
    """

    shape: torch.Size
    store: Callable[[torch.Tensor], object]
    dtypes: tuple[torch.dtype, ...] = ()
    rows: Callable[[range], WeightLoader | None] = lambda _: None

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


def stored_dtypes(target: WeightLoader) -> tuple[torch.dtype, ...]:
    """Return the types that the checkpoint tensor may have. An empty tuple allows any type of unquantized weights."""
    if isinstance(target, ShardLoader):
        return stored_dtypes(target.slices[0][1])
    return target.dtypes if isinstance(target, ConvertingLoader) else ()


def row_loader(target: WeightLoader, rows: range) -> WeightLoader | None:
    """Return the loader of some rows of a checkpoint tensor. Returns None if the tensor is only stored as a whole.

    The loader skips sharded rows that this rank does not keep.
    """
    if isinstance(target, torch.Tensor):
        return target[as_slice(rows)] if target.dim() else None
    if isinstance(target, ConvertingLoader):
        return target.rows(rows)
    if not isinstance(target, ShardLoader):
        return None
    slices = []
    for index, part in target.slices:
        start, stop, _ = (index[0] if index else slice(None)).indices(target.shape[0])
        kept_rows = range(max(start, rows.start), max(start, rows.start, min(stop, rows.stop)))
        part_rows = row_loader(part, range(kept_rows.start - start, kept_rows.stop - start))
        if part_rows is None:
            return None
        if len(kept_rows) > 0:
            slices.append(((slice(kept_rows.start - rows.start, kept_rows.stop - rows.start), *index[1:]), part_rows))
    return ShardLoader(torch.Size((len(rows), *target.shape[1:])), tuple(slices))


def split_rows(target: WeightLoader, max_rows: int) -> Iterator[tuple[range, WeightLoader]]:
    """Yield ranges of up to `max_rows` rows and their loaders.

    If `target` is only stored as a whole, yield all rows and `target`.
    """
    num_rows = target.shape[0] if target.shape else 1
    if num_rows <= max_rows or row_loader(target, range(max_rows)) is None:
        yield range(num_rows), target
        return
    for first_row in range(0, num_rows, max_rows):
        rows = range(first_row, min(num_rows, first_row + max_rows))
        part = row_loader(target, rows)
        assert part is not None, "where some rows can be stored alone, all can"
        yield rows, part


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


def concatenated_loader(parts: Sequence[WeightLoader]) -> WeightLoader:
    """Return the loader of a checkpoint tensor whose rows are the rows of the tensors of `parts`, one after another."""
    slices: list[tuple[Index, WeightLoader]] = []
    start = 0
    for part in parts:
        for index, target in part.slices if isinstance(part, ShardLoader) else (((), part),):
            rows = range(part.shape[0])[index[0] if index else slice(None)]
            slices.append(((slice(start + rows.start, start + rows.stop), *index[1:]), target))
        start += part.shape[0]
    return ShardLoader(torch.Size((start, *parts[0].shape[1:])), tuple(slices))


def permuted_loader(target: WeightLoader, row_order: torch.Tensor | None) -> WeightLoader:
    """Return a loader that copies row row_order[i] of a checkpoint tensor into row i of `target`.

    row_order: [rows] int64; None keeps the order.
    """
    if row_order is None or torch.equal(row_order, torch.arange(len(row_order))):
        return target
    return ConvertingLoader(
        target.shape, lambda source: target.copy_(source[row_order.to(source.device)]), stored_dtypes(target)
    )


def all_columns(columns: range) -> range:
    """Return `columns`. This is the `source_columns` of a tensor with one number per column of its matrix."""
    return columns


class MatrixPart(NamedTuple):
    """This rank's part of a checkpoint's matrix of `shape`, and the rows of a layer's weight that hold this part.

    Args:
        outputs: ranges of the matrix's rows that are kept, one after another.
        inputs: the matrix's columns that are kept.
        rows: the rows of the weight that hold the kept rows.
        row_order: kept row i is row row_order[i] of the kept rows in the checkpoint. None keeps the order.
    """

    shape: tuple[int, int]
    outputs: tuple[range, ...]
    inputs: range
    rows: range
    row_order: torch.Tensor | None = None

    def loader(
        self, target: Callable[[int, int], WeightLoader], source_columns: Callable[[range], range] = all_columns
    ) -> WeightLoader:
        """Return the loader of a checkpoint tensor that has the matrix's rows.

        `target` returns the loader of rows `start` to `stop` - 1 of the weight. `source_columns` returns the columns of
        the tensor that hold some columns of the matrix.
        """
        columns, width = as_slice(source_columns(self.inputs)), len(source_columns(range(self.shape[1])))
        shape = (self.shape[0], width)
        unsharded = target(self.rows.start, self.rows.stop)
        if len(self.outputs) == 1:
            return shard_loader(permuted_loader(unsharded, self.row_order), shape, as_slice(self.outputs[0]), columns)
        if tuple(unsharded.shape) == shape:
            return unsharded
        stops = list(accumulate(map(len, self.outputs), initial=self.rows.start))
        return ShardLoader(
            torch.Size(shape),
            tuple(
                ((as_slice(kept_outputs), columns), target(start, stop))
                for kept_outputs, (start, stop) in zip(self.outputs, pairwise(stops), strict=True)
            ),
        )

    def source_rows(self) -> torch.Tensor:
        """Return the row in the checkpoint of each row of the weight, [rows] int64."""
        kept_rows = torch.cat([torch.arange(rows.start, rows.stop, device="cpu") for rows in self.outputs])
        return kept_rows if self.row_order is None else kept_rows[self.row_order]


def as_slice(index_range: range) -> slice:
    """Convert a range with step 1 to the slice that selects the same indices."""
    return slice(index_range.start, index_range.stop)
