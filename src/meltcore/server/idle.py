"""Memory that a burst of requests took is given back once it is over; by itself a process keeps it for the next."""

from __future__ import annotations

import asyncio

from meltcore.engine.host_memory import give_back_memory
from meltcore.server.counts import Counts

LOOK_EVERY_S = 1.0
ENOUGH_EVENTS = 256  # requests and ends of connections; what fewer have left is not worth a look at the whole heap


class IdleTrim:
    """Looks once a second whether this front has become idle after work, and then gives back what it can."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._seen = 0.0
        self._trimmed = 0.0
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        events = self._counts.own("accepted") + self._counts.own("connections_closed")
        idle = events == self._seen and not self._counts.own("in_flight")
        self._seen = events
        if idle and events >= self._trimmed + ENOUGH_EVENTS:
            self._trimmed = events
            give_back_memory()
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
