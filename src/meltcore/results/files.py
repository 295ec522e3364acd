"""Reading and writing result files: written atomically, read in any schema version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meltcore.errors import ConfigError
from meltcore.results.convert import document_type, to_current

REQUESTS_FILE = "requests.jsonl"  # streamed during a run, before there is a result
Content = TypeVar("Content", bound=msgspec.Struct)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash leaves either the complete old file or the complete new one.

    Raises ConfigError where the file cannot be written.
    """
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary_path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary_path.replace(path)
    except OSError as error:
        temporary_path.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def write_document(path: Path, content: msgspec.Struct) -> Path:
    """Write `content` as indented JSON to `path`; create its folder where missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    return path


def read_document(path: Path | str, *types: type[Content], name: str = "") -> Content:
    """Read the document in a file, or in the file `name` of a run folder, converted from version 1 if necessary.

    Raises ConfigError for a file that cannot be read, holds none of `types`, or is of an unknown schema version.
    """
    path = Path(path)
    path = path / name if name and path.is_dir() else path
    raw_content = parse_json(path)
    struct_by_type = {str(struct.__struct_config__.tag): struct for struct in types}
    type_name = document_type(raw_content)
    if type_name is None:
        raise ConfigError(f"{path} is not a meltcore document")
    if type_name not in struct_by_type:
        raise ConfigError(f"{path} holds a {type_name}, not a {' or a '.join(struct_by_type)}")
    try:
        return msgspec.convert(to_current(raw_content), type=struct_by_type[type_name])
    except ConfigError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} breaks the schema of a {type_name}: {error}") from error


def parse_json(path: Path) -> Any:
    """Read and parse a JSON file. Raises ConfigError for an unreadable file and for invalid JSON."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        hint = "; the run ended before it could write one" if path.with_name(REQUESTS_FILE).exists() else ""
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
