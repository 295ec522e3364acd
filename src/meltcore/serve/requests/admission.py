"""Admission: a bounded queue, an immediate refusal past its bounds, and the time after which a retry has a chance."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from meltcore.common.errors import RequestError

RATE_WINDOW_S = 10.0  # over which the drain rate is measured
RATE_SAMPLE_S = 0.25
UNKNOWN_RETRY_S = 10.0  # when nothing has ended within the window
MAX_RETRY_S = 300.0


class Unit(NamedTuple):
    """What is counted of waiting requests beside their number, and the setting of a model that bounds it."""

    name: str
    flag: str
    setting: str


TOKENS = Unit("prompt tokens", "--max-queue-tokens", "max_queue_tokens")
CHARS = Unit("characters", "--max-queue-chars", "max_queue_chars")
AUDIO_S = Unit("seconds of audio", "--max-queue-audio", "max_queue_audio_s")


class Load(NamedTuple):
    """What all API servers have of one model. The last two: what of it waits in other classes than a request's."""

    in_flight: int
    waiting_units: float
    others_requests: float = 0.0
    others_units: float = 0.0


class Admission:
    """Bounds the queued requests of one model, beyond the requests that its engines run, and their units.

    Each engine is assumed to run `max_num_seqs` requests, its configured limit. When KV pages limit an engine, the
    queue may hold up to that many more. A class may always fill its share of both bounds, also when other classes have
    filled them: so the whole queue may hold up to twice the bounds.
    """

    def __init__(self, *, max_queue: int, max_units: float, max_num_seqs: int, unit: Unit = TOKENS) -> None:
        self._max_queue = max_queue
        self._max_units = max_units
        self._max_num_seqs = max_num_seqs
        self._unit = unit

    def has_room(self, waiting_units: float, units: float) -> bool:
        """Return whether `units` more fit, whatever their class."""
        return not waiting_units or waiting_units + units <= self._max_units

    def check(self, load: Load, *, requests: int, replicas: int, units: float, share: float = 0.0) -> None:
        """Raise RequestError (429) when `requests` more, with `units` in all, do not fit.

        The error's `retry_after_s` is the number of requests that must end first: the caller knows their rate.
        `replicas` counts replicas that are alive; a dead one runs nothing. `share` is the share of the request's class,
        at most 1.
        """
        waiting = max(0, load.in_flight + requests - self._max_num_seqs * replicas)
        if waiting > self._max_queue and waiting - load.others_requests > share * self._max_queue:
            raise RequestError(
                f"the queue is full: {waiting} requests would wait, the limit is {self._max_queue} (--max-queue)",
                status=429,
                code="queue_full",
                retry_after_s=waiting - self._max_queue,
            )
        # A prompt that finds the queue empty is admitted whatever its length: waiting would not make it fit.
        total = load.waiting_units + units
        if load.waiting_units and total > self._max_units and total - load.others_units > share * self._max_units:
            raise RequestError(
                f"the queue is full: {total:.0f} {self._unit.name} would wait, "
                f"the limit is {self._max_units:.0f} ({self._unit.flag})",
                status=429,
                code="queue_full",
                retry_after_s=max(1, waiting) * min(1.0, (total - self._max_units) / load.waiting_units),
            )


class DrainRate:
    """The rate at which requests of a model end, from which follows when a refused request should return.

    Refused clients that all return together would be refused again. So each is sent to the point in time at which the
    drain rate will have freed a slot for it.
    """

    def __init__(self, processes: int = 1) -> None:
        """Start without a rate. Each of `processes` processes refuses requests, and sees its part of them."""
        self._processes = processes
        self._samples: deque[tuple[float, float]] = deque()  # time, requests that have ended by then
        self._booked_s = 0.0  # until then the places are for clients that were refused before

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for the next `record`."""
        return not self._samples or now_s - self._samples[-1][0] >= RATE_SAMPLE_S

    def record(self, now_s: float, ended: float) -> None:
        """Note how many requests have ended by now."""
        self._samples.append((now_s, ended))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def per_s(self, now_s: float, ended: float) -> float:
        """Return the requests that ended per second within the window, or 0 where that is unknown."""
        recent = next((sample for sample in self._samples if now_s - sample[0] <= RATE_WINDOW_S), None)
        if recent is None or now_s <= recent[0]:
            return 0.0
        return max(0.0, ended - recent[1]) / (now_s - recent[0])

    def retry_after_s(self, now_s: float, ended: float, *, excess: float, requests: int) -> float:
        """Return when a refused request should return. Before it fits, `excess` requests must end."""
        rate = self.per_s(now_s, ended)
        if not rate:
            return UNKNOWN_RETRY_S
        place_s = requests * self._processes / rate
        self._booked_s = min(max(now_s + excess / rate, self._booked_s + place_s), now_s + MAX_RETRY_S)
        return self._booked_s - now_s
