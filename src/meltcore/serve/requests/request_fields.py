"""Reads values that clients choose: headers of a request, and values that errors and log lines may show."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

MAX_FIELD_CHARS = 256  # clients choose the contents of some fields; a longer one is shown with its start and length


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header with this name (in lower case), or None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            header_value: bytes = value
            return header_value
    return None


def shorten(value: Any) -> Any:
    """Shorten a text to about MAX_FIELD_CHARS characters. Any other value is returned unchanged."""
    if not isinstance(value, str) or len(value) <= MAX_FIELD_CHARS:
        return value
    return f"{value[:MAX_FIELD_CHARS]}... ({len(value)} characters)"
