"""A file of a checkpoint in the safetensors format, of which parts are read: https://github.com/huggingface/safetensors

Eight bytes give the length of a header, the header is JSON (names, types, shapes, places), and the tensors follow. A
file is read rather than mapped: a mapping comes in by pages of 4 KiB as they are touched, which is a quarter as fast,
and slower still where the file is not in memory yet (benchmarks/load_checkpoint.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from meltcore.errors import ConfigError

# What weights may be stored in. Narrower types and whole numbers are a quantised checkpoint's, and mean nothing without
# the scales beside them.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LONGEST_HEADER = 100_000_000  # the format's own limit
# Parts that lie apart are read one by one if they are at least this long; else all that lies between is read too.
_LEAST_RUN_BYTES = 64 * 1024

Index = Sequence[slice]


class Entry(NamedTuple):
    """A tensor in a file: its type as the file calls it, its shape, and where its bytes begin."""

    kind: str
    shape: tuple[int, ...]
    offset: int


class Shard:
    """An open file. `entries` are its tensors by name; several threads may `read` at once."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be read or is none of this format."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        try:
            self.entries = self._read_header()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            os.close(self._file)
            raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is read in. Raises ConfigError for one that weights cannot have here."""
        kind = self.entries[name].kind
        if kind not in _DTYPES:
            raise ConfigError(
                f"{self.path}: {name} is stored as {kind}; weights must be unquantised here: {', '.join(_DTYPES)}"
            )
        return _DTYPES[kind]

    def read(self, name: str, index: Index = (), buffer: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor, or the part of it within `index` (slices without steps, of the first dimensions), on the host.

        It lies in `buffer` ([bytes] uint8) if it fits there, else in memory of its own. Raises ConfigError where the
        file has become shorter, or for a type that weights cannot have.
        """
        dtype = self.dtype(name)
        _, shape, offset = self.entries[name]
        bounds = [each.indices(size)[:2] for each, size in zip(index, shape, strict=False)]
        bounds += [(0, size) for size in shape[len(bounds) :]]
        # Up to the last dimension that is cut, every combination of the ones before begins a run of its own.
        cuts = [at for at, (bound, size) in enumerate(zip(bounds, shape, strict=True)) if bound != (0, size)]
        cut = cuts[-1] if cuts else 0
        row = math.prod(shape[cut + 1 :]) * dtype.itemsize
        first, last = bounds[cut] if shape else (0, 1)
        if (last - first) * row < _LEAST_RUN_BYTES and cut > 0:
            whole = self.read(name, index[:cut], buffer)
            return whole[(*(slice(None),) * cut, slice(first, last))]
        wanted = [last - first for first, last in bounds]
        size = math.prod(wanted) * dtype.itemsize
        if buffer is None or size > len(buffer):
            buffer = torch.empty(size, dtype=torch.uint8)
        content = buffer[:size].numpy().data
        length = (last - first) * row
        for run, start in enumerate(_starts(bounds[:cut], shape[:cut])):
            place = offset + (start * shape[cut] + first) * row if shape else offset
            self._read_into(content[run * length : (run + 1) * length], place)
        return buffer[:size].view(dtype).view(wanted)

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._file).st_size
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header: dict[str, Any] = json.loads(os.pread(self._file, length, 8))
        header.pop("__metadata__", None)
        entries = {}
        for name, fields in header.items():
            kind, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
            if not isinstance(kind, str) or any(type(number) is not int or number < 0 for number in (*shape, begin)):
                raise ValueError(f"{name} has the type {kind!r} and the shape {list(shape)} from {begin!r} on")
            # Of a type that we do not know, the file may hold tensors that nobody reads.
            fits = kind not in _DTYPES or end - begin == math.prod(shape) * _DTYPES[kind].itemsize
            if not fits or not begin <= end <= size - 8 - length:
                raise ValueError(f"{name} stands from {begin} to {end} in a file of {size} bytes")
            entries[name] = Entry(kind, shape, 8 + length + begin)
        return entries

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], offset + done)
            if count == 0:
                raise ConfigError(f"{self.path} has become shorter while it is read")
            done += count


def _starts(bounds: Sequence[tuple[int, int]], shape: Sequence[int]) -> list[int]:
    """The places in the flat order of `shape` of all combinations within `bounds`."""
    starts = [0]
    for (first, last), size in zip(bounds, shape, strict=True):
        starts = [start * size + at for start in starts for at in range(first, last)]
    return starts
