"""Reads the graph and the weights of an ONNX file, without running it.

ONNX is a protobuf message (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). Only the fields that lead to
weights are read: nodes, their scalar attributes, and tensors, whose values are in the file or in files beside it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch

from meltcore.common.errors import ConfigError

_MAX_FILE_BYTES = 2**31  # protobuf's own limit
_MAX_FIELDS = 4_000_000
_MAX_DIMS = 8
_DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16, 6: torch.int32, 7: torch.int64}
_DTYPES |= {2: torch.uint8, 3: torch.int8, 9: torch.bool}
# Fields that hold values as protobuf packs them, which is as `raw_data` has them: of float, double and int64 tensors.
_FLOATS, _DOUBLES, _RAW = 4, 10, 9


class OnnxError(ValueError):
    """Reports that a file is invalid. The caller adds the file's name."""


class OnnxTensor(NamedTuple):
    """A tensor: its shape, ONNX's number of its type, and the location of its bytes.

    `problem` says why it cannot be read.
    """

    name: str
    shape: tuple[int, ...]
    data_type: int
    path: Path
    offset: int
    size: int
    problem: str = ""

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the values, or None if values of this type are not supported."""
        return _DTYPES.get(self.data_type)

    def read(self) -> torch.Tensor:
        """Read the tensor into host memory. Raises ConfigError if it cannot be read."""
        if self.problem or self.dtype is None:
            raise ConfigError(f"{self.path}: {self.name} {self.problem or f'has the ONNX type {self.data_type}'}")
        values = np.fromfile(self.path, np.uint8, self.size, offset=self.offset)
        if len(values) < self.size:
            raise ConfigError(f"{self.path} has become shorter while it is read")
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(values).view(self.dtype).view(self.shape)


class OnnxNode(NamedTuple):
    """An operation. `tensor` is the value of a Constant, and `texts` holds attributes that are text."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    integers: Mapping[str, int]
    texts: Mapping[str, str]


@dataclass
class OnnxGraph:
    """The nodes of a file in their order, and its tensors by name: initializers and constants."""

    path: Path
    nodes: list[OnnxNode] = field(default_factory=list)
    tensors: dict[str, OnnxTensor] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> OnnxGraph:
        """Read a file.

        Raises ConfigError if it is damaged, not an ONNX file, or refers to files outside of its folder.
        """
        graph = cls(path)
        try:
            # Anything but a regular file, such as a pipe, could be waited on forever.
            if not path.is_file():
                raise ConfigError(f"{path} is missing")
            size = path.stat().st_size
            if not 0 < size <= _MAX_FILE_BYTES:
                raise OnnxError(f"it has {size} bytes, which must be 1 to {_MAX_FILE_BYTES}")
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _Reader(content, graph).read_model(size)
        except (OnnxError, OSError, UnicodeDecodeError, struct.error) as error:
            raise ConfigError(f"{path} cannot be read as an ONNX file: {error}") from error
        graph._check_overlaps()
        graph._resolve_identities()
        return graph

    def users(self, name: str) -> list[OnnxNode]:
        """Return the nodes that read the value `name`."""
        return [node for node in self.nodes if name in node.inputs]

    def _check_overlaps(self) -> None:
        last: OnnxTensor | None = None
        for tensor in sorted(self.tensors.values(), key=lambda each: (str(each.path), each.offset)):
            if (
                last is not None
                and tensor.path == last.path
                and tensor.size
                and tensor.offset < last.offset + last.size
            ):
                raise ConfigError(f"{self.path}: {tensor.name} and {last.name} overlap in {tensor.path.name}")
            last = tensor if tensor.size else last

    def _resolve_identities(self) -> None:
        """Add the names of tensors that the export merged with equal tensors. Identity nodes refer to these names."""
        for node in self.nodes:
            if node.op == "Identity" and len(node.inputs) == 1 and node.inputs[0] in self.tensors:
                self.tensors.setdefault(node.outputs[0], self.tensors[node.inputs[0]])


