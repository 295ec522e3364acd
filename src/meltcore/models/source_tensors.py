"""Reads the tensors of an unquantized checkpoint by their published names, to write them in another format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from meltcore.errors import ConfigError
from meltcore.models.checkpoint import Checkpoint
from meltcore.models.loader import build_meta_model, check_tensors, open_files
from meltcore.models.model import Model
from meltcore.models.tensor_file import TensorFile

# Of one read: float32 copies of a part and what it is computed with take about 100 MB.
_PART_VALUES = 2**22


class SourceTensor(NamedTuple):
    """A tensor of a file, or the rows from `first_row` on of one that merges several, such as the experts of a layer.

    name: in the file; shape: of this tensor.
    """

    file: TensorFile
    name: str
    shape: tuple[int, ...]
    first_row: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The type that it is stored in."""
        return self.file.dtype(self.name)

    @property
    def is_merged(self) -> bool:
        """Whether the file merges it with others."""
        return self.file.entries[self.name].shape != self.shape

    def read(self) -> torch.Tensor:
        """Read the tensor."""
        return torch.cat(list(self.parts())).reshape(self.shape)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the rows in parts of bounded size, [rows, columns] as stored. In one dim, each value is a row."""
        columns = self.shape[-1] if len(self.shape) > 1 else 1
        num_rows = math.prod(self.shape) // max(1, columns)
        stored_shape = self.file.entries[self.name].shape
        step = max(1, _PART_VALUES // max(1, columns))
        for start in range(0, num_rows, step):
            stop = min(num_rows, start + step)
            if self.is_merged and len(stored_shape) == 3:  # [experts, rows of each, columns]
                expert, row = divmod(self.first_row + start, stored_shape[1])
                part = self.file.read(self.name, (slice(expert, expert + 1), slice(row, row + stop - start)))
            elif len(stored_shape) <= 2:
                part = self.file.read(self.name, (slice(self.first_row + start, self.first_row + stop),))
            else:  # a convolution, of few values
                part = self.file.read(self.name).reshape(-1, columns)[start:stop]
            yield part.reshape(-1, columns)

    def check_largest(self, largest: float, limit: float, format_name: str) -> None:
        """Raise ConfigError if the largest magnitude of some of the values is not finite, or beyond `limit`."""
        if not math.isfinite(largest):
            raise ConfigError(f"{self.file.path}: {self.name} has values that are not finite numbers")
        if largest > limit:
            size = f"a value of magnitude {largest:g}; {format_name} holds up to {limit:g}"
            raise ConfigError(f"{self.file.path}: {self.name} has {size}")


class SourceTensors(NamedTuple):
    """The tensors of an open checkpoint. `tensors`: those of the model, by published name, an entry for each expert.

    others: the tensors that the model does not read, such as those of vision, as files and names.
    """

    model: Model
    tensors: dict[str, SourceTensor]
    others: list[tuple[TensorFile, str]]


@contextmanager
def open_tensors(checkpoint: Checkpoint) -> Iterator[SourceTensors]:
    """Open a checkpoint folder whose weights are unquantized.

    Raises ConfigError for a quantized checkpoint, for a GGUF file, which gguf_requantize.py reads, and for one that
    cannot be served.
    """
    if checkpoint.gguf is not None:
        raise ConfigError(f"{checkpoint.name} is a GGUF file; a folder with safetensors files is read here")
    for fields in (checkpoint.config, checkpoint.config.get("text_config")):
        if isinstance(fields, dict) and fields.get("quantization_config") is not None:
            raise ConfigError(
                f"{checkpoint.name} is quantized already: config.json has a quantization_config; "
                "quantizing starts from an unquantized one, or with --allow-requantize from a quantized GGUF file"
            )
    model = build_meta_model(checkpoint, torch.bfloat16, torch.device("meta"))
    check_tensors(model, checkpoint)
    loaders, fused_tensors = model.checkpoint_tensors(), model.fused_tensors()
    tensors: dict[str, SourceTensor] = {}
    others: list[tuple[TensorFile, str]] = []
    with ExitStack() as stack:
        for file in [stack.enter_context(file) for file in open_files(checkpoint)]:
            for name, entry in file.entries.items():
                canonical_name = model.canonical_name(name)
                if canonical_name in loaders:
                    tensors[canonical_name] = SourceTensor(file, name, entry.shape)
                elif canonical_name in fused_tensors:
                    first_row = 0
                    for merged_name in fused_tensors[canonical_name].checkpoint_names:
                        shape = tuple(loaders[merged_name].shape)
                        tensors[merged_name] = SourceTensor(file, name, shape, first_row)
                        first_row += shape[0]
                else:
                    others.append((file, name))
        # In the model's order, which is that of the layers.
        yield SourceTensors(model, {name: tensors[name] for name in loaders}, others)
