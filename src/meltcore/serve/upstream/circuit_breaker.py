"""Stops sending requests to a replica that fails repeatedly, until one request to it succeeds (circuit breaker)."""

from __future__ import annotations


class CircuitBreaker:
    """A circuit breaker. It is closed at first, and opens after `failures` failures in a row.

    After `open_s` seconds it is half open, and the next request is the probe.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._failures = 0
        self._opened_s: float | None = None
        self._probe_is_running = False

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open or half open."""
        return self._opened_s is not None

    def allows(self, now_s: float) -> bool:
        """Return whether a request may be sent now."""
        if self._opened_s is None:
            return True
        return not self._probe_is_running and now_s - self._opened_s >= self._open_s

    def begin(self) -> None:
        """Note that a request is sent. If the breaker is not closed, this request is the probe."""
        self._probe_is_running = self._opened_s is not None

    def begin_answer(self) -> None:
        """Close the breaker, because the replica has begun to answer the probe.

        If this answer breaks off, the next failure opens the breaker again.
        """
        if self._opened_s is not None:
            self._failures = self._limit - 1
            self._opened_s = None
            self._probe_is_running = False

    def succeed(self) -> None:
        """Close the breaker after a complete answer."""
        self._failures = 0
        self._opened_s = None
        self._probe_is_running = False

    def fail(self, now_s: float) -> bool:
        """Count a failure. Return whether this failure has opened the breaker."""
        self._failures += 1
        was_open, self._probe_is_running = self.is_open, False
        if was_open or self._failures >= self._limit:
            self._opened_s = now_s
        return self.is_open and not was_open

    def abandon(self) -> None:
        """End a request without a result, for example because its client has disconnected."""
        self._probe_is_running = False
