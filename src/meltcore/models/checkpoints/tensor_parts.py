"""Reads the tensors of a checkpoint's files in parts of bounded size, on threads, into a model's memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from meltcore.common.errors import ConfigError
from meltcore.layers.weight_loader import Index, ShardLoader, WeightLoader, split_rows, stored_dtypes
from meltcore.models.checkpoints.tensor_file import TensorEntry, TensorFile

PART_BYTES = 32 * 2**20


def rows_per_part(shape: Sequence[int], value_bytes: int) -> int:
    """Return the number of rows of a tensor of `shape` that a part of PART_BYTES holds, at least 1."""
    return max(1, PART_BYTES // max(1, math.prod(shape[1:]) * value_bytes))


class TensorPart(NamedTuple):
    """One read of a file: the part `slices` of tensor `name`, and the target to which it is copied."""

    name: str
    slices: Index
    target: WeightLoader

    def target_memory(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the target's memory as [bytes] uint8, or None if the part must be converted before it is stored."""
        target = self.target
        if isinstance(target, torch.Tensor) and target.device.type == "cpu" and target.dtype == dtype:
            return target.detach().view(-1).view(torch.uint8) if target.is_contiguous() else None
        return None

    def store(self, values: torch.Tensor, file: TensorFile) -> None:
        """Copy the values of this read to the target. Raises ConfigError if the target rejects the values."""
        try:
            self.target.copy_(values)
        except ValueError as error:
            raise ConfigError(f"{file.path.name}: {file.stored_name(self.name)} {error}") from error

    def is_read_in_place(self, values: torch.Tensor) -> bool:
        """Return whether `values` already lie in the memory of the target."""
        return isinstance(self.target, torch.Tensor) and self.target.data_ptr() == values.data_ptr()


def split_into_parts(name: str, entry: TensorEntry, target: WeightLoader, file: TensorFile) -> Iterator[TensorPart]:
    """Yield the reads of the slices of a tensor that this rank holds.

    Most tensors are read in parts of bounded size.
    """
    file.check_dtype(name, stored_dtypes(target))
    dtype = file.dtype(name)
    if entry.shape != tuple(target.shape):
        mismatch = f"{list(entry.shape)}; the configuration asks for {list(target.shape)}"
        raise ConfigError(f"{file.path.name}: {file.stored_name(name)} has shape {mismatch}")
    for index, memory in target.slices if isinstance(target, ShardLoader) else (((), target),):
        start = (index[0].start or 0) if index else 0
        for rows, part in split_rows(memory, rows_per_part(entry.shape, dtype.itemsize)):
            part_index = (slice(start + rows.start, start + rows.stop), *index[1:])
            yield TensorPart(name, index if part is memory else part_index, part)


def read_ahead(
    file: TensorFile, parts: Iterable[TensorPart], pool: ThreadPoolExecutor, buffers: Sequence[torch.Tensor]
) -> Iterator[tuple[TensorPart, torch.Tensor]]:
    """Yield each part with its values in order, while threads read the following parts.

    The values are valid until the next iteration. A part that needs no conversion is read into the target's memory if
    that is on the host. Other parts are read into one of the buffers.
    """
    free_buffers = list(buffers)
    reads_in_flight: deque[tuple[TensorPart, torch.Tensor, Future[torch.Tensor]]] = deque()
    for part in (*parts, *[None] * len(buffers)):
        if len(reads_in_flight) == len(buffers) or (part is None and reads_in_flight):
            next_part, buffer, future = reads_in_flight.popleft()
            yield next_part, future.result()
            free_buffers.append(buffer)
        if part is not None:
            buffer = free_buffers.pop()
            target_memory = part.target_memory(file.dtype(part.name))
            target_buffer = buffer if target_memory is None else target_memory
            reads_in_flight.append((part, buffer, pool.submit(file.read, part.name, part.slices, target_buffer)))
