"""Reads the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises ConfigError if the file is unreadable, invalid or holds no object.
    """
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object; it begins with {json.dumps(content)[:40]}")
    return content


def read_json_value(path: Path) -> Any:
    """Read a JSON file that holds any value. Raises ConfigError if the file is unreadable or invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: invalid JSON or UTF-8, or a number of 5,000 digits
        raise ConfigError(f"{path} cannot be read: {error}") from error
