"""Baselines: named sets of starts that later servers are compared against."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.starts import StartSet, is_start_set, read_start_set, write_start_set
from meltcore.measure.load.config import LoadConfig

MIN_STARTS = 6
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Load settings that a stored set repeats; addresses and keys are not stored.
_STORED_SETTINGS = ("concurrency", "request_rate", "arrivals", "num_prompts", "num_warmups", "workload", "max_tokens",
           "model", "seed", "processes", "stream", "continuous_usage", "temperature", "extra_body")  # fmt: skip


def baseline_folder(root: Path, name: str, *, replace: bool) -> Path:
    """Return the folder of a baseline to be saved. Raises ConfigError for a bad name, or an existing one."""
    if not _NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{name!r} is not a baseline name: use letters, digits, dot, dash and underscore")
    folder = root / name
    if is_start_set(folder) and not replace:
        raise ConfigError(f"baseline {name} exists already: add --replace to overwrite it")
    return folder


def save_baseline(folder: Path, start_set: StartSet, logs: Path) -> Path:
    """Write the set and the server logs of its starts to `folder`; return the path of the set."""
    path = write_start_set(folder, start_set)
    for old_log in folder.glob("server-*.log"):
        old_log.unlink()
    for log in sorted(logs.glob("server-*.log")):
        shutil.copyfile(log, folder / log.name)
    return path


def list_baselines(root: Path) -> list[StartSet]:
    """Return the baselines in `root`, sorted by name. Returns an empty list if the folder does not exist."""
    return (
        [read_start_set(folder) for folder in sorted(root.iterdir()) if is_start_set(folder)] if root.is_dir() else []
    )


def find_start_set(text: str, root: Path) -> StartSet | None:
    """Return the set at the path `text`, or the baseline of this name in `root`. Returns None if neither exists."""
    return next((read_start_set(folder) for folder in (Path(text), root / text) if is_start_set(folder)), None)


def stored_load(load: dict[str, Any], *, workload: str | None = None) -> LoadConfig:
    """Return the load of a stored set, to apply it to another server.

    `workload` is the path of the workload file, since a set stores only the file's name.
    """
    field_names = {field.name for field in fields(LoadConfig)}
    stored_settings = {name: load[name] for name in _STORED_SETTINGS if name in load and name in field_names}
    stored_settings |= {name: tuple(value) for name, value in stored_settings.items() if isinstance(value, list)}
    if workload is not None:
        stored_settings["workload"] = workload
    return LoadConfig(url="", **stored_settings)
