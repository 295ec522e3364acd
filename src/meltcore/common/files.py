"""Writes files atomically, and reads documents: JSON that names its type and its schema version."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.sizes import size_text

SCHEMA_VERSION = 2  # of every document
REQUESTS_FILE = "requests.jsonl"  # streamed during a run, before there is a result
Content = TypeVar("Content", bound=msgspec.Struct)


def is_gguf(name: str | Path) -> bool:
    """Return whether a file is GGUF, by its suffix or its first bytes, since programs name GGUF files in any way."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return True
    try:
        if not path.is_file():  # opening a named pipe waits for a writer
            return False
        with path.open("rb") as file:
            return file.read(4) in (b"GGUF", b"FUGG")  # little-endian and big-endian
    except OSError:
        return False


@contextmanager
def file_errors(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of the block into the ConfigError "cannot `action` `path`: reason". Actions: read, write."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot {action} {path}: {error.strerror or error}") from error


@contextmanager
def atomic_output(path: Path, *, overwrite: bool = False, hint: str = "--overwrite replaces it") -> Iterator[Path]:
    """Yield a temporary name for a file or folder that the block writes. It is renamed to `path` when the block ends.

    Until then `path` stays as it was, and an error in the block removes the new file. A symbolic link stays, and its
    target is replaced. A replaced file keeps its mode. Raises ConfigError if `path` exists without `overwrite` (the
    message ends with `hint`), if it is a device or pipe, or if it cannot be written.
    """
    exists_error = ConfigError(f"{path} exists already; {hint}")
    if not overwrite and os.path.lexists(path):
        raise exists_error
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ConfigError(f"{path} is a device or pipe; name a file")
    temporary_path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary_path
        if target.is_file() and temporary_path.is_file():
            temporary_path.chmod(stat.S_IMODE(target.stat().st_mode))
        for written_path in (*temporary_path.glob("*"), temporary_path):
            _sync(written_path)
        if overwrite:
            _replace(temporary_path, target)
        else:
            _publish(temporary_path, target)
        _sync(target.parent)
    except OSError as error:
        _remove(temporary_path)
        if not overwrite and error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another process wrote it meanwhile
            raise exists_error from error
        raise _write_error(path, error) from error
    except BaseException:
        _remove(temporary_path)
        raise


def _write_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {path}: {error.strerror or error}")


def check_disk_space(path: Path, num_bytes: int) -> None:
    """Raise ConfigError if the disk of `path` has less than `num_bytes` free."""
    with file_errors("write", path):
        free_bytes = shutil.disk_usage(path.parent).free
    if num_bytes > free_bytes:
        needed_text, free_text = size_text(num_bytes), size_text(free_bytes)
        raise ConfigError(f"{path} takes {needed_text}; the disk of {path.parent} has {free_text} free")


def _publish(new: Path, path: Path) -> None:
    """Rename `new` to `path`.

    Raises OSError if `path` exists, even if another process publishes it at the same time.
    """
    if new.is_dir():
        path.mkdir()  # fails if it exists; a rename replaces an empty folder
    else:
        path.touch(exist_ok=False)
    try:
        new.replace(path)
    except BaseException:
        _remove(path)
        raise


def _replace(new: Path, path: Path) -> None:
    """Rename `new` to `path`.

    An existing folder is first moved away, since no system call replaces a folder with files.
    """
    if not (new.is_dir() and path.is_dir()):
        new.replace(path)
        return
    previous = path.with_name(f".{path.name}.{os.getpid()}.old")
    path.rename(previous)
    try:
        new.rename(path)
    except OSError:
        previous.rename(path)
        raise
    _remove(previous)


def _remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is stored on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, content: bytes, *, overwrite: bool = True, hint: str = "", start: bytes = b"") -> None:
    """Write a file atomically: a crash leaves either the complete old file or the complete new one.

    A symbolic link stays, and its target is written. Devices, pipes, and the targets of standard output and standard
    error are written directly. Raises ConfigError if the file cannot be written, or if it exists without `overwrite`,
    or is not empty and begins with other bytes than `start` (the message ends with `hint`).
    """
    if path.exists() and not path.is_dir() and ((fd := _standard_fd(path)) is not None or not path.is_file()):
        try:
            with open(path if fd is None else fd, "wb", closefd=fd is None) as output:
                output.write(content)
        except OSError as error:
            raise _write_error(path, error) from error
        return
    if start and path.is_file() and (beginning := _beginning(path, len(start))) not in (b"", start):
        raise ConfigError(f"{path} exists and begins with {beginning[:16]!r}; {hint}")
    with atomic_output(path, overwrite=overwrite, hint=hint) as temporary_path:
        temporary_path.write_bytes(content)


def _beginning(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise _write_error(path, error) from error


def _standard_fd(path: Path) -> int | None:
    """Return the descriptor of the standard stream (output or error) that writes to `path`, after flushing the stream.

    Returns None if neither stream writes to `path`.
    """
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        with suppress(OSError):  # it may be closed
            if os.path.samestat(path.stat(), os.fstat(fd)):
                stream.flush()
                return fd
    return None


def write_document(path: Path, content: msgspec.Struct) -> Path:
    """Write `content` as indented JSON to `path`, and return `path`. The folder is created if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(path, error) from error
    write_atomic(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    return path


def read_document(path: Path | str, *types: type[Content], name: str = "") -> Content:
    """Return the document in a file, or in the file `name` of a run folder.

    Raises ConfigError if the file cannot be read, if its type is not one of `types`, or if it has another schema
    version.
    """
    path = Path(path)
    path = path / name if name and path.is_dir() else path
    raw_content = parse_json(path)
    if not isinstance(raw_content, dict) or "document" not in raw_content:
        raise ConfigError(f"{path} is not a meltcore document")
    struct_by_type = {str(struct.__struct_config__.tag): struct for struct in types}
    type_name = str(raw_content["document"])
    if type_name not in struct_by_type:
        raise ConfigError(f"{path} holds a {type_name}, not a {' or a '.join(struct_by_type)}")
    if (version := raw_content.get("schema_version")) != SCHEMA_VERSION:
        raise ConfigError(
            f"cannot read {path}: it has schema version {version}; this meltcore reads version {SCHEMA_VERSION}"
        )
    try:
        return msgspec.convert(raw_content, type=struct_by_type[type_name])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} breaks the schema of a {type_name}: {error}") from error


def parse_json(path: Path) -> Any:
    """Return the contents of a JSON file. Raises ConfigError for an unreadable file and for invalid JSON."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        hint = "; the run ended before it could write one" if path.with_name(REQUESTS_FILE).exists() else ""
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
