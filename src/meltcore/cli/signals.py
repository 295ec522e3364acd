"""Lets SIGTERM and SIGHUP interrupt a command as Ctrl-C does.

The command then ends the processes that it has started.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does, so that no process stays on a GPU.

    `timeout` and job schedulers send SIGTERM. The end of an ssh session sends SIGHUP. If SIGHUP is already ignored, as
    under nohup, it stays ignored.
    """
    previous_handlers: dict[signal.Signals, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, _interrupt)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        previous_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, _handle_sighup)
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def drop_unfinished(interrupt: KeyboardInterrupt) -> None:
    """Drop the frames that `interrupt` ended, without the errors of objects whose construction it cut short.

    The destructor of an event loop without attributes raises, for example. Python would print that as a traceback.
    """
    previous_hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    interrupt.__traceback__ = interrupt.__context__ = interrupt.__cause__ = None
    sys.unraisablehook = previous_hook


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Interrupt with SIGINT, even if SIGINT is ignored.

    A shell script starts its background programs with SIGINT ignored, and Python leaves it so. SIGTERM ends such a
    program nevertheless.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.default_int_handler(signum, frame)
    signal.raise_signal(signal.SIGINT)


def _handle_sighup(*_: object) -> None:
    """Interrupt as SIGTERM does.

    If the terminal is gone, output is discarded first. Otherwise the error of a failed write would lose the result.
    """
    # Both the kernel and the shell send it; a second one must not interrupt the orderly end.
    signal.signal(signal.SIGHUP, lambda *_: None)
    for fd in (1, 2):
        try:
            os.write(fd, b"")
        except OSError:  # EIO: the terminal is gone
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, fd)
            os.close(devnull)
    signal.raise_signal(signal.SIGTERM)
