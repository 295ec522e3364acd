"""Writes one structured line per request to stderr.

A thread writes, so that an unread pipe does not stop the server. Lines that a full disk has no room for are dropped.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import Any, Literal, TextIO

import msgspec

from meltcore.serve.requests.request_fields import shorten
from meltcore.serve.requests.stats import ServerStats

MAX_LINES_WAITING = 16_384
# Lines are gathered for so long: a thread that wakes for each takes Python's lock from the requests.
GATHER_S = 0.02
RATE_LIMIT_S = 60.0  # between two lines of an event that may come thousands of times
BYTES_PER_WRITE = 4096  # a pipe takes this many as a whole (PIPE_BUF): the lines of several processes do not mix


class Log:
    """Writes log lines as JSON objects or as `key=value` text. Prompt and output text must never be logged."""

    def __init__(self, form: Literal["text", "json"], stats: ServerStats, stream: TextIO | None = None) -> None:
        self._form = form
        self._stats = stats
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES_WAITING)
        self._second = 0, ""  # the newest one that was formatted
        self._last_written_s: dict[str, float] = {}  # when a line of the event was last written
        self._fault: Exception | None = None  # why the newest lines could not be written, as on a full disk
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def write(self, event: str, **fields: Any) -> None:
        """Queue one line. If the queue is full, the line is dropped and counted in `log_lines_dropped`."""
        record = {"time": self._timestamp(), "event": event}
        for key, value in fields.items():
            record[key] = shorten(value) if isinstance(value, str) else value
        if self._form == "json":
            line = msgspec.json.encode(record).decode()
        else:
            line = " ".join(f"{key}={_text(value)}" for key, value in record.items() if value is not None)
        try:
            self._lines.put_nowait(line + "\n")
        except queue.Full:
            self._stats.add("log_lines_dropped")

    def write_rate_limited(self, event: str, **fields: Any) -> None:
        """Queue one line if no line of the same event was written in the last RATE_LIMIT_S seconds."""
        now_s = time.monotonic()
        if now_s - self._last_written_s.get(event, -RATE_LIMIT_S) >= RATE_LIMIT_S:
            self._last_written_s[event] = now_s
            self.write(event, **fields)

    def close(self, wait_s: float = 1.0) -> None:
        """Wait until the queued lines are written, at most `wait_s`."""
        try:
            self._lines.put(None, timeout=wait_s)
        except queue.Full:
            return  # the reader is stuck; the counter shows it
        self._thread.join(wait_s)

    def _write(self) -> None:
        block, size = "", 0
        while True:
            is_idle = self._lines.empty()
            line = self._lines.get()
            if is_idle and line is not None:
                time.sleep(GATHER_S)
            line_size = 0 if line is None else len(line.encode())
            if block and (line is None or size + line_size > BYTES_PER_WRITE):
                self._write_block(block)
                block, size = "", 0
            if line is None:
                return
            block, size = block + line, size + line_size
            if self._lines.empty():
                self._write_block(block)
                block, size = "", 0

    def _write_block(self, block: str) -> None:
        """Write lines. Lines that cannot be written are dropped. The first line that follows them says why."""
        try:
            self._stream.write(block)
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._stats.add("log_lines_dropped", block.count("\n"))
            self._fault = error
            return
        if self._fault is not None:
            self.write("log_lines_lost", error=str(self._fault))
            self._fault = None

    def _timestamp(self) -> str:
        """Return the current UTC time in ISO 8601 with milliseconds."""
        second, millisecond = divmod(time.time_ns() // 1_000_000, 1000)
        if second != self._second[0]:
            self._second = second, _format_second(second)
        return f"{self._second[1]}.{millisecond:03}+00:00"


def _format_second(second: int) -> str:
    """Return a time in ISO 8601 without milliseconds.

    Each call of `datetime.isoformat` would intern a method name for the time zone, of which CPython keeps up to 4096.
    Scattered over the memory of 10,000 streams they held 2.6 MB in each of four API servers (2026-11-21; see
    host_memory.py).
    """
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)
    needs_no_quotes = text and text.isprintable() and " " not in text and '"' not in text
    return text if needs_no_quotes else json.dumps(text)
