"""Standard output whose failed writes can be distinguished from failed writes to other files and sockets."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(OSError):
    """Reports a failed write to standard output: a full disk, or a pipe whose reader is gone (EPIPE)."""

    def __str__(self) -> str:
        return f"cannot write to standard output: {self.strerror}"


class _Output(io.FileIO):
    lost: OutputError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = OutputError(error.errno, error.strerror)
            raise self.lost from error


def check_output() -> None:
    """Replace this process's `sys.stdout` by one whose failed writes raise OutputError.

    This holds for writes by print, rich and buffered bytes. A `sys.stdout` that was already replaced, for example by a
    test, is left unchanged.
    """
    old = sys.stdout
    if old is not sys.__stdout__ or not isinstance(old, io.TextIOWrapper):
        return
    old.flush()
    raw = _Output(old.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if old.write_through else io.BufferedWriter(raw),  # as Python does with -u
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


def flush_output() -> None:
    """Write the buffered output.

    Raises OutputError also if an earlier write failed and its error was caught, as argparse does.
    """
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # with -u there is no buffer
    if isinstance(raw, _Output) and raw.lost is not None:
        raise raw.lost


def drop_output() -> None:
    """Send the buffered output, and all later output, to /dev/null.

    Without this, Python would write the buffer again when it exits.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
