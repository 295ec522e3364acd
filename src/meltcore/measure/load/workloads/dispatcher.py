"""Sends the requests of one process, enforces their time limits, and detects that the server has died."""

from __future__ import annotations

import time
from collections.abc import Callable

from meltcore.measure.load.config import Timeouts
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.wire.connection import HttpConnection, HttpRequestError, Target, get
from meltcore.measure.load.wire.response import BaseResponse
from meltcore.measure.load.workloads.workload import EncodedRequest, MakeResponse

TIMEOUT_CHECK_S = 0.25
HEALTH_TIMEOUT_S = 2.0
MIN_RETRY_S = 0.05  # after a refusal with Retry-After: 0, which thousands of connections would answer in a busy loop
MAX_STALE_S = 0.25  # a close this soon after a request began before the server had read it

# All that a dead server causes; one of them alone may be a broken connection.
CLOSE_FAILURES = frozenset({"connection reset", "connection closed"})
CONNECTION_FAILURES = CLOSE_FAILURES | {"connect refused"}

OnDone = Callable[[HttpConnection | None], None]
# Called with the connection where that is reusable, the request's index, its intended start and the seconds to wait.
OnRefused = Callable[[HttpConnection | None, int, float, float], None]
OnStale = Callable[[int, float], None]  # called with the request's index and its intended start


class Dispatcher:
    """Sends requests and calls `on_record` exactly once for each request, failed requests included."""

    def __init__(
        self,
        target: Target,
        timeouts: Timeouts,
        on_record: Callable[[RequestRecord], None],
        make_response: MakeResponse,
    ) -> None:
        self._make_response = make_response
        self._target = target
        self._timeouts = timeouts
        self._on_record = on_record
        self._active_requests: dict[BaseResponse, tuple[HttpConnection, EncodedRequest, OnDone]] = {}
        self._consecutive_failures = 0
        self._first_failure_s = 0.0
        self.server_died_s: float | None = None
        self._refusals: dict[int, int] = {}  # by index, of requests that will be sent again
        self.on_refused: OnRefused | None = None  # None: a refusal is a failure like others
        self._reconnected: set[int] = set()  # indexes of requests that will be sent over a new connection
        self.on_stale: OnStale | None = None  # None: a connection that was closed between requests is a failure

    @property
    def in_flight(self) -> int:
        """Return the number of requests that were sent and have not ended."""
        return len(self._active_requests)

    def send(self, connection: HttpConnection, request: EncodedRequest, intended_s: float, on_done: OnDone) -> None:
        """Send `request`.

        After the record, `on_done` receives the connection, or None if the connection cannot be reused.
        """
        record = RequestRecord(index=request.index, intended_s=intended_s, work=request.work)
        response = self._make_response(
            record, self._finish, keep_text=request.keep_text, max_output_tokens=request.max_output_tokens
        )
        self._active_requests[response] = (connection, request, on_done)
        record.sent_s = time.monotonic()
        connection.send(request.data, response)

    def fail_unsent(self, index: int, intended_s: float, reason: str, detail: str) -> None:
        """Record the failure of a request that was never sent."""
        record = RequestRecord(
            index=index, intended_s=intended_s, ended_s=time.monotonic(), failure=reason, detail=detail
        )
        self._add_tries(record)
        self._count_failure(record)
        self._on_record(record)

    def abort_all(self, reason: str, detail: str) -> None:
        """Fail all requests in flight."""
        for response, (connection, _, _) in list(self._active_requests.items()):
            if response in self._active_requests:
                connection.fail(reason, detail)

    def fail_overdue(self) -> None:
        """Fail every request that is past a time limit.

        One pass over all requests costs less than one timer per request: 3 ms for 10,000 streams.
        """
        now_s = time.monotonic()
        for response, (connection, _, _) in list(self._active_requests.items()):
            failure = self._find_timeout(response, now_s)
            if failure is not None and response in self._active_requests:
                connection.fail(*failure)

    async def check_server(self) -> None:
        """Request /health after consecutive connection failures.

        Record the server's death if this request fails too.
        """
        if not self._consecutive_failures or self.server_died_s is not None:
            return
        try:
            await get(self._target, "/health", HEALTH_TIMEOUT_S)
        except HttpRequestError as error:
            if self._consecutive_failures and error.reason in CONNECTION_FAILURES:
                self.server_died_s = self._first_failure_s

    def _find_timeout(self, response: BaseResponse, now_s: float) -> tuple[str, str] | None:
        timeouts, record = self._timeouts, response.record
        if now_s - record.intended_s > timeouts.total_s:
            return "total timeout", f"not complete after {timeouts.total_s:g} s"
        if not response.now_s:
            if now_s - record.sent_s > timeouts.first_byte_s:
                return "first byte timeout", f"no byte within {timeouts.first_byte_s:g} s"
        elif now_s - response.now_s > timeouts.idle_s:
            return "idle timeout", f"no byte for {timeouts.idle_s:g} s"
        return None

    def _finish(self, response: BaseResponse) -> None:
        connection, request, on_done = self._active_requests.pop(response)
        record = response.record
        if self._reconnects(connection, record) or self._sends_again(connection, response):
            return
        self._add_tries(record)
        if record.failure is None:
            if request.grade is not None:
                record.correct = request.grade(response.content)
            wants_text = request.in_check_sample or (request.needs_token_count and not record.saw_usage)
            if wants_text and response.is_text:
                reasoning = response.reasoning
                record.text, record.reasoning_chars = reasoning + response.content, len(reasoning)
        self._count_failure(record)
        self._on_record(record)
        if connection.is_reusable:
            on_done(connection)
        else:
            connection.close()  # the rest of a broken answer must not reach the next request
            on_done(None)

    def _add_tries(self, record: RequestRecord) -> None:
        """Add the refusals and the reconnection of earlier tries to the record."""
        record.refusals = self._refusals.pop(record.index, 0)
        record.reconnected = record.index in self._reconnected
        self._reconnected.discard(record.index)

    def _reconnects(self, connection: HttpConnection, record: RequestRecord) -> bool:
        """Send the request over a new connection if the server had closed the old one.

        Return whether the request is sent again. llama.cpp closes the connection after every stream without announcing
        it. HTTP clients send such a request again over a new connection. A server that closes later has read the
        request, so its close is a failure.
        """
        if self.on_stale is None or record.failure not in CLOSE_FAILURES or not connection.is_stale:
            return False
        if record.ended_s - record.sent_s > MAX_STALE_S:
            return False
        self._reconnected.add(record.index)
        self.on_stale(record.index, record.intended_s)
        return True

    def _sends_again(self, connection: HttpConnection, response: BaseResponse) -> bool:
        """Send a refused request again if its total time limit allows the wait.

        Return whether the request is sent again.
        """
        record, wait_s = response.record, response.retry_after_s
        is_whole = record.failure == f"http {record.status}"  # not one that was cut off or aborted
        if self.on_refused is None or wait_s is None or not is_whole:
            return False
        if time.monotonic() + wait_s - record.intended_s > self._timeouts.total_s:
            return False
        self._consecutive_failures = 0
        self._refusals[record.index] = self._refusals.get(record.index, 0) + 1
        if not connection.is_reusable:
            connection.close()
        self.on_refused(
            connection if connection.is_reusable else None, record.index, record.intended_s, max(wait_s, MIN_RETRY_S)
        )
        return True

    def _count_failure(self, record: RequestRecord) -> None:
        if record.failure not in CONNECTION_FAILURES:
            self._consecutive_failures = 0
        else:
            if not self._consecutive_failures:
                self._first_failure_s = record.ended_s
            self._consecutive_failures += 1
