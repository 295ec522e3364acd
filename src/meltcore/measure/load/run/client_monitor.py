"""Measures whether the client itself limited the results: the lag of its event loop, and its share of a CPU core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import numpy as np

TICK_S = 0.010
# CPU time of a shorter span is mostly start-up, and a 99th percentile of its few ticks means nothing. A longer span
# with as few had a late event loop.
MIN_DURATION_S = 1.0

MAX_LAG_MS = 25.0
MAX_LAG_RATIO = 0.10  # of the shortest latency that the level reports
MAX_CPU_UTILIZATION = 0.90


class ClientUsage(msgspec.Struct, array_like=True):
    """Holds the measurements of one client process, from the end of the release burst to the end of the level."""

    duration_s: float
    cpu_s: float
    lags_s: list[float]

    @property
    def cpu_utilization(self) -> float | None:
        """Return the used fraction of one CPU core, or None if the measured time is below MIN_DURATION_S."""
        return self.cpu_s / self.duration_s if self.duration_s >= MIN_DURATION_S else None

    @property
    def lag_p99_ms(self) -> float | None:
        """Return the 99th percentile of the event loop's lag, or None if the time is below MIN_DURATION_S."""
        if not self.lags_s or self.duration_s < MIN_DURATION_S:
            return None
        return float(np.quantile(self.lags_s, 0.99) * 1000)


class ClientMonitor:
    """Schedules a wake-up on the event loop every 10 ms and records how late each wake-up is.

    Start the monitor after the release. The release writes thousands of requests in one burst, which always delays the
    loop. Latencies count from the intended start of a request, so they include that burst. Start the monitor before the
    release only if the release sends megabytes per request.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = time.monotonic()
        self._start_cpu_s = time.process_time()
        self._lags_s: list[float] = []
        self._next_tick_s = 0.0
        self._timer = self._schedule()

    def finish(self) -> ClientUsage:
        """Stop measuring and return the measurements."""
        self._timer.cancel()
        now_s = time.monotonic()
        if now_s > self._next_tick_s:
            self._lags_s.append(now_s - self._next_tick_s)
        return ClientUsage(
            duration_s=now_s - self._start_s,
            cpu_s=time.process_time() - self._start_cpu_s,
            lags_s=self._lags_s,
        )

    def _schedule(self) -> asyncio.TimerHandle:
        self._next_tick_s = time.monotonic() + TICK_S
        return self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._lags_s.append(max(0.0, time.monotonic() - self._next_tick_s))
        self._timer = self._schedule()


def client_bound_reasons(client_usages: Sequence[ClientUsage], shortest_latency_ms: float | None) -> list[str]:
    """Return the reasons why the client may have limited the results. A client without measurements gives no reason.

    The client process with the largest lag counts. Its lag is compared with the shortest median latency of the level
    (ITL or TTFT): 60 ms of lag invalidate an ITL of 5 ms and are negligible in a TTFT of 2 s.
    """
    reasons = []
    lags_ms = [usage.lag_p99_ms for usage in client_usages if usage.lag_p99_ms is not None]
    cpu_utilizations = [usage.cpu_utilization for usage in client_usages if usage.cpu_utilization is not None]
    lag_ms, cpu_utilization = max(lags_ms, default=None), max(cpu_utilizations, default=None)
    max_lag_ms = max(MAX_LAG_MS, MAX_LAG_RATIO * (shortest_latency_ms or 0.0))
    if lag_ms is not None and lag_ms > max_lag_ms:
        reasons.append(
            f"the client's event loop ran late: p99 {lag_ms:.0f} ms, limit {max_lag_ms:.0f} ms (the larger of "
            f"{MAX_LAG_MS:.0f} ms and {MAX_LAG_RATIO:.0%} of the shortest median latency)"
        )
    if cpu_utilization is not None and cpu_utilization > MAX_CPU_UTILIZATION:
        reasons.append(
            f"the client used {cpu_utilization:.0%} of a core, limit {MAX_CPU_UTILIZATION:.0%}: try --processes"
        )
    return reasons