class _Reader:
    """Reads messages of a file's bytes. A message is given by the position of its first byte and of its end."""

    def __init__(self, content: mmap.mmap, graph: OnnxGraph) -> None:
        self._content, self._graph = content, graph
        self._fields = 0

    def read_model(self, size: int) -> None:
        """Read a ModelProto."""
        graphs = [value for number, value in self._read_fields(0, size) if number == 7]
        if len(graphs) != 1:
            raise OnnxError(f"it has {len(graphs)} graphs")
        for number, value in self._read_fields(*_require_message(graphs[0])):
            if number == 1:
                self._add_node(*_require_message(value))
            elif number == 5:
                self._add_tensor(self._tensor(*_require_message(value)))
        if not self._graph.nodes:
            raise OnnxError("its graph is empty")

    def _read_fields(self, position: int, end: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
        """Yield the number of each field of a message, with its value: a number, or the begin and end of its bytes."""
        while position < end:
            self._fields += 1
            if self._fields > _MAX_FIELDS:
                raise OnnxError(f"it has more than {_MAX_FIELDS} fields")
            key, position = self._varint(position, end)
            number, wire_type = key >> 3, key & 7
            if wire_type == 0:
                value, position = self._varint(position, end)
                yield number, value
                continue
            length = {1: 8, 5: 4}.get(wire_type)
            if wire_type == 2:
                length, position = self._varint(position, end)
            if length is None or length > end - position:
                raise OnnxError(f"byte {position} begins a field of wire type {wire_type} and {length} bytes")
            yield number, (position, position + length)
            position += length

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                break
            byte = self._content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (2**64 - 1), position
        raise OnnxError(f"byte {position} is not in a number")

    def _text(self, value: int | tuple[int, int]) -> str:
        begin, end = _require_message(value)
        return self._content[begin:end].decode()

    def _add_node(self, begin: int, end: int) -> None:
        inputs, outputs, op, name = [], [], "", ""
        integers: dict[str, int] = {}
        texts: dict[str, str] = {}
        constant: OnnxTensor | None = None
        for number, value in self._read_fields(begin, end):
            if number == 1:
                inputs.append(self._text(value))
            elif number == 2:
                outputs.append(self._text(value))
            elif number == 3:
                name = self._text(value)
            elif number == 4:
                op = self._text(value)
            elif number == 5:
                constant = self._read_attribute(*_require_message(value), integers, texts) or constant
        if not outputs:
            raise OnnxError(f"its node {name!r} has no output")
        if op == "Constant" and constant is not None:
            self._add_tensor(constant._replace(name=outputs[0]))
        self._graph.nodes.append(OnnxNode(op, name, tuple(inputs), tuple(outputs), integers, texts))

    def _read_attribute(
        self, begin: int, end: int, integers: dict[str, int], texts: dict[str, str]
    ) -> OnnxTensor | None:
        """Read an attribute. Returns the tensor in the attribute, or None if it has none."""
        name, tensor = "", None
        integer: int | None = None
        text: str | None = None
        for number, value in self._read_fields(begin, end):
            if number == 1:
                name = self._text(value)
            elif number == 3 and isinstance(value, int):
                integer = value
            elif number == 4:
                text = self._text(value)
            elif number == 5:
                tensor = self._tensor(*_require_message(value))
        if integer is not None:
            integers[name] = integer
        if text is not None:
            texts[name] = text
        return tensor

    def _add_tensor(self, tensor: OnnxTensor) -> None:
        if tensor.name in self._graph.tensors:
            raise OnnxError(f"it has two tensors named {tensor.name}")
        self._graph.tensors[tensor.name] = tensor

    def _tensor(self, begin: int, end: int) -> OnnxTensor:
        shape: list[int] = []
        name, data_type, is_external = "", 0, False
        values: tuple[int, int] | None = None
        external: dict[str, str] = {}
        for number, value in self._read_fields(begin, end):
            if number == 1 and isinstance(value, int):
                shape.append(value)
            elif number == 1:
                shape += self._read_packed(*_require_message(value))
            elif number == 2 and isinstance(value, int):
                data_type = value
            elif number == 8:
                name = self._text(value)
            elif number in (_FLOATS, _DOUBLES, _RAW) and isinstance(value, tuple):
                values = value
            elif number == 13:
                pair = [self._text(part) for _, part in self._read_fields(*_require_message(value))]
                external |= dict([pair]) if len(pair) == 2 else {}
            elif number == 14:
                is_external = value == 1
        if len(shape) > _MAX_DIMS or any(size >= 2**48 for size in shape):
            raise OnnxError(f"{name} has the shape {shape[:_MAX_DIMS]}")
        if is_external:
            return self._locate_external(OnnxTensor(name, tuple(shape), data_type, self._graph.path, 0, 0), external)
        offset, stop = values or (begin, begin)
        tensor = OnnxTensor(name, tuple(shape), data_type, self._graph.path, offset, stop - offset)
        expected = _tensor_bytes(tensor)
        # Other types, such as text, and int32 values in variable lengths, are no weights: reading one is an error.
        return tensor if expected == tensor.size else tensor._replace(problem=f"has {tensor.size} of {expected} bytes")

    def _read_packed(self, position: int, end: int) -> Iterator[int]:
        while position < end:
            value, position = self._varint(position, end)
            yield value

    def _locate_external(self, tensor: OnnxTensor, fields: Mapping[str, str]) -> OnnxTensor:
        """Return the tensor with the location of its bytes in the external file that `fields` name."""
        location = fields.get("location", "")
        relative = PurePosixPath(location)
        # Links are followed, since the hub's cache consists of them.
        if not location or relative.is_absolute() or ".." in relative.parts or "\\" in location or "\0" in location:
            raise OnnxError(f"{tensor.name} is in {location!r}, which must be a file beside it")
        numbers = {name: fields.get(name, "") for name in ("offset", "length")}
        if any(text and not (text.isascii() and text.isdecimal() and len(text) < 20) for text in numbers.values()):
            raise OnnxError(f"{tensor.name} has the offset {numbers['offset']!r} and length {numbers['length']!r}")
        path = self._graph.path.parent / relative
        if not path.is_file():
            raise OnnxError(f"{tensor.name} is in {location}, which is missing")
        offset, size = int(numbers["offset"] or 0), _tensor_bytes(tensor)
        length = int(numbers["length"] or size)
        available = path.stat().st_size
        if length != size or offset + size > available:
            raise OnnxError(
                f"{tensor.name} of shape {list(tensor.shape)} takes {size} bytes; it has {length} from {offset} on in "
                f"{location}, a file of {available}"
            )
        return tensor._replace(path=path, offset=offset, size=size)


def _require_message(value: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, int):
        raise OnnxError("a number is where a message must be")
    return value


def _tensor_bytes(tensor: OnnxTensor) -> int:
    """Return the number of bytes of a tensor, or 0 if its type is not supported."""
    item_bytes = tensor.dtype.itemsize if tensor.dtype else 0
    return item_bytes * int(np.prod(tensor.shape, dtype=object)) if tensor.shape else item_bytes
