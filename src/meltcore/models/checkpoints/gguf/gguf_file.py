"""Reads the headers of GGUF files: metadata, and the type, shape and place of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here and not by
gguf.GGUFReader, which trusts every count and length of a file. It also builds several arrays per text: 11 s for a
vocabulary of 262,144 tokens, against 0.03 s here. The gguf package gives types and sizes of blocks. This module
does not import torch.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from meltcore.common.errors import ConfigError

_MAGIC, _BIG_ENDIAN_MAGIC = b"GGUF", b"FUGG"
_VERSIONS = (2, 3)  # version 1 has shorter counts; no published file of these architectures is of it
# A header of 262,144 tokens with scores and merges takes 20 MB. The limit bounds what a hostile file costs: a second.
_MAX_HEADER_BYTES = 2**26
# Published models have up to some 2,500 tensors and 60 metadata values. Reading 65,536 of each takes half a second.
_MAX_COUNT = 2**16
# A vocabulary of 262,144 tokens with 513,511 merges has 775,655 texts. Walking and decoding this many takes a second.
_MAX_TEXTS = 2**21
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 2**16
_ALIGNMENT_KEY = "general.alignment"
_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"(.+-)(\d{5})(-of-(\d{5})\.gguf)", re.IGNORECASE)


class GGUFArray(NamedTuple):
    """An undecoded array of the metadata: the type and number of its values, and the offset of its first byte."""

    value_type: GGUFValueType
    length: int
    offset: int


class GGUFTensor(NamedTuple):
    """A tensor of a file: its type, its shape (rows first, as in PyTorch) and the file offset of its first byte."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is a whole number of blocks."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return int(self.shape[-1] // block_size * block_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.row_bytes * prod(self.shape[:-1])


class GGUFFile:
    """The header of one GGUF file.

    `metadata` has numbers, texts and undecoded arrays by key. `tensors` has the tensors by name. `unknown_types` has
    the type numbers of tensors whose block size is unknown, by tensor name.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises ConfigError naming the key or tensor that is invalid."""
        self.path = path
        if path.exists() and not path.is_file():  # opening a named pipe waits for a writer
            raise ConfigError(f"{path} cannot be read: it is not a regular file")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ConfigError(f"{path} cannot be read: {error}") from error
        header = _HeaderParser(path, self._data)
        num_tensors, num_values = header.counts()
        self.metadata: dict[str, Any] = {}
        self._raw_values: dict[str, slice] = {}
        for index in range(num_values):
            start = header.position
            key = header.text(f"the name of metadata value {index + 1} of {num_values}")
            if key in self.metadata:
                raise ConfigError(f"{path}: the metadata has {key} twice")
            self.metadata[key] = header.value(key)
            self._raw_values[key] = slice(start, header.position)
        self.tensors: dict[str, GGUFTensor] = {}
        self.unknown_types: dict[str, int] = {}
        for index in range(num_tensors):
            name = header.text(f"the name of tensor {index + 1} of {num_tensors}")
            if name in self.tensors or name in self.unknown_types:
                raise ConfigError(f"{path}: tensor {name} is there twice")
            tensor = header.tensor(name)
            if isinstance(tensor, GGUFTensor):
                self.tensors[name] = tensor
            else:
                self.unknown_types[name] = tensor
        self._place_tensors(header.position)

    def texts(self, key: str) -> list[str]:
        """Decode an array of texts. Raises ConfigError for a value of another type and for invalid UTF-8."""
        array = self.metadata[key]
        if not isinstance(array, GGUFArray) or array.value_type != GGUFValueType.STRING:
            raise ConfigError(f"{self.path}: {key} must be an array of texts; got {describe_value(array)}")
        data, position, texts, unpack = self._data, array.offset, [], _UINT64.unpack_from
        try:
            for _ in range(array.length):
                start = position + 8
                position = start + unpack(data, position)[0]
                texts.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}: {key}: text {len(texts)} is not UTF-8: {error}") from error
        return texts

    def numbers(self, key: str) -> np.ndarray[Any, Any]:
        """Decode an array of numbers. Raises ConfigError for a value of another type."""
        array = self.metadata[key]
        if not isinstance(array, GGUFArray) or array.value_type not in _NUMBERS:
            raise ConfigError(f"{self.path}: {key} must be an array of numbers; got {describe_value(array)}")
        return np.frombuffer(self._data, _NUMBERS[array.value_type], array.length, array.offset).copy()

    def raw_value(self, key: str) -> bytes:
        """Return the bytes of a metadata value with its key and its type, as stored."""
        return self._data[self._raw_values[key]]

    def blocks(self, name: str) -> np.ndarray[Any, Any]:
        """Return the bytes of a tensor as stored: a memory-mapped view [rows, bytes of a row] uint8.

        The rows are the product of all dimensions but the last.
        """
        tensor = self.tensors[name]
        flat = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(-1, tensor.row_bytes)

    def _place_tensors(self, header_bytes: int) -> None:
        """Count offsets of tensors from the beginning of the file.

        Raises ConfigError for tensors that are beyond the end of the file, unaligned or overlapping.
        """
        alignment = self.metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ConfigError(
                f"{self.path}: {_ALIGNMENT_KEY} must be a power of two up to {_MAX_ALIGNMENT}; "
                f"got {describe_value(alignment)}"
            )
        data_start = -(-header_bytes // alignment) * alignment
        end, previous = data_start, "the header"
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset % alignment:
                raise ConfigError(f"{self.path}: {name} begins at {tensor.offset}, which is no multiple of {alignment}")
            placed = tensor._replace(offset=data_start + tensor.offset)
            if placed.offset < end:
                raise ConfigError(f"{self.path}: {name} begins at byte {placed.offset}, within {previous}")
            end, previous = placed.offset + placed.num_bytes, name
            if end > len(self._data):
                raise ConfigError(
                    f"{self.path}: {name}, {tensor.type.name} {list(tensor.shape)}, ends at byte {end}; "
                    f"the file has {len(self._data)} bytes, so it was cut short or is damaged"
                )
            self.tensors[name] = placed


class GGUFModel:
    """The files of a GGUF checkpoint: a single file, or the parts of a split checkpoint.

    The first part has the metadata.
    """

    def __init__(self, path: Path) -> None:
        """Read and check all headers. `path` is the file, or any part of a split checkpoint.

        Raises ConfigError if a part is missing or belongs to another checkpoint.
        """
        self.files = [GGUFFile(part) for part in split_paths(path)]
        self.path = self.files[0].path
        self.metadata, self.texts, self.numbers = self.files[0].metadata, self.files[0].texts, self.files[0].numbers
        for index, file in enumerate(self.files):
            for key, expected in (("split.no", index), ("split.count", len(self.files))):
                found = file.metadata.get(key, index if key == "split.no" else 1)
                if found != expected and not (key == "split.count" and found == 0 and len(self.files) == 1):
                    raise ConfigError(
                        f"{file.path}: {key} is {describe_value(found)}, and the file's name asks for {expected} "
                        "(parts are named NAME-00001-of-0000N.gguf)"
                    )
        self.file_by_tensor: dict[str, GGUFFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self.file_by_tensor:
                    raise ConfigError(f"{file.path}: tensor {name} is in {self.file_by_tensor[name].path.name} too")
                self.file_by_tensor[name] = file
        self.unknown_types = {name: number for file in self.files for name, number in file.unknown_types.items()}
        found = len(self.file_by_tensor) + len(self.unknown_types)
        total = self.metadata.get("split.tensors.count", found)
        if total != found:
            raise ConfigError(f"{self.path}: split.tensors.count is {describe_value(total)}; the parts hold {found}")

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """The tensors of all parts by name."""
        return {name: file.tensors[name] for name, file in self.file_by_tensor.items()}


class _HeaderParser:
    """Reads a header value by value. Every length is checked against the end of the file before it is used."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.position = 0
        self._num_texts = 0  # of all arrays
        self._path, self._data, self._end = path, data, min(len(data), _MAX_HEADER_BYTES)

    def counts(self) -> tuple[int, int]:
        """Read magic, version and the numbers of tensors and of metadata values."""
        magic = self._data[:4]
        if magic == _BIG_ENDIAN_MAGIC:
            raise self._error("the file is big-endian GGUF; little-endian is supported")
        if magic != _MAGIC:
            raise self._error(f"begins with {magic!r}; a GGUF file begins with {_MAGIC!r}")
        self.position = 4
        version = self._unpack(_UINT32, "the version")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise self._error("the file is big-endian GGUF; little-endian is supported")
            raise self._error(f"GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
        return self._count("tensors"), self._count("metadata values")

    def _count(self, subject: str) -> int:
        count = self._unpack(_UINT64, f"the number of {subject}")
        if count > _MAX_COUNT:
            raise self._error(f"the file has {count} {subject}; at most {_MAX_COUNT} are read")
        return count

    def text(self, subject: str) -> str:
        """Read a text, which errors call `what`."""
        length = self._unpack(_UINT64, f"the length of {subject}")
        start = self._skip(length, subject)
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{subject} is not UTF-8: {error}") from error

    def value(self, key: str) -> Any:
        """Read the type and value of a metadata key. An array is checked and not decoded."""
        value_type = self._value_type(key)
        if value_type == GGUFValueType.STRING:
            return self.text(key)
        if value_type == GGUFValueType.ARRAY:
            return self._array(key)
        dtype = np.dtype(_NUMBERS[value_type])
        number = np.frombuffer(self._data, dtype, 1, self._skip(dtype.itemsize, key))[0]
        if value_type == GGUFValueType.BOOL:
            return bool(number)
        # The shortest decimal of a float32 is what its writer meant: 1e-06, not 9.999999974752427e-07.
        return float(str(number)) if dtype.kind == "f" else int(number)

    def tensor(self, name: str) -> GGUFTensor | int:
        """Read shape, type and offset of a tensor. The offset is relative to the end of the header.

        Returns only the type number if the type is unknown.
        """
        num_dims = self._unpack(_UINT32, f"the number of dimensions of {name}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"{name} has {num_dims} dimensions; supported: 1 to {_MAX_DIMS}")
        shape = tuple(self._unpack(_UINT64, f"the shape of {name}") for _ in range(num_dims))[::-1]
        type_id = self._unpack(_UINT32, f"the type of {name}")
        offset = self._unpack(_UINT64, f"the offset of {name}")
        try:
            tensor_type = GGMLQuantizationType(type_id)
            block_size, _ = GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError):
            return type_id
        if min(shape) < 1 or shape[-1] % block_size:
            requirement = f"a multiple of {block_size} values per row" if min(shape) else "no dimension of 0"
            raise self._error(f"{name} has shape {list(shape)}; {tensor_type.name} needs {requirement}")
        return GGUFTensor(tensor_type, shape, offset)

    def _array(self, key: str) -> GGUFArray:
        value_type = self._value_type(key)
        count = self._unpack(_UINT64, f"the length of {key}")
        if value_type == GGUFValueType.ARRAY:
            raise self._error(f"{key} is an array of arrays, which is not supported")
        if value_type != GGUFValueType.STRING:
            return GGUFArray(value_type, count, self._skip(count * np.dtype(_NUMBERS[value_type]).itemsize, key))
        self._num_texts += count
        if self._num_texts > _MAX_TEXTS:
            raise self._error(f"the arrays up to {key} have {self._num_texts} texts; at most {_MAX_TEXTS} are read")
        start = position = self.position
        data, end, unpack = self._data, self._end, _UINT64.unpack_from
        for index in range(count):
            if position + 8 > end:
                raise self._cut_short(f"text {index} of {count} in {key}", position, 8)
            position += 8 + unpack(data, position)[0]
        self.position = start
        self._skip(position - start, key)
        return GGUFArray(value_type, count, start)

    def _value_type(self, key: str) -> GGUFValueType:
        type_id = self._unpack(_UINT32, f"the type of {key}")
        try:
            return GGUFValueType(type_id)
        except ValueError as error:
            raise self._error(f"{key} has the unknown type {type_id}") from error

    def _unpack(self, number: struct.Struct, subject: str) -> int:
        value: int = number.unpack_from(self._data, self._skip(number.size, subject))[0]
        return value

    def _skip(self, num_bytes: int, subject: str) -> int:
        """Move past `num_bytes` bytes. Return the position of the first of them."""
        start = self.position
        if start + num_bytes > self._end:
            raise self._cut_short(subject, start, num_bytes)
        self.position = start + num_bytes
        return start

    def _cut_short(self, subject: str, start: int, num_bytes: int) -> ConfigError:
        limit = f"the file has {len(self._data)}"
        if self._end < len(self._data):
            limit = f"a header may have {_MAX_HEADER_BYTES}"
        return self._error(f"{subject} takes {num_bytes} bytes from byte {start} on; {limit}")

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._path}: {reason}")


def split_paths(path: Path) -> list[Path]:
    """Return all parts of the split checkpoint to which `path` belongs, or `path` alone if it is not split.

    Raises ConfigError if parts are missing, or if the part number in the name is not from 1 to the number of parts.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match[2]), int(match[4])
    if not 1 <= number <= count:
        raise ConfigError(f"{path} is named part {number} of {count}; parts are numbered from 1 to their count")
    parts = [path.with_name(f"{match[1]}{index:05d}{match[3]}") for index in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise ConfigError(f"{path} is one of {count} parts; missing: {', '.join(missing[:5])}")
    return parts


def gguf_checkpoints(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of GGUF files by checkpoint.

    Returns the parts of each checkpoint by the name of its first part.
    """
    checkpoints: dict[str, list[str]] = {}
    for name in sorted(names):
        match = _SPLIT_NAME.fullmatch(name)
        first = name
        if match is not None and 1 <= int(match[2]) <= int(match[4]):
            first = f"{match[1]}00001{match[3]}"
        checkpoints.setdefault(first, []).append(name)
    return checkpoints


def describe_value(value: Any) -> str:
    """Describe a metadata value for an error."""
    if isinstance(value, GGUFArray):
        return f"an array of {value.length} {value.value_type.name}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
