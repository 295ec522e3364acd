"""Ends an engine that runs but makes no progress.

Without this watch the requests of such an engine would wait until their time limit, and more requests would join them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from meltcore.fleet.processes.engine_process import EngineProcess
from meltcore.serve.requests.backend import STUCK_AFTER_S
from meltcore.serve.requests.stats import ModelStats

CHECK_S = 1.0
# How long an engine must look stuck: a process may be stopped for a moment. When the supervisor itself was stopped, it
# has not yet read what the engine did meanwhile.
CONFIRM_S = 5.0


class StuckWatch:
    """Runs in the supervisor, and detects replicas of one model that no longer finish steps."""

    def __init__(
        self, engines: Callable[[], Sequence[EngineProcess]], stats: ModelStats, *, profiles: bool = False
    ) -> None:
        """Start to watch.

        Args:
            engines: returns the newest process of each replica.
            stats: statistics of the model.
            profiles: whether profiles may be taken. No step finishes while a long profile is written.
        """
        self._engines = engines
        self._stats = stats
        self._profiles = profiles
        self._since_s: dict[int, float] = {}  # of replicas that look stuck
        self._ended_engines: dict[int, EngineProcess] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.check(time.monotonic())

    def check(self, now_s: float) -> None:
        """End each replica that has looked stuck for CONFIRM_S. `now_s` is the current time.monotonic()."""
        for replica, engine in enumerate(self._engines()):
            problem = None if self._ended_engines.get(replica) is engine else self._problem(replica, engine, now_s)
            if problem is None:
                self._since_s.pop(replica, None)
            elif now_s - self._since_s.setdefault(replica, now_s) >= CONFIRM_S:
                self._ended_engines[replica] = engine
                engine.fail(problem)

    def _problem(self, replica: int, engine: EngineProcess, now_s: float) -> str | None:
        """Return why a replica looks stuck, or None if it makes progress or is idle.

        An idle replica is not reported even if SIGSTOP has suspended it.
        """
        if engine.loaded is not None and not self._stats.open_requests(replica):
            return None
        if engine.is_stopped():
            return "its process is stopped by a signal"
        # A CPU may take very long for a step of a large model.
        if self._profiles or engine.loaded is None or engine.loaded.device.endswith("CPU"):
            return None
        age_s = now_s - self._stats.last_message_s(replica)
        if age_s > STUCK_AFTER_S:
            return f"no step has finished for {age_s:.0f} s while requests are open"
        return None
