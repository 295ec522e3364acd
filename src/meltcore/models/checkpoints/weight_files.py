"""Chooses a model's own weights among the safetensors files of a folder or hub repository, as transformers does."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.models.configs.config_fields import Fields

WHOLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"  # what some older checkpoints of other tasks than generation have instead
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
# Files that stand beside a model: adapters, the same weights in Mistral's own names, the state of a training.
_OTHER_FILES = re.compile(
    r"(adapter|consolidated|optimizer|training|scheduler)[._-].*|(.*[._-])?q?lora[._-].*", re.IGNORECASE
)
_MAX_NAMES_SHOWN = 5


def uses_index(names: Collection[str]) -> bool:
    """Return whether the index decides which files hold the weights.

    A single weights file takes precedence over an index.
    """
    return INDEX in names and WHOLE_FILE not in names


def indexed_files(index: dict[str, Any]) -> list[str]:
    """Return the files that an index names, in the order of the index.

    Raises ConfigError if the index names no files, or names a file outside of its folder.
    """
    files = sorted(set(Fields(index, INDEX).required("weight_map")["weight_map"].values()))
    outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside:
        raise ConfigError(f"{INDEX}: weight_map names files outside of its folder: {_shorten_names(outside)}")
    return files


def files_without_index(names: Collection[str], location: str = "") -> list[str]:
    """Return the files of the weights by their names alone, in order.

    Returns an empty list if no file has a name of a model's own weights. Raises ConfigError if numbered shards are
    missing.
    """
    if WHOLE_FILE in names:
        return [WHOLE_FILE]
    candidates = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    shards = [name for name in candidates if _SHARD.fullmatch(name)]
    if not shards:
        return [name for name in candidates if _OTHER_FILES.fullmatch(name) is None]
    count = max(int(name[15:20]) for name in shards)
    expected = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    missing = [name for name in expected if name not in names]
    if missing:
        raise ConfigError(f"{location}: {len(missing)} of {count} shards are missing: {_shorten_names(missing)}")
    return expected


def has_weights(names: Iterable[str]) -> bool:
    """Return whether files or an index of a model's own weights are among the files of a folder or repository."""
    root_names = [name for name in names if "/" not in name and _OTHER_FILES.fullmatch(name) is None]
    return INDEX in root_names or any(name.endswith(".safetensors") for name in root_names)


def no_weights_reason(names: Collection[str]) -> str:
    """Return why no file holds the weights of a model."""
    other_names = sorted(name for name in names if name.endswith(".safetensors"))
    if not other_names:
        return "holds no *.safetensors files (--load-format dummy needs none)"
    return (
        f"holds no model.safetensors; {_shorten_names(other_names)} are adapters or other layouts, which are not read"
    )


def _shorten_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more
