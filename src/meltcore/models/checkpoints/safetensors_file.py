"""Reads the headers of files in the safetensors format.

Format: https://github.com/huggingface/safetensors. Eight bytes give the length of a header. The header is JSON (names,
types, shapes, offsets), and the tensors follow.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.tensor_file import TensorEntry, TensorFile

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# A decoder that transformers saves without its head calls its tensors so: the prefix of their usual names is missing.
_PREFIX, _WITHOUT_PREFIX = "model.", re.compile(r"(language_model\.)?(layers\.\d+|embed_tokens|norm)\.")
_HAS_PREFIX = re.compile(r"(^|\.)model\.")
_NEVER_PREFIXED = ("lm_head.", "mtp.")


class SafetensorsFile(TensorFile):
    """An open safetensors file. `entries` has its tensors by name. Several threads may call `read` concurrently."""

    DTYPES: ClassVar = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    # They mean nothing without their scales.
    QUANTIZED_DTYPES: ClassVar = {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}

    def __init__(self, path: Path) -> None:
        """Open the file and read its header. Raises ConfigError when the file is unreadable or has another format."""
        super().__init__(path)
        try:
            self.entries = self._read_header()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            os.close(self._file)
            raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        self._added_prefix = ""

    def add_prefix(self, prefix: str) -> None:
        """Add a prefix to the names of a decoder's tensors, so that they are the usual names.

        Errors name the tensors as the file does.
        """
        self._added_prefix = prefix
        self.entries = {
            name if name.startswith(_NEVER_PREFIXED) else prefix + name: entry for name, entry in self.entries.items()
        }

    def stored_name(self, name: str) -> str:
        """Return the name that the file gives the tensor `name` of the model."""
        return name.removeprefix(self._added_prefix)

    def _read_header(self) -> dict[str, TensorEntry]:
        size = os.fstat(self._file).st_size
        header_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
        header: dict[str, Any] = json.loads(os.pread(self._file, header_bytes, 8))
        header.pop("__metadata__", None)
        entries = {}
        for name, fields in header.items():
            dtype_name, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
            if not isinstance(dtype_name, str) or any(type(value) is not int or value < 0 for value in (*shape, begin)):
                raise ValueError(f"{name} has the type {dtype_name!r} and the shape {list(shape)} from {begin!r} on")
            # The file may hold tensors of other types that are not read.
            dtype = (self.DTYPES | self.QUANTIZED_DTYPES).get(dtype_name)
            size_matches = dtype is None or end - begin == math.prod(shape) * dtype.itemsize
            if not size_matches or not begin <= end <= size - 8 - header_bytes:
                raise ValueError(f"{name} stands from {begin} to {end} in a file of {size} bytes")
            entries[name] = TensorEntry(dtype_name, shape, 8 + header_bytes + begin)
        return entries


def open_decoder_files(paths: Sequence[Path]) -> list[SafetensorsFile]:
    """Open the files of a decoder.

    If all names lack the prefix that models with a head have, the prefix is added, as transformers does. Raises
    ConfigError as `SafetensorsFile` does.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in paths]
        names = [name for file in files for name in file.entries]
        if any(map(_WITHOUT_PREFIX.match, names)) and not any(_HAS_PREFIX.search(name) for name in names):
            for file in files:
                file.add_prefix(_PREFIX)
        stack.pop_all()
    return files
