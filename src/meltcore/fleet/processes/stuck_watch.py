"""Ends a process that runs but makes no progress: an engine, or an API server.

Without this watch the requests of such a process would wait until their time limit, and more requests would join them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from meltcore.fleet.processes.engine_process import EngineProcess
from meltcore.serve.requests.backend import STUCK_AFTER_S
from meltcore.serve.requests.stats import ModelStats

CHECK_S = 1.0
# How long a process must look stuck: it may be stopped for a moment. When the supervisor itself was stopped, it has not
# yet read what the process did meanwhile. A process that still looks stuck after its end is ended again.
CONFIRM_S = 5.0
STOPPED = "its process is stopped by a signal"


class WatchedProcess(Protocol):
    """Defines how the watch ends a process."""

    def fail(self, reason: str) -> None:
        """Kill the process. `reason` is the reason of its end in messages."""


_P = TypeVar("_P", bound=WatchedProcess)


class StuckWatch(Generic[_P]):
    """Runs in the supervisor, and ends processes that look stuck."""

    def __init__(self, processes: Callable[[], Sequence[_P]], problem: Callable[[_P, int, float], str | None]) -> None:
        """Create a watch.

        Args:
            processes: returns the newest processes, in the same order each time.
            problem: returns why a process looks stuck, or None. It gets the process, its index and the current
                time.monotonic().
        """
        self._processes = processes
        self._problem = problem
        self._since_s: dict[int, float] = {}  # of processes that look stuck, by index

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.check(time.monotonic())

    def check(self, now_s: float) -> None:
        """End each process that has looked stuck for CONFIRM_S. `now_s` is the current time.monotonic()."""
        for index, process in enumerate(self._processes()):
            problem = self._problem(process, index, now_s)
            if problem is None:
                self._since_s.pop(index, None)
            elif now_s - self._since_s.setdefault(index, now_s) >= CONFIRM_S:
                del self._since_s[index]
                process.fail(problem)


def engine_problem(
    stats: ModelStats, engine: EngineProcess, replica: int, now_s: float, *, profiles: bool = False
) -> str | None:
    """Return why a replica of a model looks stuck, or None if it makes progress or is idle.

    An idle replica is not reported even if SIGSTOP has suspended it. No step finishes while a long profile is written,
    so with `profiles` only a stopped process is reported.
    """
    if engine.loaded is not None and not stats.open_requests(replica):
        return None
    if engine.is_stopped():
        return STOPPED
    # A CPU may take very long for a step of a large model.
    if profiles or engine.loaded is None or engine.loaded.device.endswith("CPU"):
        return None
    age_s = now_s - stats.last_message_s(replica)
    if age_s > STUCK_AFTER_S:
        return f"no step has finished for {age_s:.0f} s while requests are open"
    return None
