"""Baselines: named sets of starts in a folder, kept to be compared against."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from meltcore.errors import ConfigError
from meltcore.load.config import LoadConfig
from meltcore.results.starts import StartSet, is_set, read_set, write_set

BASELINES = Path("baselines")
LEAST_STARTS = 6
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What a start is loaded with and a stored set can say again; addresses and keys are not kept.
_KEPT = ("concurrency", "rates", "arrivals", "requests", "warmup", "workload", "max_tokens", "model", "seed",
         "processes", "stream", "continuous_usage", "temperature", "extra_body")  # fmt: skip


def free_place(root: Path, name: str, *, replace: bool) -> Path:
    """The folder a new baseline goes to. Raises ConfigError for a bad name, or a taken one unless `replace`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a baseline: letters, digits, dot, dash and underscore")
    place = root / name
    if is_set(place) and not replace:
        raise ConfigError(f"there is a baseline {name} already: --replace takes its place")
    return place


def save_baseline(place: Path, found: StartSet, logs: Path) -> Path:
    """Write the set and the servers' logs of its starts to `place`."""
    path = write_set(place, found)
    for old in place.glob("server-*.log"):
        old.unlink()
    for log in sorted(logs.glob("server-*.log")):
        shutil.copyfile(log, place / log.name)
    return path


def baselines(root: Path) -> list[StartSet]:
    """All of a folder by name; none where the folder is not there."""
    return [read_set(place) for place in sorted(root.iterdir()) if is_set(place)] if root.is_dir() else []


def find_set(text: str, root: Path = BASELINES) -> StartSet | None:
    """The set at a path, or the baseline of that name; None where `text` is neither."""
    for place in (Path(text), root / text):
        if is_set(place):
            return read_set(place)
    return None


def load_again(load: dict[str, Any], *, workload: str | None = None) -> LoadConfig:
    """What a stored set was loaded with, to load another server alike.

    `workload` names a file's path again: a set keeps only the last name of it.
    """
    known = {field.name for field in fields(LoadConfig)}
    kept = {name: load[name] for name in _KEPT if name in load and name in known}
    for name in ("concurrency", "rates", "requests"):
        if isinstance(kept.get(name), list):
            kept[name] = tuple(kept[name])
    if workload is not None:
        kept["workload"] = workload
    return LoadConfig(url="", **kept)
