"""Reads the tensors of a checkpoint folder by their published names, to write them in another format.

Quantized weights (AWQ, GPTQ, FP8) are dequantized one at a time, with the layer classes of the engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from meltcore.common.errors import ConfigError
from meltcore.kernels.fp8.block_fp8 import BLOCK
from meltcore.layers.half_weights import stored_values
from meltcore.layers.int4_weights import Int4Format, int4_method
from meltcore.layers.quantization import QuantizationMethod
from meltcore.layers.weight_loader import MatrixPart
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.checkpoints.tensor_file import TensorFile
from meltcore.models.configs.quantization_config import (
    AwqConfig,
    GptqConfig,
    QuantizationConfig,
    read_quantization_config,
)
from meltcore.models.decoders.model import Model
from meltcore.models.loader import build_meta_model, check_tensors, open_files
from meltcore.models.quantized.published_fp8 import fp8_method
from meltcore.models.quantized.published_int4 import stored_formats

# Of one read: float32 copies of a part and what it is computed with take about 100 MB.
_PART_VALUES = 2**22


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a file. If the file's tensor merges several, such as experts, this is its rows from `first_row` on.

    `name` is the name in the file, and `shape` the shape of this tensor.
    """

    file: TensorFile
    name: str
    shape: tuple[int, ...]
    first_row: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the file stores the tensor."""
        return self.file.dtype(self.name)

    @property
    def is_merged(self) -> bool:
        """Whether the file's tensor merges this tensor with other tensors."""
        return self.file.entries[self.name].shape != self.shape

    def read(self) -> torch.Tensor:
        """Read the tensor."""
        return torch.cat(list(self.parts())).reshape(self.shape)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the rows in parts of bounded size, [rows, columns] as stored.

        Each value of a one-dimensional tensor is a row.
        """
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
        """Raise ConfigError if `largest`, the largest magnitude of some values, is not finite or is above `limit`."""
        if not math.isfinite(largest):
            raise ConfigError(f"{self.file.path}: {self.name} has values that are not finite numbers")
        if largest > limit:
            problem = f"a value of magnitude {largest:g}; {format_name} holds up to {limit:g}"
            raise ConfigError(f"{self.file.path}: {self.name} has {problem}")


@dataclass(frozen=True)
class DequantizedTensor(SourceTensor):
    """A quantized matrix that is read as float32 values.

    Args:
        name: the weight's name in an unquantized file.
        method: the quantization method of a layer that loads the weight.
        stored: the tensors that hold the weight, each by the last part of its name.
    """

    method: QuantizationMethod = dataclasses.field(kw_only=True)
    stored: Mapping[str, SourceTensor] = dataclasses.field(kw_only=True)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return torch.float32

    @property
    def is_merged(self) -> bool:
        """Whether the file merges this tensor with other tensors."""
        return any(tensor.is_merged for tensor in self.stored.values())

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the rows in parts of bounded size, [rows, columns] float32."""
        rows, columns = self.shape
        weight = self.method.linear((rows,), columns)
        part = MatrixPart((rows, columns), (range(rows),), range(columns), range(rows))
        for end, target in weight.tensors(part).items():
            if end in self.stored:
                try:
                    target.copy_(self.stored[end].read())
                except ValueError as error:
                    raise ConfigError(f"{self.file.path}: {self.stored[end].name} {error}") from error
        assert isinstance(weight, nn.Module)
        yield from stored_values(weight).split(max(1, _PART_VALUES // columns))


class SourceTensors(NamedTuple):
    """The tensors of an open checkpoint.

    Args:
        tensors: the model's own tensors by published name, with an entry for each expert.
        checkpoint: the checkpoint without the quantization of its files.
        model: the model without the quantization of its files.
        others: files and names of tensors that the model does not read, such as an image encoder's.
    """

    checkpoint: Checkpoint
    model: Model
    tensors: dict[str, SourceTensor]
    others: list[tuple[TensorFile, str]]


@contextmanager
def open_tensors(checkpoint: Checkpoint, *, allow_requantize: bool = False) -> Iterator[SourceTensors]:
    """Open a checkpoint folder. A checkpoint with quantized weights needs `allow_requantize`.

    Raises ConfigError for a quantized checkpoint without `allow_requantize`, for a GGUF file (gguf_requantize.py reads
    these), and for a checkpoint that cannot be served.
    """
    if checkpoint.gguf is not None:
        raise ConfigError(f"{checkpoint.name} is a GGUF file; a folder with safetensors files is read here")
    fields = (checkpoint.config, checkpoint.config.get("text_config"))
    is_quantized = any(isinstance(each, dict) and each.get("quantization_config") is not None for each in fields)
    if is_quantized and not allow_requantize:
        raise ConfigError(
            f"{checkpoint.name} is quantized already: config.json has a quantization_config. Rounding rounded values "
            "loses more than quantizing the original model; --allow-requantize does it nevertheless"
        )
    published = read_quantization_config(checkpoint.config)
    model = build_meta_model(checkpoint, torch.bfloat16, torch.device("meta"))
    check_tensors(model, checkpoint)
    with ExitStack() as stack:
        files = [stack.enter_context(file) for file in open_files(checkpoint)]
        tensors, others = _stored_tensors(model, files)
        if published is not None:
            formats: Mapping[str, Int4Format] = {}
            if isinstance(published, AwqConfig | GptqConfig):
                formats = stored_formats(published, files, model.canonical_name)
            checkpoint = _without_quantization(checkpoint)
            model = build_meta_model(checkpoint, torch.bfloat16, torch.device("meta"))
            tensors = _dequantized_tensors(published, formats, tensors, model)
        # In the model's order, which follows the layers.
        yield SourceTensors(checkpoint, model, {name: tensors[name] for name in model.checkpoint_tensors()}, others)


def _stored_tensors(
    model: Model, files: Sequence[TensorFile]
) -> tuple[dict[str, SourceTensor], list[tuple[TensorFile, str]]]:
    """Return the model's tensors by published name, and file and name of each tensor that the model does not read."""
    loaders, fused_tensors = model.checkpoint_tensors(), model.fused_tensors()
    tensors: dict[str, SourceTensor] = {}
    others: list[tuple[TensorFile, str]] = []
    for file in files:
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
    return tensors, others


def _dequantized_tensors(
    published: QuantizationConfig,
    formats: Mapping[str, Int4Format],
    stored: Mapping[str, SourceTensor],
    model: Model,
) -> dict[str, SourceTensor]:
    """Return a model's tensors without quantization.

    `stored` has the files' tensors, and `formats` the formats of modules with 4-bit weights.
    """
    loaders = model.checkpoint_tensors()
    ends: dict[str, dict[str, SourceTensor]] = {}
    for name, tensor in stored.items():
        module, _, end = name.rpartition(".")
        if name == f"{module}.weight" or name not in loaders:
            ends.setdefault(module, {})[end] = tensor
    tensors: dict[str, SourceTensor] = {}
    for name, loader in loaders.items():
        module = name.removesuffix(".weight")
        if name in stored and stored[name].dtype in stored[name].file.DTYPES.values():
            tensors[name] = stored[name]
            continue
        first = next(iter(ends[module].values()))
        own_name = f"{first.name.rpartition('.')[0]}.weight" if not first.is_merged else name
        if isinstance(published, AwqConfig | GptqConfig):
            method = int4_method(formats[module])
        else:
            method = fp8_method(published, module, BLOCK)
        shape = tuple(loader.shape)
        tensors[name] = DequantizedTensor(first.file, own_name, shape, method=method, stored=ends[module])
    return tensors


def _without_quantization(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy of the checkpoint whose configuration has no quantization."""
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config["text_config"] = {name: value for name, value in nested.items() if name != "quantization_config"}
    return dataclasses.replace(checkpoint, config=config)
