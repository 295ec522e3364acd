"""Whether the client itself was the limit: how late its event loop ran, and how much of a core it took."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np

TICK_S = 0.010
MIN_TICKS = 100  # a 99th percentile of fewer says nothing
MIN_WATCHED_S = 1.0  # CPU clocks of a shorter watch are mostly start-up

LAG_LIMIT_MS = 25.0
LAG_SHARE_LIMIT = 0.10  # of the shortest latency the level reports
CPU_SHARE_LIMIT = 0.90


class ClientWatch(msgspec.Struct, array_like=True):
    """What one client process saw of itself, from after the release burst to the end of its level."""

    watched_s: float
    cpu_s: float
    lags_s: list[float]

    @property
    def cpu_share(self) -> float:
        """Of one core; 0 where the watch was too short to say."""
        return self.cpu_s / self.watched_s if self.watched_s >= MIN_WATCHED_S else 0.0

    @property
    def lag_p99_ms(self) -> float | None:
        return float(np.quantile(self.lags_s, 0.99) * 1000) if len(self.lags_s) >= MIN_TICKS else None


class SelfCheck:
    """Asks the loop for a wake-up every 10 ms and notes how late each one is.

    Start it after the release: writing thousands of requests in one go is lateness on purpose, and latencies count
    from the intended start anyway, so that burst is inside them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_s = time.monotonic()
        self._cpu_at_start_s = time.process_time()
        self._lags_s: list[float] = []
        self._due_s = 0.0
        self._timer = self._schedule()

    def finish(self) -> ClientWatch:
        self._timer.cancel()
        return ClientWatch(
            watched_s=time.monotonic() - self._started_s,
            cpu_s=time.process_time() - self._cpu_at_start_s,
            lags_s=self._lags_s,
        )

    def _schedule(self) -> asyncio.TimerHandle:
        self._due_s = time.monotonic() + TICK_S
        return self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._lags_s.append(max(0.0, time.monotonic() - self._due_s))
        self._timer = self._schedule()


def client_limits(watches: list[ClientWatch], shortest_latency_ms: float | None) -> list[str]:
    """Why the client, not the server, may have set the numbers; empty when it did not. The worst process decides.

    Lag counts against the shortest median the level reports (ITL, or TTFT): 60 ms are fatal to a 5 ms gap and
    nothing to one of 2 s.
    """
    reasons = []
    lag_ms = max((watch.lag_p99_ms or 0.0 for watch in watches), default=0.0)
    cpu_share = max((watch.cpu_share for watch in watches), default=0.0)
    allowed_ms = max(LAG_LIMIT_MS, LAG_SHARE_LIMIT * (shortest_latency_ms or 0.0))
    if lag_ms > allowed_ms:
        reasons.append(
            f"the client's event loop ran late: p99 {lag_ms:.0f} ms, limit {allowed_ms:.0f} ms (the larger of "
            f"{LAG_LIMIT_MS:.0f} ms and {LAG_SHARE_LIMIT:.0%} of the shortest median latency)"
        )
    if cpu_share > CPU_SHARE_LIMIT:
        reasons.append(f"the client used {cpu_share:.0%} of a core, limit {CPU_SHARE_LIMIT:.0%}: try --processes")
    return reasons
