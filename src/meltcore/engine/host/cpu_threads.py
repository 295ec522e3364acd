"""Adapts the number of threads of an engine on a CPU to the cores that are free.

torch splits a GEMM evenly and waits for the slowest part, so one thread without a core slows all of them. With both
cores of a machine busy, two threads served 4.6 tokens per second where one served 19. On an idle machine two served 25.
Linux says how long each thread was runnable without a core. The engine begins with one thread. It doubles their number
while all threads find cores, and gives up as many threads as waited on average.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

_WINDOW_S = 0.25
# More threads are tried while fewer than this waited on average: an API server takes a part of a core.
_FEW_WAITING = 0.25
# After threads were given up: the first one for a process of a moment, the last one for one that stays.
_RETRY_S, _MAX_RETRY_S = 2.0, 60.0


class CpuTime(NamedTuple):
    """The seconds that all threads of this process spent on a core, and the seconds that they waited for a core."""

    running_s: float
    waiting_s: float


def cpu_time() -> CpuTime | None:
    """Return the times of all living threads. Returns None if the kernel does not count them, as in some sandboxes."""
    running = waiting = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            try:
                on_core, without, _ = (task / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since
            running += int(on_core)
            waiting += int(without)
    except (OSError, ValueError):
        return None
    return CpuTime(running / 1e9, waiting / 1e9) if running else None


def core_limit() -> int:
    """Return the maximum number of threads of this process: OMP_NUM_THREADS, or else the number of cores.

    A server sets OMP_NUM_THREADS for engines that share the cores.
    """
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isascii() and value.isdecimal() and int(value) else len(os.sched_getaffinity(0))


class CpuThreads:
    """Sets the number of torch's threads between the steps of an engine on a CPU."""

    def __init__(
        self,
        limit: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        times: Callable[[], CpuTime | None] = cpu_time,
        set_threads: Callable[[int], object] = torch.set_num_threads,
    ) -> None:
        """Begin with one thread. If the kernel does not count waiting times, begin with `limit` - 1 threads."""
        self._limit, self._clock, self._times, self._set_threads = limit, clock, times, set_threads
        self._began_s, self._began = clock(), times()
        self._retry_s, self._retry_at_s = _RETRY_S, self._began_s
        self._threads = 1 if self._began else max(1, limit - 1)
        set_threads(self._threads)

    def end_step(self) -> None:
        """Adapt the number of threads to the waiting times of the last window, at most every quarter of a second."""
        now = self._clock()
        if self._began is None or self._limit == 1 or now - self._began_s < _WINDOW_S:
            return
        times, began = self._times(), self._began
        if times is None:
            return
        running, waiting = times.running_s - began.running_s, times.waiting_s - began.waiting_s
        self._began_s, self._began = now, times
        if running + waiting > 0:
            self._adapt_threads(self._threads * waiting / (running + waiting), now)

    def _adapt_threads(self, waited: float, now: float) -> None:
        """Adapt the number of threads. On average `waited` of them had no core."""
        if self._threads > 1 and round(waited):
            self._set_count(max(1, self._threads - round(waited)))
            self._retry_at_s = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        elif waited < _FEW_WAITING and self._threads < self._limit and now >= self._retry_at_s:
            self._set_count(min(2 * self._threads, self._limit))
        elif self._threads == self._limit:
            self._retry_s = _RETRY_S

    def _set_count(self, threads: int) -> None:
        self._threads = threads
        self._set_threads(threads)
