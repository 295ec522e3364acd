"""Formats the output of a program for error messages: its last lines, with bounded length and no control characters."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NUM_LINES = 8
_TAIL_BYTES = 64 * 1024  # read of a log, whatever its size
_LINE_CHARS, _REASON_CHARS = 400, 1000
# Escape sequences of terminals; control characters; and those that turn the direction of what follows.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# What servers print before each line of a log, as "(EngineCore pid=12) ERROR 11-24 12:00:00 [core.py:700] ".
_LOG_PREFIX = re.compile(r"(?:\([^()]*pid=\d+\) ?)?(?:\[rank\d+\]: ?)?(?:[A-Z]+ \d\S* [\d:.,]+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Expired|Interrupt)\b(?:: |:?$)")
_HINT = re.compile(r"For further information visit|For debugging consider|CUDA kernel errors might|Compile with `")


def log_tail(path: Path, num_lines: int = _NUM_LINES) -> str:
    """Return the last `num_lines` lines of a log file that are not empty. Returns "" if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return ""
    return "\n".join(_shown_lines(data.decode(errors="replace"))[-num_lines:])


def one_line(text: str) -> str:
    """Return `text`, a reason followed by output, as one line of bounded length.

    The line has the reason and the last lines of the output.
    """
    first, *lines = _shown_lines(text) or [""]
    last_lines: list[str] = []
    for line in reversed(lines):
        if len(first) + sum(map(len, last_lines)) + len(line) > _REASON_CHARS:
            last_lines.append("...")
            break
        last_lines.append(line)
    return " ".join(filter(None, [first, " | ".join(reversed(last_lines))]))


def last_error(text: str) -> str:
    """Return the type and the message of the last exception in `text`, the end of a log.

    Without one, return the last line.
    """
    lines = [line[match.end() :] for line in text.splitlines() if (match := _LOG_PREFIX.match(line))]
    lines = [line.rstrip() for line in lines if line.strip() and not _HINT.match(line.strip())]
    exception_indices = [index for index, line in enumerate(lines) if _EXCEPTION.match(line)]
    if not exception_indices:
        return lines[-1].strip() if lines else ""
    message = lines[exception_indices[-1]]
    for line in lines[exception_indices[-1] + 1 :]:
        # Details are indented, as pydantic's are, below the names of fields.
        if not line.startswith(" ") and not ("validation error" in message and re.fullmatch(r"[\w.\[\]]+", line)):
            break
        message += f" {line.strip()}"
    return message


def _shown_lines(text: str) -> list[str]:
    """Return the lines as a terminal shows them: the last state of a progress bar, and the end of a long line."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in _ESCAPES.sub("", text).split("\n")]
    lines = [_CONTROLS.sub("", line).rstrip() for line in lines]
    return [line if len(line) <= _LINE_CHARS else f"...{line[-_LINE_CHARS:]}" for line in lines if line.strip()]
