"""A set of fresh starts of one server, each loaded the same way: what a baseline keeps and a comparison judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from meltcore.errors import ConfigError
from meltcore.results.runfolder import write_whole
from meltcore.results.schema import RunResult

STARTS_VERSION = 1
SET_FILE = "set.json"


class StartSet(msgspec.Struct, kw_only=True):
    """`starts` in the order they ran, one result each, and `load` is what each was loaded with.

    `command` started the server, its secrets and folders taken out; empty for a server that ran already.
    """

    starts_version: int = STARTS_VERSION
    name: str
    command: str
    taken: str
    load: dict[str, Any] = msgspec.field(default_factory=dict)
    starts: list[RunResult]


def write_set(folder: Path, found: StartSet) -> Path:
    """Into `folder`, which is made where missing; whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SET_FILE
    write_whole(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return path


def read_set(folder: Path | str) -> StartSet:
    """Raises ConfigError for no set, one that is not ours, or one of another version."""
    path = Path(folder)
    if path.is_dir():
        path = path / SET_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StartSet)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no set of starts: {error}") from error
    if found.starts_version != STARTS_VERSION:
        raise ConfigError(
            f"{path} has version {found.starts_version} of sets of starts; this meltcore reads {STARTS_VERSION}"
        )
    if not found.starts:
        raise ConfigError(f"{path} holds no start")
    return found


def is_set(path: Path) -> bool:
    return path.name == SET_FILE or (path / SET_FILE).is_file()
