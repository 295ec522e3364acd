"""Reads archives of torch.save and torch.jit.save without executing any of their code.

Both functions write zip files: data.pkl is a pickle, in which tensors are references to uncompressed entries. The
pickle's classes are never imported. Objects become records of their state, and tensors become locations in the file.
The code of TorchScript stays text.

This module does not import torch, since API servers use it too.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from meltcore.common.errors import ConfigError

# Of the pickle, and of all code together, after decompression.
_MAX_PICKLE_BYTES, _MAX_CODE_BYTES = 8 * 2**20, 2 * 2**20
_MAX_ENTRIES = 100_000
_MAX_MEMO = 2**20
_MAX_DEPTH = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Opcodes that look up objects in other ways than by a name in find_class or persistent_load.
_REFUSED_OPCODES = {"EXT1", "EXT2", "EXT4", "INST", "OBJ", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER"}
# Bytes per element, by the names of storages: the types that weights may have.
STORAGES = {"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2}
_OTHER_STORAGES = {"LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "ByteStorage": 1, "CharStorage": 1}
_OTHER_STORAGES["BoolStorage"] = 1


class StoredTensor(NamedTuple):
    """A tensor in the file: its storage's name, its shape, and the file offset of its first byte."""

    dtype_name: str
    shape: tuple[int, ...]
    offset: int


class PickledObject:
    """An object of any class: the arguments of its construction, and its state. No code of its class is executed."""

    values: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes by name, or an empty mapping if the state is not a dict."""
        return self.state if isinstance(self.state, dict) else {}


class _Dict(dict[Any, Any]):
    """A dict that can have attributes, since a pickle may give attributes to an OrderedDict."""


class _Storage(NamedTuple):
    dtype_name: str
    offset: int
    elements: int


class TorchArchive:
    """An archive's objects in `root`, and its code by path."""

    root: Any

    def __init__(self, path: Path) -> None:
        """Read the archive's directory and pickle. Raises ConfigError if the file is damaged or has another format."""
        self.path = path
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                self._read(file, archive)
        except ConfigError:
            raise
        except Exception as error:  # pickle and zipfile raise many types for a damaged file
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"{path} cannot be read as an archive of torch.save: {reason}") from error

    def _read(self, file: Any, archive: zipfile.ZipFile) -> None:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(entries) > _MAX_ENTRIES or len(pickles) != 1:
            raise ValueError(f"{len(entries)} entries with {len(pickles)} data.pkl")
        prefix = pickles[0].removesuffix("data.pkl")
        byte_order = entries.get(f"{prefix}byteorder")
        if byte_order is not None and self._read_entry(archive, byte_order, 16) != b"little":
            raise ValueError("its byte order is not little-endian")
        locations = self._entry_places(file, archive, prefix)
        content = self._read_entry(archive, entries[pickles[0]], _MAX_PICKLE_BYTES)
        _check_opcodes(content)
        self.root = _Unpickler(BytesIO(content), locations).load()
        self.code: dict[str, str] = {}
        left_bytes = _MAX_CODE_BYTES
        for name, entry in entries.items():
            if name.startswith(f"{prefix}code/") and name.endswith(".py"):
                content = self._read_entry(archive, entry, left_bytes)
                left_bytes -= len(content)
                self.code[name.removeprefix(f"{prefix}code/")] = content.decode()

    def _read_entry(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit: int) -> bytes:
        """Read an entry, which may be compressed. The size in its header is not trusted."""
        with archive.open(entry) as opened:
            content = opened.read(limit + 1)
        if len(content) > limit:
            raise ConfigError(f"{self.path}: {entry.filename} has more than {limit} bytes")
        return content

    def _entry_places(self, file: Any, archive: zipfile.ZipFile, prefix: str) -> dict[str, tuple[int, int]]:
        """Return the file offset and size of each tensor entry by its key. Entries must not overlap."""
        locations: dict[str, tuple[int, int]] = {}
        begin = f"{prefix}data/"
        end_of_last, last = 0, ""
        for entry in sorted(archive.infolist(), key=lambda each: each.header_offset):
            file.seek(entry.header_offset)
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            if entry.header_offset < end_of_last or signature != b"PK\x03\x04":
                raise ConfigError(f"{self.path}: {entry.filename} overlaps {last}")
            offset = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            end_of_last, last = offset + entry.compress_size, entry.filename
            if not entry.filename.startswith(begin):
                continue
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ConfigError(f"{self.path}: {entry.filename} is compressed; tensors must be stored as they are")
            locations[entry.filename.removeprefix(begin)] = offset, entry.file_size
        if end_of_last > file.seek(0, 2):
            raise ConfigError(f"{self.path}: {last} ends beyond the file")
        return locations


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors as their locations and all other objects as PickledObjects, without importing a class."""

    def __init__(self, file: BytesIO, locations: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(file)
        self._entry_places = locations

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a class or function. Nothing is imported."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if module == "torch.jit._pickle" and name.startswith("build_"):
            return list
        if module == "torch" and name.endswith("Storage"):
            return name
        return PickledObject

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the location of a storage. Raises ValueError if the storage is larger than its entry."""
        kind, dtype_name, key, _device, elements = pid
        sizes = STORAGES | _OTHER_STORAGES
        if kind != "storage" or dtype_name not in sizes or key not in self._entry_places or type(elements) is not int:
            raise ValueError(f"a storage {dtype_name!r} with the key {key!r} and {elements!r} elements")
        offset, size = self._entry_places[key]
        if not 0 <= elements <= size // sizes[dtype_name]:
            raise ValueError(f"data/{key} has {size} bytes, which cannot be {elements} elements of {dtype_name}")
        return _Storage(dtype_name, offset, elements)


def _tensor(storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor | PickledObject:
    """Return the location of a tensor. A tensor that is not contiguous becomes a PickledObject without a location."""
    if not isinstance(storage, _Storage) or any(type(size) is not int or size < 0 for size in (first, *shape)):
        raise ValueError(f"a tensor of shape {shape!r} from element {first!r} on")
    elements = math.prod(shape)
    if first + elements > storage.elements:
        raise ValueError(f"a tensor of shape {list(shape)} from element {first} on in {storage.elements} elements")
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return PickledObject(shape, strides)
        expected *= size
    item_bytes = (STORAGES | _OTHER_STORAGES)[storage.dtype_name]
    return StoredTensor(storage.dtype_name, tuple(shape), storage.offset + first * item_bytes)


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _check_opcodes(content: bytes) -> None:
    """Raise ValueError for opcodes that import objects, and for memo indices that would exhaust memory."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _REFUSED_OPCODES:
            raise ValueError(f"its pickle has the opcode {opcode.name}")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > _MAX_MEMO:
            raise ValueError(f"its pickle has the memo index {argument}")


def script_fields(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a TorchScript module and of its submodules by their dotted names.

    Raises ValueError for deeper nesting, or for more objects, than any model has.
    """
    todo: list[tuple[str, PickledObject, int]] = [("", root, 0)] if isinstance(root, PickledObject) else []
    num_seen = 0
    while todo:
        prefix, module, depth = todo.pop()
        for name, value in module.fields.items():
            num_seen += 1
            if depth > _MAX_DEPTH or num_seen > _MAX_ENTRIES:
                raise ValueError("modules are nested too deep or too many")
            if isinstance(value, PickledObject) and value.fields:
                todo.append((f"{prefix}{name}.", value, depth + 1))
            else:
                yield f"{prefix}{name}", value
