"""The requests in flight of one process: sending, time limits, and noticing that the server has died."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from meltcore.load.config import Timeouts
from meltcore.load.connection import ConnectError, Connection, Target, get
from meltcore.load.record import Record
from meltcore.load.requests import Request
from meltcore.load.stream import StreamExchange, WholeExchange

SWEEP_S = 0.25
HEALTH_TIMEOUT_S = 2.0

# A server that has died shows as nothing but these; one of them alone may be a broken connection.
CONNECTION_FAILURES = frozenset({"connect refused", "connection reset", "connection closed"})

Ended = Callable[[Connection | None], None]


class Flight:
    """Launches requests and gives every one of them exactly one record, to `on_record`, whatever becomes of it."""

    def __init__(
        self,
        target: Target,
        timeouts: Timeouts,
        on_record: Callable[[Record], None],
        *,
        stream: bool = True,
        may_be_empty: bool = False,
    ) -> None:
        self._exchange = partial(StreamExchange if stream else WholeExchange, may_be_empty=may_be_empty)
        self._target = target
        self._timeouts = timeouts
        self._on_record = on_record
        self._active: dict[StreamExchange, tuple[Connection, Request, Ended]] = {}
        self._failures_in_a_row = 0
        self._first_failure_s = 0.0
        self.server_died_s: float | None = None

    @property
    def in_flight(self) -> int:
        return len(self._active)

    def launch(self, connection: Connection, request: Request, intended_s: float, ended: Ended) -> None:
        """Send `request`; `ended` is called once it has its record, with the connection if it can carry another."""
        record = Record(index=request.index, intended_s=intended_s)
        exchange = self._exchange(record, self._done, keep_text=request.judge is not None or request.sampled)
        self._active[exchange] = (connection, request, ended)
        record.sent_s = time.monotonic()
        connection.send(request.data, exchange)

    def fail_unsent(self, index: int, intended_s: float, reason: str, detail: str) -> None:
        """Record a request that never got a connection."""
        record = Record(index=index, intended_s=intended_s, ended_s=time.monotonic(), failure=reason, detail=detail)
        self._count_failure(record)
        self._on_record(record)

    def abort_all(self, reason: str, detail: str) -> None:
        """Fail everything in flight."""
        for exchange, (connection, _, _) in list(self._active.items()):
            if exchange in self._active:
                connection.fail(reason, detail)

    def sweep(self) -> None:
        """Fail what is past a time limit. One pass over all beats a timer each: 3 ms for 10,000 streams."""
        now_s = time.monotonic()
        for exchange, (connection, _, _) in list(self._active.items()):
            verdict = self._overdue(exchange, now_s)
            if verdict is not None and exchange in self._active:
                connection.fail(*verdict)

    async def check_server(self) -> None:
        """After failures of connections and nothing else, ask /health; no answer at all means the server died."""
        if not self._failures_in_a_row or self.server_died_s is not None:
            return
        try:
            await get(self._target, "/health", HEALTH_TIMEOUT_S)
        except ConnectError as error:
            if self._failures_in_a_row and error.reason in CONNECTION_FAILURES:
                self.server_died_s = self._first_failure_s

    def _overdue(self, exchange: StreamExchange, now_s: float) -> tuple[str, str] | None:
        limits, record = self._timeouts, exchange.record
        if now_s - record.intended_s > limits.total_s:
            return "total timeout", f"not whole after {limits.total_s:g} s"
        if not exchange.now_s:
            if now_s - record.sent_s > limits.first_byte_s:
                return "first byte timeout", f"no byte within {limits.first_byte_s:g} s"
        elif now_s - exchange.now_s > limits.idle_s:
            return "idle timeout", f"no byte for {limits.idle_s:g} s"
        return None

    def _done(self, exchange: StreamExchange) -> None:
        connection, request, ended = self._active.pop(exchange)
        record = exchange.record
        if record.failure is None:
            if request.judge is not None:
                record.correct = request.judge(exchange.answer)
            if request.sampled:
                thoughts = exchange.thoughts
                record.text, record.thought_chars = thoughts + exchange.answer, len(thoughts)
        self._count_failure(record)
        self._on_record(record)
        if connection.reusable:
            ended(connection)
        else:
            connection.close()  # the rest of a broken answer must not reach the next request
            ended(None)

    def _count_failure(self, record: Record) -> None:
        if record.failure not in CONNECTION_FAILURES:
            self._failures_in_a_row = 0
        else:
            if not self._failures_in_a_row:
                self._first_failure_s = record.ended_s
            self._failures_in_a_row += 1
