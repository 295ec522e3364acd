"""Reads parts of the tensors of a checkpoint file. Each format has a subclass that reads the file's header.

The file is read and not memory-mapped. A mapping is loaded in pages of 4 KiB on first access, which is a quarter as
fast. It is slower still when the file is not in the page cache yet (benchmarks/load_checkpoint.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

import torch

from meltcore.common.errors import ConfigError
from meltcore.layers.weight_loader import WeightLoader

# Separate ranges are read one by one when they are at least this long; else the bytes between them are read too.
_MIN_RANGE_BYTES = 64 * 1024

# Tables that a model computes from its configuration and older libraries saved: rotary frequencies, their sines and
# cosines, causal masks, positions. Other loaders skip them too.
_DERIVED_NAME = re.compile(
    r"(^|\.)(\w*inv_freq|(cos|sin|cos_sin)_cached?|freqs_cis|masked_bias|\w*_mask|position_ids|attn_rot_embd\.weight)$"
    r"|(^|\.)(rotary|rope)\w*\.(cos|sin|freqs)$|(^|\.)rotary_(pos_)?emb(_\w+)?\.(?!(.+\.)?(weight|bias)$)"
)
_MASK_NAME = re.compile(r"attn\.(bias|mask)$|attention\.(bias|mask)$")  # a bias of a layer has one dimension

Index = Sequence[slice]


class TensorEntry(NamedTuple):
    """A tensor of a file: its type as the format names it, its shape, and the file offset of its first byte."""

    dtype_name: str
    shape: tuple[int, ...]
    offset: int


def is_derived(name: str, entry: TensorEntry) -> bool:
    """Return whether the values of a tensor follow from the configuration, so that a model may ignore the tensor."""
    is_mask = len(entry.shape) > 1 and _MASK_NAME.search(name) is not None
    return is_mask or _DERIVED_NAME.search(name) is not None


class TensorFile:
    """An open file of tensors: `entries` by name. Several threads may call `read` concurrently."""

    DTYPES: ClassVar[dict[str, torch.dtype]]  # by the format's names: the types that weights may be stored in
    QUANTIZED_DTYPES: ClassVar[dict[str, torch.dtype]] = {}  # and those of quantized weights with scales
    entries: dict[str, TensorEntry]

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ConfigError when it is unreadable."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor. Raises ConfigError if weights cannot have this type."""
        dtypes = self.DTYPES | self.QUANTIZED_DTYPES
        dtype_name = self.entries[name].dtype_name
        if dtype_name not in dtypes:
            raise self._dtype_error(name, f"weights must be unquantized: {', '.join(self.DTYPES)}")
        return dtypes[dtype_name]

    def check_dtype(self, name: str, dtypes: Collection[torch.dtype]) -> None:
        """Raise ConfigError if the type of a tensor is not in `dtypes`.

        Without `dtypes` it must be an unquantized type.
        """
        dtype_name = self.entries[name].dtype_name
        known_dtypes = self.DTYPES | self.QUANTIZED_DTYPES
        if dtypes and known_dtypes.get(dtype_name) not in dtypes:
            names = [known_name for known_name, dtype in known_dtypes.items() if dtype in dtypes]
            raise self._dtype_error(name, f"quantization_config asks for {' or '.join(names)}")
        if not dtypes and dtype_name not in self.DTYPES:
            kind = "scales must be" if name.endswith(("_scale", "_scale_inv")) else "weights must be unquantized:"
            raise self._dtype_error(name, f"{kind} {', '.join(self.DTYPES)}")

    def _dtype_error(self, name: str, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {self.stored_name(name)} is stored as {self.entries[name].dtype_name}; {reason}"
        )

    def stored_name(self, name: str) -> str:
        """Return the name that the file gives the tensor `name` of the model."""
        return name

    def adapt(self, name: str, target: WeightLoader, device: torch.device) -> WeightLoader:  # noqa: ARG002 - of formats that store others
        """Return a loader for the tensor as this file stores it. The loader writes to `target`.

        `target` is the loader of the published tensor. Values are converted on `device`, the device of the model.
        """
        return target

    def read(self, name: str, index: Index = (), buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor, or the part of it that `index` selects, into host memory.

        Args:
            name: the tensor.
            index: slices of the first dimensions, with step 1.
            buffer: [bytes] uint8. The result is a view of the buffer if it fits; otherwise memory is allocated.

        Raises ConfigError if the file has become shorter, or if unquantized weights cannot have the tensor's type.
        """
        dtype = self.dtype(name)
        _, shape, offset = self.entries[name]
        bounds = [dim_slice.indices(size)[:2] for dim_slice, size in zip(index, shape, strict=False)]
        bounds += [(0, size) for size in shape[len(bounds) :]]
        # The last dimension that is cut and those after it are contiguous: one range per combination of those before.
        sliced_dims = [dim for dim, (bound, size) in enumerate(zip(bounds, shape, strict=True)) if bound != (0, size)]
        last_sliced_dim = sliced_dims[-1] if sliced_dims else 0
        row_bytes = math.prod(shape[last_sliced_dim + 1 :]) * dtype.itemsize
        first, end = bounds[last_sliced_dim] if shape else (0, 1)
        if (end - first) * row_bytes < _MIN_RANGE_BYTES and last_sliced_dim > 0:
            full_rows = self.read(name, index[:last_sliced_dim], buffer)
            return full_rows[(*(slice(None),) * last_sliced_dim, slice(first, end))]
        result_shape = [end - first for first, end in bounds]
        size = math.prod(result_shape) * dtype.itemsize
        if buffer is None or size > len(buffer):
            buffer = torch.empty(size, dtype=torch.uint8)
        memory = buffer[:size].numpy().data
        range_bytes = (end - first) * row_bytes
        for i, start in enumerate(_range_starts(bounds[:last_sliced_dim], shape[:last_sliced_dim])):
            file_offset = offset + (start * shape[last_sliced_dim] + first) * row_bytes if shape else offset
            self._read_into(memory[i * range_bytes : (i + 1) * range_bytes], file_offset)
        return buffer[:size].view(dtype).view(result_shape)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        bytes_read = 0
        while bytes_read < len(buffer):
            num_read = os.preadv(self._file, [buffer[bytes_read:]], offset + bytes_read)
            if num_read == 0:
                raise ConfigError(f"{self.path} has become shorter while it is read")
            bytes_read += num_read


def _range_starts(bounds: Sequence[tuple[int, int]], shape: Sequence[int]) -> list[int]:
    """Return the flat indices, in an array of `shape`, of all combinations of indices within `bounds`."""
    starts = [0]
    for (first, end), size in zip(bounds, shape, strict=True):
        starts = [start * size + index_in_dim for start in starts for index_in_dim in range(first, end)]
    return starts
