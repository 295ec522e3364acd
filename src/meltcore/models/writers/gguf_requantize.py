"""Writes a GGUF file again with matrices in another format, whatever its architecture.

Metadata is copied unchanged, except for the keys that name the format. The gguf package computes the values of the
stored blocks and rounds them again. Host memory holds only some rows of a tensor at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType

from meltcore.common.errors import ConfigError
from meltcore.common.files import atomic_output, check_disk_space
from meltcore.models.checkpoints.checkpoint import Progress
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel, GGUFTensor
from meltcore.models.checkpoints.gguf.gguf_formats import (
    DENSE_TYPES,
    EMBEDDING,
    HEAD,
    ROUTER,
    count_formats,
    expert_group,
)
from meltcore.models.checkpoints.gguf.gguf_kinds import other_kind
from meltcore.models.writers.rounding_loss import RoundingLoss

# Of the formats that are written, the types of their files, and magnitudes beyond which a scale would be infinite.
FILE_TYPES = {
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    GGMLQuantizationType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
}
LARGEST_VALUES = {GGMLQuantizationType.Q8_0: 127 * 65504.0, GGMLQuantizationType.Q4_0: 8 * 65504.0}
QUANTIZATION_VERSION = 2  # of ggml's block formats
_ALIGNMENT = 32
_VERSION = 3
_REPLACED_KEYS = ("general.file_type", "general.quantization_version", "general.alignment")
_PART_VALUES = 2**22


class _NewTensor(NamedTuple):
    """A tensor of the new file: its source, and its new type."""

    name: str
    source: GGUFTensor
    type: GGMLQuantizationType

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.source._replace(type=self.type).num_bytes


def check_requantizable(model: GGUFModel, *, allow_requantize: bool) -> None:
    """Raise ConfigError for a quantized file unless `allow_requantize`, and for formats that cannot be read.

    A file that holds no network, such as an importance matrix, is rejected too. A multimodal projector is accepted.
    """
    kind = other_kind(model)
    if kind is not None and model.metadata.get("general.architecture") != "clip":
        raise ConfigError(f"{model.path} is {kind}, and no model")
    for file in model.files:
        for name, type_id in file.unknown_types.items():
            raise ConfigError(f"{file.path}: {name} has the type {type_id}, which cannot be read")
    quantized = [tensor.type for tensor in model.tensors.values() if tensor.type not in DENSE_TYPES]
    if quantized and not allow_requantize:
        formats_text = count_formats(each.name for each in quantized)
        raise ConfigError(
            f"{model.path} is quantized already: it stores {formats_text}. Rounding rounded values loses more than "
            "quantizing the original model; --allow-requantize does it nevertheless"
        )
    for each in set(quantized):
        try:
            gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[each][1]), dtype=np.uint8), each)
        except NotImplementedError as error:
            raise ConfigError(f"{model.path}: {each.name} cannot be read") from error


def requantize(
    model: GGUFModel, path: Path, target_type: GGMLQuantizationType, progress: Progress, *, overwrite: bool = False
) -> RoundingLoss:
    """Write the GGUF file `path` with the matrices of `model` as type `target_type`, and its output head as Q8_0.

    Tensors that already have their new type are copied. Returns how much the values of the source were rounded. Raises
    ConfigError if the type cannot hold a value, if the disk is full, or if `path` is a file of the source. Raises it
    also for an existing file unless `overwrite`.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; a GGUF file is written")
    if path.exists() and any(path.samefile(file.path) for file in model.files):
        raise ConfigError(f"{path} is the source, so it is not replaced")
    tensors = [_NewTensor(name, tensor, _new_type(model, name, target_type)) for name, tensor in model.tensors.items()]
    rounding_loss = RoundingLoss()
    with atomic_output(path, overwrite=overwrite) as temporary_path:
        check_disk_space(path, sum(tensor.num_bytes for tensor in tensors))
        with temporary_path.open("wb") as file:
            file.write(_header(model, tensors, target_type))
            for index, tensor in enumerate(tensors):
                _pad(file)
                for part in _blocks(model, tensor, rounding_loss):
                    file.write(part.data)
                progress("quantizing", (index + 1) / len(tensors))
            _pad(file)
        GGUFModel(temporary_path)
    return rounding_loss


def _new_type(model: GGUFModel, name: str, target_type: GGMLQuantizationType) -> GGMLQuantizationType:
    """Return the type of a tensor in the new file.

    Vectors and routers stay unquantized, and so does a matrix whose rows are not whole blocks. One kernel computes all
    experts of a layer, so if one expert stays unquantized, all of them do.
    """
    tensor = model.tensors[name]
    tensor_names = expert_group(model.tensors, name) or [name]
    columns = [model.tensors[each].shape[-1] for each in tensor_names]
    is_matrix = len(tensor.shape) > 1 and ROUTER not in name
    if not is_matrix or any(size % GGML_QUANT_SIZES[target_type][0] for size in columns):
        return tensor.type if tensor.type in DENSE_TYPES else GGMLQuantizationType.F32
    is_head = name == HEAD or (name == EMBEDDING and HEAD not in model.tensors)
    return GGMLQuantizationType.Q8_0 if is_head else target_type


def _header(model: GGUFModel, tensors: list[_NewTensor], target_type: GGMLQuantizationType) -> bytes:
    """Return everything before the first tensor except the padding."""
    first = model.files[0]
    kept_keys = [key for key in first.metadata if key not in _REPLACED_KEYS and not key.startswith("split.")]
    numbers = {"general.file_type": int(FILE_TYPES[target_type]), "general.quantization_version": QUANTIZATION_VERSION}
    values = [first.raw_value(key) for key in kept_keys]
    values += [_text(key) + struct.pack("<II", GGUFValueType.UINT32, value) for key, value in numbers.items()]
    infos, offset = [], 0
    for tensor in tensors:
        dims = tensor.source.shape[::-1]
        infos.append(_text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type, offset))
        offset += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(values)) + b"".join([*values, *infos])


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _blocks(model: GGUFModel, tensor: _NewTensor, rounding_loss: RoundingLoss) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the rows of a tensor in its new type. Raises ConfigError if the type cannot hold a value."""
    file, source = model.file_by_tensor[tensor.name], tensor.source
    source_blocks = file.blocks(tensor.name)
    rows_per_part = max(1, _PART_VALUES // source.shape[-1])
    for start in range(0, prod(source.shape[:-1]), rows_per_part):
        rows = source_blocks[start : start + rows_per_part]
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(rows, source.type)
        largest, limit = float(np.abs(values).max()), LARGEST_VALUES.get(tensor.type, np.inf)
        if not np.isfinite(largest):
            raise ConfigError(f"{file.path}: {tensor.name} has values that are not finite numbers")
        if largest > limit:
            size = f"a value of magnitude {largest:g}; {tensor.type.name} holds up to {limit:g}"
            raise ConfigError(f"{file.path}: {tensor.name} has {size}")
        if source.type != tensor.type:
            rows = gguf.quants.quantize(values, tensor.type)
            rounding_loss.add(values, gguf.quants.dequantize(rows, tensor.type))
        yield rows
