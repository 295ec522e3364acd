"""Admission: a bounded queue, and an immediate refusal past its bounds."""

from __future__ import annotations

from meltcore.errors import RequestError


class Admission:
    """Bounds the requests of one model beyond those that its engines run, and their prompt tokens.

    Each engine is assumed to run `max_num_seqs` requests, its configured limit. When KV pages
    limit an engine, the queue may hold up to that many more.
    """

    def __init__(self, *, max_queue: int, max_queue_tokens: int, max_num_seqs: int) -> None:
        self._max_queue = max_queue
        self._max_queue_tokens = max_queue_tokens
        self._max_num_seqs = max_num_seqs

    def check(self, *, requests: int, replicas: int, tokens: int, in_flight: int, waiting_tokens: int) -> None:
        """Raise RequestError (429) when `requests` more, with `tokens` prompt tokens in all, do not fit.

        `replicas`: those that are alive; a dead one runs nothing.
        """
        waiting = max(0, in_flight + requests - self._max_num_seqs * replicas)
        if waiting > self._max_queue:
            raise RequestError(
                f"the queue is full: {waiting} requests would wait, the limit is {self._max_queue} (--max-queue)",
                status=429,
                code="queue_full",
            )
        # A prompt that finds the queue empty is admitted whatever its length: waiting would not make it fit.
        if waiting_tokens and waiting_tokens + tokens > self._max_queue_tokens:
            raise RequestError(
                f"the queue is full: {waiting_tokens + tokens} prompt tokens would wait, "
                f"the limit is {self._max_queue_tokens} (--max-queue-tokens)",
                status=429,
                code="queue_full",
            )
