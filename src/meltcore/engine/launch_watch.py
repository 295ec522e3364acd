"""Gets the host out of a launch that it is caught in, because the device waits for a rank that is gone or stuck.

About a thousand launches may wait for a device; the next one blocks in the driver until there is room. The thread that
launches cannot look at the other ranks then, so another one does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from subprocess import Popen

_LOOK_EVERY_S = 0.05


class LaunchWatch:
    """Calls `give_up`, once and from a thread of its own, where a process has ended or a limit has passed `during` what
    is watched. `gave_up` says so."""

    def __init__(self, processes: Mapping[int, Popen[bytes]], give_up: Callable[[], None]) -> None:
        self.gave_up = False
        self._processes = list(processes.values())
        self._give_up = give_up
        self._until: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @contextmanager
    def during(self, limit_s: float) -> Iterator[None]:
        self._until = time.monotonic() + limit_s
        try:
            yield
        finally:
            self._until = None

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            until = self._until
            if until is None:
                continue
            if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                self.gave_up = True
                self._give_up()
                return
