"""Sets of fresh starts of one server under the same load: the content of baselines, the input of comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.files import read_document, write_document
from meltcore.measure.documents.schema import RunResult, VersionedDocument

SET_FILE = "set.json"


class StartSet(VersionedDocument, kw_only=True, tag_field="document", tag="baseline"):
    """The results of `starts` in the order of the starts, all under the same `load`.

    `command` is the server's command line without secrets and folders. It is empty for a server that was running
    already.
    """

    name: str
    command: str
    taken: str
    load: dict[str, Any] = msgspec.field(default_factory=dict)
    starts: list[RunResult]


def write_start_set(folder: Path, start_set: StartSet) -> Path:
    """Write a set to `folder`, which is created where missing."""
    return write_document(folder / SET_FILE, start_set)


def read_start_set(folder: Path | str) -> StartSet:
    """Read a set from its file or folder. Raises ConfigError as `read_document` does, and for a set without starts."""
    start_set = read_document(folder, StartSet, name=SET_FILE)
    if not start_set.starts:
        raise ConfigError(f"{folder} has no starts")
    return start_set


def is_start_set(path: Path) -> bool:
    """Return whether `path` is the file of a set or a folder with one."""
    return path.name == SET_FILE or (path / SET_FILE).is_file()
