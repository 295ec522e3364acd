"""Memory that a burst of requests took is given back once it is over; by itself the C library keeps it for the next."""

from __future__ import annotations

import asyncio
import ctypes
import gc

from meltcore.server.counts import Counts

# glibc gives threads arenas of their own, and `malloc_trim` keeps the free end of all but the first: what ZeroMQ's
# thread read of 10,000 prompts stayed with the engine, 8 MB; nothing does with one arena for all (2026-11-21).
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # for the environment of a process
_M_ARENA_MAX = -8  # mallopt(3)'s number for the same
LOOK_EVERY_S = 1.0
ENOUGH_EVENTS = 256  # requests and ends of connections; what fewer have left is not worth a look at the whole heap


def use_one_arena() -> None:
    """`ONE_ARENA` for this process; before its first thread, since what exists stays."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's
        mallopt(_M_ARENA_MAX, 1)


class IdleTrim:
    """Looks once a second whether this front has become idle after work, and then gives back what it can."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._seen = 0.0
        self._trimmed = 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries need none
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        events = self._counts.own("accepted") + self._counts.own("connections_closed")
        idle = events == self._seen and not self._counts.own("in_flight")
        self._seen = events
        if idle and events >= self._trimmed + ENOUGH_EVENTS:
            self._trimmed = events
            gc.collect()
            if self._trim is not None:
                self._trim(0)
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
