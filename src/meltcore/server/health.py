"""Whether the server can serve: loading, ready, draining, dead, or stuck."""

from __future__ import annotations

import time
from typing import Literal

from meltcore.server.counts import Counts

State = Literal["loading", "ready", "draining", "dead"]

STUCK_AFTER_S = (
    120.0  # without a finished step while work is pending; the longest single step, on a slow CPU, is shorter
)


class Health:
    """Readiness is the age of the last finished step while work is pending; a live process alone proves little."""

    def __init__(self, counts: Counts, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self.state: State = "loading"
        self.reason = "loading: starting"
        self._counts = counts
        self._stuck_after_s = stuck_after_s

    def set(self, state: State, reason: str) -> None:
        """A dead engine stays dead, whatever else happens to the server."""
        if self.state != "dead":
            self.state = state
            self.reason = reason

    def problem(self) -> str | None:
        """Why the server cannot be relied on now; None where it can. What any front has seen counts."""
        if self.state != "ready":
            return self.reason
        for replica in self._counts.living():
            age_s = time.monotonic() - self._counts.sign_s(replica)
            if self._counts.open_requests(replica) and age_s > self._stuck_after_s:
                of = f" of replica {replica}" if self._counts.replicas > 1 else ""
                return f"stuck: no step{of} has finished for {age_s:.0f} s while requests are open"
        return None
