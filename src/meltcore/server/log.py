"""One structured line a request, on stderr, written by a thread: a pipe that nobody reads must not stop the server."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import Any, Literal, TextIO

import msgspec

from meltcore.server.counts import Counts

MAX_LINES_WAITING = 16_384
MAX_FIELD_CHARS = 256  # clients choose what some fields say: of a longer one the line says the beginning and the length
BYTES_A_WRITE = 4096  # a pipe takes this many whole (PIPE_BUF): the lines of several front processes do not mix


class Log:
    """Lines as JSON objects or as `key=value` text. Never give it prompt or answer text."""

    def __init__(self, form: Literal["text", "json"], counts: Counts, stream: TextIO | None = None) -> None:
        self._form = form
        self._counts = counts
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES_WAITING)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def write(self, event: str, **fields: Any) -> None:
        """Queue one line. A full queue drops it, and counts it in `log_lines_dropped`."""
        record = {"time": _now(), "event": event} | {key: _bounded(value) for key, value in fields.items()}
        if self._form == "json":
            line = msgspec.json.encode(record).decode()
        else:
            line = " ".join(f"{key}={_text(value)}" for key, value in record.items() if value is not None)
        try:
            self._lines.put_nowait(line + "\n")
        except queue.Full:
            self._counts.add("log_lines_dropped")

    def close(self, wait_s: float = 1.0) -> None:
        """Write what is queued, as far as `wait_s` allows."""
        try:
            self._lines.put(None, timeout=wait_s)
        except queue.Full:
            return  # the reader is stuck; the counter has said so
        self._thread.join(wait_s)

    def _write(self) -> None:
        block, size = "", 0
        while True:
            line = self._lines.get()
            more = 0 if line is None else len(line.encode())
            try:
                if block and (line is None or size + more > BYTES_A_WRITE):
                    self._put(block)
                    block, size = "", 0
                if line is None:
                    return
                block, size = block + line, size + more
                if self._lines.empty():
                    self._put(block)
                    block, size = "", 0
            except (OSError, ValueError):  # the reader is gone, and with it the place where this could be said
                return

    def _put(self, block: str) -> None:
        self._stream.write(block)
        self._stream.flush()


def _now() -> str:
    """The time in UTC, in ISO 8601 with milliseconds.

    Not by `datetime.isoformat`: to ask the time zone it makes the method's name anew, and CPython keeps up to 4096 of
    these (see host_memory.py). Strewn over all that 10,000 streams took, they held 2.6 MB in each of four fronts
    (2026-11-21).
    """
    now_ms = time.time_ns() // 1_000_000
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ms // 1000)) + f".{now_ms % 1000:03}+00:00"


def _bounded(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= MAX_FIELD_CHARS:
        return value
    return f"{value[:MAX_FIELD_CHARS]}... ({len(value)} characters)"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)
    plain = text and text.isprintable() and " " not in text and '"' not in text
    return text if plain else json.dumps(text)
