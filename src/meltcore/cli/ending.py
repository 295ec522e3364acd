"""How a command that started servers, probes or samplers is ended from outside: in order, and with all of them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM, as `timeout` and the end of a job send it, interrupts as Ctrl-C does: nothing is left on a GPU.

    So does SIGHUP, which the end of an ssh session sends, unless it is ignored when the block begins: nohup asks that.
    """
    before: dict[signal.Signals, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, _interrupt)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _hang_up)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """By SIGINT, for which others may have a handler. A shell has the programs that a script puts into the background
    ignore it, and Python then leaves it so: they are interrupted all the same.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.default_int_handler(number, frame)
    signal.raise_signal(signal.SIGINT)


def _hang_up(number: int, frame: FrameType | None) -> None:
    """As SIGTERM, and what can no longer be printed is dropped: an error of the terminal's would cost the result."""
    # Both the kernel and the shell send it; a second one must not interrupt what the first one set going.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:  # EIO, of a terminal that is gone
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)
    signal.raise_signal(signal.SIGTERM)
