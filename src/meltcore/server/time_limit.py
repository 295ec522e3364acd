"""How long an answer may take, watched for all requests of a front by one timer.

A timer each would be three more objects a request in the event loop, which keeps hundreds of them for use again: strewn
over all that a burst took, they hold on to far more than they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from meltcore.server.generation import Generation

LOOK_EVERY_S = 1.0
LOOKS = 20  # at least so many within the limit: an answer is ended at most a twentieth of it late


class TimeLimit:
    """Calls `on_overdue` once for each request that is watched for longer than `limit_s` from its arrival."""

    def __init__(self, limit_s: float, on_overdue: Callable[[Generation], None]) -> None:
        self._limit_s = limit_s
        self._on_overdue = on_overdue
        self._watched: set[Generation] = set()
        self._looking = False

    def watch(self, generation: Generation) -> None:
        self._watched.add(generation)
        if not self._looking:
            self._look_later()

    def forget(self, generation: Generation) -> None:
        """Its answer has ended. Nothing happens where it is not watched."""
        self._watched.discard(generation)
        if not self._watched:
            self._watched.clear()  # an emptied set keeps the room of all it has held

    def _look_later(self) -> None:
        self._looking = True
        asyncio.get_running_loop().call_later(min(LOOK_EVERY_S, self._limit_s / LOOKS), self._look)

    def _look(self) -> None:
        arrived_before_s = time.monotonic() - self._limit_s
        for generation in [each for each in self._watched if each.arrived_s <= arrived_before_s]:
            self._watched.discard(generation)
            self._on_overdue(generation)
        self._looking = False
        if self._watched:
            self._look_later()
