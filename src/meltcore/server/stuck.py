"""Ends a replica that is there and does nothing: who waits for it would wait for as long as an answer may take, and
more requests would be given to it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from meltcore.server.counts import Counts
from meltcore.server.health import STUCK_AFTER_S
from meltcore.server.replica import Replica

LOOK_EVERY_S = 1.0
# For how long we must see it: a process may be stopped for a moment, and where we were stopped ourselves, what a
# replica has done meanwhile has not been read yet.
SEEN_FOR_S = 5.0


class StuckWatch:
    """Looks after all replicas of a server, in its first front, which learns of their ends."""

    def __init__(self, replicas: Sequence[Replica], counts: Counts, *, profiles: bool = False) -> None:
        """profiles: they may be taken, and a long one takes minutes to be written, without a step meanwhile."""
        self._replicas = replicas
        self._counts = counts
        self._profiles = profiles
        self._seen_s: dict[int, float] = {}  # since when, of replicas that look stuck
        self._given_up: set[int] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """End each replica that has looked stuck for SEEN_FOR_S. `now_s`: monotonic seconds."""
        for number, replica in enumerate(self._replicas):
            problem = None if number in self._given_up else self._problem(number, replica, now_s)
            if problem is None:
                self._seen_s.pop(number, None)
            elif now_s - self._seen_s.setdefault(number, now_s) >= SEEN_FOR_S:
                self._given_up.add(number)
                replica.fail(problem)

    def _problem(self, number: int, replica: Replica, now_s: float) -> str | None:
        """Why it looks stuck now; one that has nothing to do may be stopped as long as nobody asks it."""
        if replica.loaded is not None and not self._counts.open_requests(number):
            return None
        if replica.is_stopped():
            return "its process is stopped by a signal"
        # A CPU may take very long for a step of a large model.
        if self._profiles or replica.loaded is None or replica.loaded.device.endswith("CPU"):
            return None
        age_s = now_s - self._counts.sign_s(number)
        if age_s > STUCK_AFTER_S:
            return f"no step has finished for {age_s:.0f} s while requests are open"
        return None
