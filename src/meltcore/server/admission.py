"""Who may enter: a bounded queue, and a plain answer at once past its bounds."""

from __future__ import annotations

from meltcore.errors import RequestError


class Admission:
    """At most `max_queue` requests beyond what the engine runs at once, and a bound on their prompt tokens.

    What runs is taken as `max_num_seqs`, the engine's own limit: exact without asking it. Where its pages, not its
    seats, limit it, the queue may hold up to that many more.
    """

    def __init__(self, *, max_queue: int, max_queue_tokens: int, max_num_seqs: int) -> None:
        self._max_queue = max_queue
        self._max_queue_tokens = max_queue_tokens
        self._max_num_seqs = max_num_seqs

    def check(self, *, requests: int, tokens: int, in_flight: int, waiting_tokens: int) -> None:
        """Raise RequestError (429) where `requests` more, of `tokens` prompt tokens together, would not fit."""
        waiting = max(0, in_flight + requests - self._max_num_seqs)
        if waiting > self._max_queue:
            raise RequestError(
                f"the queue is full: {waiting} requests would wait, the limit is {self._max_queue} (--max-queue)",
                status=429,
                code="queue_full",
            )
        # Alone in the queue any prompt may enter: waiting would not make it fit better.
        if waiting_tokens and waiting_tokens + tokens > self._max_queue_tokens:
            raise RequestError(
                f"the queue is full: {waiting_tokens + tokens} prompt tokens would wait, "
                f"the limit is {self._max_queue_tokens} (--max-queue-tokens)",
                status=429,
                code="queue_full",
            )
