"""How a command that started servers, probes or samplers is ended from outside: in order, and with all of them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM, as `timeout` and the end of a job send it, interrupts as Ctrl-C does: nothing is left on a GPU."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
