"""Bounds the queue of a model, refuses requests past the bounds, and computes when a refused client should retry."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from meltcore.common.errors import RequestError
from meltcore.serve.requests.stats import ModelStats

RATE_WINDOW_S = 10.0  # over which the drain rate is measured
RATE_SAMPLE_S = 0.25
UNKNOWN_RETRY_S = 10.0  # when nothing has ended within the window
MAX_RETRY_S = 300.0
MODEL_ASLEEP = "model_asleep"


class Unit(NamedTuple):
    """A unit by which waiting requests are counted beside their number, and the setting that bounds this count."""

    name: str
    flag: str
    setting: str


TOKENS = Unit("prompt tokens", "--max-queue-tokens", "max_queue_tokens")
CHARS = Unit("characters", "--max-queue-chars", "max_queue_chars")
AUDIO_S = Unit("seconds of audio", "--max-queue-audio", "max_queue_audio_s")


class Load(NamedTuple):
    """The load of one model over all API servers.

    Args:
        in_flight: number of requests that have not ended.
        waiting_units: units of all waiting requests.
        other_class_requests: waiting requests of the classes other than the class of the new request.
        other_class_units: units of these waiting requests.
    """

    in_flight: int
    waiting_units: float
    other_class_requests: float = 0.0
    other_class_units: float = 0.0


class Admission:
    """Bounds the number and the units of one model's queued requests, in addition to the requests that engines run.

    Each engine is assumed to run `max_num_seqs` requests, its configured limit. If KV pages limit an engine to fewer,
    the queue may also hold the difference. A class may always fill its share of both bounds, even if other classes have
    filled the bounds. So the whole queue may hold up to twice the bounds.
    """

    def __init__(self, *, max_queue: int, max_units: float, max_num_seqs: int, unit: Unit = TOKENS) -> None:
        self._max_queue = max_queue
        self._max_units = max_units
        self._max_num_seqs = max_num_seqs
        self._unit = unit

    def fits(self, waiting_units: float, units: float) -> bool:
        """Return whether `units` more units fit, whatever their class."""
        return not waiting_units or waiting_units + units <= self._max_units

    def check(self, load: Load, *, requests: int, replicas: int, units: float, share: float = 0.0) -> None:
        """Raise RequestError (429) if more requests do not fit.

        The error's `retry_after_s` has the number of requests that must end first. The caller converts this number to
        seconds, because only the caller knows the rate.

        Args:
            load: the load of the model.
            requests: number of requests to add.
            replicas: number of living replicas. A dead replica runs no requests.
            units: units of all added requests together.
            share: share of the requests' class, at most 1.
        """
        waiting = max(0, load.in_flight + requests - self._max_num_seqs * replicas)
        if waiting > self._max_queue and waiting - load.other_class_requests > share * self._max_queue:
            raise RequestError(
                f"the queue is full: {waiting} requests would wait, the limit is {self._max_queue} "
                "(--max-queue, or max_queue of a fleet)",
                status=429,
                code="queue_full",
                retry_after_s=waiting - self._max_queue,
            )
        # A prompt that finds the queue empty is admitted whatever its length: waiting would not make it fit.
        total = load.waiting_units + units
        if load.waiting_units and total > self._max_units and total - load.other_class_units > share * self._max_units:
            raise RequestError(
                f"the queue is full: {total:.0f} {self._unit.name} would wait, "
                f"the limit is {self._max_units:.0f} ({self._unit.flag}, or {self._unit.setting} of a fleet)",
                status=429,
                code="queue_full",
                retry_after_s=max(1, waiting) * min(1.0, (total - self._max_units) / load.waiting_units),
            )


class DrainRate:
    """Measures how many requests of a model end per second, and tells refused clients when to retry.

    If all refused clients retried together, they would be refused again. So each client gets a time of its own, at
    which a slot should be free for it.
    """

    def __init__(self, processes: int = 1) -> None:
        """Start with an unknown rate.

        Each of `processes` processes refuses requests, and sees only a part of the refused clients.
        """
        self._processes = processes
        self._samples: deque[tuple[float, float]] = deque()  # time, requests that have ended by then
        self._last_retry_s = 0.0  # until then the places are for clients that were refused before

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time for the next `record`."""
        return not self._samples or now_s - self._samples[-1][0] >= RATE_SAMPLE_S

    def record(self, now_s: float, ended: float) -> None:
        """Store that `ended` requests have ended until now."""
        self._samples.append((now_s, ended))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def per_s(self, now_s: float, ended: float) -> float:
        """Return how many requests end per second, measured over the window. Returns 0 if the rate is unknown."""
        oldest_sample = next((sample for sample in self._samples if now_s - sample[0] <= RATE_WINDOW_S), None)
        if oldest_sample is None or now_s <= oldest_sample[0]:
            return 0.0
        return max(0.0, ended - oldest_sample[1]) / (now_s - oldest_sample[0])

    def retry_after_s(self, now_s: float, ended: float, *, excess: float, requests: int) -> float:
        """Return the seconds after which a refused client should retry, at most MAX_RETRY_S.

        By then `excess` requests have ended, and the clients refused before can have retried. The client has `requests`
        requests. While the rate is unknown, the result is UNKNOWN_RETRY_S.
        """
        rate = self.per_s(now_s, ended)
        if not rate:
            return UNKNOWN_RETRY_S
        retry_interval_s = requests * self._processes / rate
        self._last_retry_s = min(max(now_s + excess / rate, self._last_retry_s + retry_interval_s), now_s + MAX_RETRY_S)
        return self._last_retry_s - now_s


def asleep_error(stats: ModelStats, message: str) -> RequestError:
    """Return the error (503) for a request whose model sleeps and cannot wake up in time."""
    retry_s = max(1.0, stats.wake_at_s() - time.monotonic())
    return RequestError(message, status=503, code=MODEL_ASLEEP, retry_after_s=retry_s)
