"""Sends one request to one upstream server, checks the answer, and passes the answer on unchanged."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Message

from meltcore.common.errors import RequestError
from meltcore.serve.http.hops import via_lines
from meltcore.serve.requests.asgi import error_json, send_bytes
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.request_fields import header
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.serve.requests.tracing import CONTEXT_HEADERS, trace_headers
from meltcore.serve.upstream.event_stream import EventBuffer
from meltcore.serve.upstream.http_connection import FailureKind, UpstreamConnection, UpstreamError
from meltcore.serve.upstream.http_replica import UpstreamReplica

# An answer that is no stream is sent once it is whole, up to this size: until then its failure is a plain error.
MAX_WHOLE_BYTES = 1024 * 1024
STATUS_BY_FAILURE: dict[FailureKind, tuple[int, str]] = {
    "connect": (502, "upstream_unreachable"),
    "connect_timeout": (504, "upstream_timeout"),
    "closed": (502, "upstream_error"),
    "malformed": (502, "upstream_error"),
    "first_byte": (504, "upstream_timeout"),
    "idle": (504, "upstream_timeout"),
    "deadline": (504, "request_timeout"),
    "aborted": (499, "client_closed"),
}
IDLE_TIMEOUT_S = 60.0  # between two bytes of an answer
CLOSE_LIMIT_S = 5.0  # for a client to read the end of an answer that broke off
_BUSY_STATUSES = (429, 503)  # an upstream that refuses a request: it has computed nothing
_FAULTY_STATUSES = (500, 502, 504)
_JSON_PATHS = ("completions", "embeddings", "translate", "translations", "tokenize", "rerank", "score", "responses")
_RELAYED_HEADERS = (b"content-type", b"content-encoding", b"cache-control", b"retry-after", b"content-disposition")


_USAGE_MARK = b'"usage"'
_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(?=\{)')
_MAX_USAGE_BYTES = 4096
_EVENTS_WITHOUT_TOKENS = 3  # of a stream: the role, the finish reason, and [DONE]


_decode_first = json.JSONDecoder().raw_decode  # other bytes follow


def read_usage(data: bytes) -> tuple[int | None, int | None]:
    """Return the prompt tokens and the output tokens that the last `usage` of an answer reports.

    A number is None if the answer does not report it.
    """
    position = data.rfind(_USAGE_MARK)
    while position >= 0:
        if found := _USAGE.match(data, position):
            text = data[found.end() : found.end() + _MAX_USAGE_BYTES].decode(errors="replace")
            try:
                usage, _ = _decode_first(text)
            except (ValueError, RecursionError):
                return None, None
            return _count(usage, "prompt_tokens", "input_tokens"), _count(usage, "completion_tokens", "output_tokens")
        position = data.rfind(_USAGE_MARK, 0, position)
    return None, None


def _count(usage: dict[str, Any], *names: str) -> int | None:
    values = (usage.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value >= 0), None)


class ForwardOutcome(msgspec.Struct):
    """Says for the log how a request has ended.

    `error` is the code of an error of this server, or None. The upstream's own errors only show in `status`.
    `prompt_tokens` and `completion_tokens` are counted by the upstream, or by its events, or are None if unknown.
    """

    status: int
    replica: int | None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class UpstreamChild(Child):
    """A request at the replica that an attempt has chosen.

    The attempt sends it, because the queue knows no replicas here.
    """

    ticket: UpstreamTicket


class UpstreamTicket(Ticket[UpstreamChild]):
    """One request that is forwarded, with its connections to the client and to the upstream.

    The connection to the upstream ends with the time limit, or when the client disconnects.
    """

    def __init__(self, arrived_s: float, client: Any) -> None:
        super().__init__(arrived_s)
        self.client = client
        self.child = UpstreamChild(self)
        self.connection: UpstreamConnection | None = None
        self.is_client_gone = False
        self.is_overdue = False
        self._connecting: asyncio.Task[UpstreamConnection] | None = None

    async def wait_turn(self) -> None:
        """Wait until the queue starts the request, or until the request has ended."""
        if not (self.is_client_gone or self.is_overdue or self.error is not None):
            self.turn = asyncio.get_running_loop().create_future()
            await self.turn

    async def connect(self, replica: UpstreamReplica) -> UpstreamConnection:
        """Open a connection to a replica.

        Raises UpstreamError if this fails, or if the client disconnects meanwhile.
        """
        self._connecting = asyncio.create_task(replica.connect())
        try:
            return await self._connecting
        except asyncio.CancelledError:
            own_task = asyncio.current_task()
            if self._connecting.cancelled() and not (own_task is not None and own_task.cancelling()):
                raise UpstreamError("aborted", "the request was ended") from None
            self._connecting.cancel()
            raise
        finally:
            self._connecting = None

    def disconnect(self) -> None:
        """End the request because its client has disconnected."""
        self.is_client_gone = True
        self.interrupt("aborted", "the client has disconnected")

    def fail(self) -> None:
        """End the request with the error of the ticket."""
        assert self.error is not None
        self.interrupt("aborted", self.error.message)

    def pass_limit(self) -> None:
        """End the request because it exceeds its time limit."""
        self.is_overdue = True
        self.interrupt("deadline", "the answer took too long")

    def interrupt(self, kind: FailureKind, message: str) -> None:
        """End the request now, also at the upstream."""
        self.begin()
        if self._connecting is not None:
            self._connecting.cancel()
        if self.connection is not None:
            self.connection.fail(kind, message)
        if self.is_sending and not self.is_client_gone:
            self.client.transport.abort()  # it does not read, so no error would reach it

    async def close_client(self) -> None:
        """Close the client's connection when the client has read all that was sent, or after CLOSE_LIMIT_S."""
        disconnected = asyncio.Event()
        self.client.set_disconnect_callback(disconnected.set)
        self.client.transport.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await disconnected.wait()
        self.client.transport.abort()

    def check(self, now_s: float, first_byte_s: float) -> None:
        """End the request if the upstream has sent nothing for too long.

        `first_byte_s` limits the seconds until the first byte of an answer.
        """
        connection = self.connection
        if connection is None or not connection.is_waiting_for_upstream:
            return
        if not connection.has_body:
            if now_s - connection.sent_s >= first_byte_s:
                limit = f"{first_byte_s:g} s (timeouts.first_byte_s)"
                self.interrupt("first_byte", f"it sent no byte of an answer within {limit}")
        elif now_s - connection.last_byte_s >= IDLE_TIMEOUT_S:
            self.interrupt("idle", f"it sent nothing for {IDLE_TIMEOUT_S:g} s in its answer")


class Attempt:
    """Carries a request at one replica to the end of its answer."""

    def __init__(
        self,
        exchange: Exchange,
        ticket: UpstreamTicket,
        replica: UpstreamReplica,
        *,
        is_streamed: bool,
        stats: ModelStats,
        server: str,
        limit_s: float,
    ) -> None:
        """Create an attempt.

        Args:
            exchange: the request of the client.
            ticket: the ticket of the request.
            replica: the upstream server.
            is_streamed: whether the answer is a stream of server-sent events.
            stats: statistics of the model.
            server: name of the replica for the client.
            limit_s: time limit of the whole request, in seconds.
        """
        self._exchange = exchange
        self._ticket = ticket
        self._replica = replica
        self._stats = stats
        self._server = server
        self._limit_s = limit_s
        self._events = EventBuffer() if is_streamed else None
        self._is_reported = False  # the breaker knows how it went
        self._usage = b""  # what came last with the upstream's count of tokens
        self._num_events = 0

    async def run(self, body: bytes, *, may_retry: bool) -> ForwardOutcome | None:
        """Send the request, pass the answer on, and return the outcome.

        Returns None if the replica is busy and `may_retry` is true, so that another replica may be tried. Raises
        UpstreamError if the answer failed before anything was sent to the client.
        """
        breaker = self._replica.breaker
        try:
            connection = await self._send(body)
            status = connection.status
            if status in _BUSY_STATUSES and may_retry:
                return None
            first, is_whole = await self._first_bytes(connection)
        except UpstreamError as error:
            if error.kind not in ("aborted", "deadline"):
                self._fail()
            raise
        breaker.begin_answer()
        self._observe_first_byte()
        outcome = ForwardOutcome(status, self._replica.index)
        if is_whole:
            self._usage = first
            await self._send_whole(connection, first)
        else:
            if self._events is not None:
                self._note_events(first)
            broken_outcome = await self._relay(connection, first)
            if broken_outcome is not None:
                return self._counted(broken_outcome)
        if status in _FAULTY_STATUSES:
            self._fail()
        elif status not in _BUSY_STATUSES:
            self._is_reported = True
            breaker.succeed()
        return self._counted(outcome)

    def close(self) -> None:
        """Keep the connection for another request, or drop it."""
        connection, self._ticket.connection = self._ticket.connection, None
        if connection is not None:
            self._replica.release(connection)
        if not self._is_reported:
            self._replica.breaker.abandon()

    def describe(self, error: UpstreamError) -> str:
        """Return the text of an error for the client. It does not contain the upstream's address."""
        if error.kind == "deadline":
            return self._ticket.exchange.overdue(self._limit_s).message
        return f"{self._server} failed: {error}"

    def _fail(self) -> None:
        self._is_reported = True
        self._replica.breaker.fail(asyncio.get_running_loop().time())

    async def _send(self, body: bytes) -> UpstreamConnection:
        """Send the request, wait for the head of its answer, and return the connection.

        Raises UpstreamError if the replica does not answer.
        """
        exchange, replica, ticket = self._exchange, self._replica, self._ticket
        scope = exchange.scope
        headers = f"X-Request-Id: {exchange.identity}\r\n{via_lines(scope)}"
        span = ticket.exchange.span
        if span is not None:
            headers += "".join(f"{name}: {value}\r\n" for name, value in trace_headers(span).items())
        else:
            for name in CONTEXT_HEADERS:
                if (value := header(scope, name)) is not None:
                    headers += f"{name.decode()}: {value.decode('latin-1')}\r\n"
        data = replica.encode("POST", scope["path"], body, exchange.body_type, headers)
        idle_connection = replica.idle_connection()
        if idle_connection is not None:
            ticket.connection = idle_connection
            idle_connection.send(data)
            try:
                await idle_connection.response_head()
            except UpstreamError as error:
                # The server closed the idle connection while the request was on its way: it has not read it.
                if error.kind != "closed" or error.had_bytes:
                    raise
            else:
                return idle_connection
        connection = ticket.connection = await ticket.connect(replica)
        connection.send(data)
        await connection.response_head()
        return connection

    async def _first_bytes(self, connection: UpstreamConnection) -> tuple[bytes, bool]:
        """Wait for the first bytes of the answer. Return them, and whether they are the complete answer.

        Raises UpstreamError if the connection ends before them, or if the answer is of a wrong type.
        """
        status = connection.status
        content_type = connection.headers.get(b"content-type", b"").decode("latin-1")
        media_type = content_type.partition(";")[0].strip().lower()
        if 300 <= status < 400:
            raise UpstreamError("malformed", f"it answered with status {status}, a redirect", had_bytes=True)
        is_stream = media_type == "text/event-stream"
        if status >= 400 or self._events is None:
            wants_json = status >= 400 or self._exchange.scope["path"].endswith(_JSON_PATHS)
            is_json = media_type == "application/json" or media_type.endswith("+json")
            if (wants_json and not is_json) or media_type in ("text/html", ""):
                raise _wrong_type(status, content_type, "application/json")
            self._events = None
            parts: list[bytes] = []
            size = 0
            while size <= MAX_WHOLE_BYTES:
                data = await connection.read()
                if not data:
                    return b"".join(parts), True
                parts.append(data)
                size += len(data)
            return b"".join(parts), False
        if not is_stream:
            raise _wrong_type(status, content_type, "text/event-stream")
        assert self._events is not None
        if connection.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self._events = None  # compressed although it should not be: its events cannot be found
            if data := await connection.read():
                return data, False
            raise UpstreamError("closed", "its stream ended before the first byte", had_bytes=True)
        while data := await connection.read():
            if events := self._events.add(data):
                return events, False
        raise UpstreamError("closed", "its stream ended before the first whole event", had_bytes=True)

    def _observe_first_byte(self) -> None:
        ttft_s = time.monotonic() - self._exchange.arrived_s
        self._exchange.fields["ttft_s"] = round(ttft_s, 6)
        if self._events is not None:
            self._stats.time_to_first_token.observe(ttft_s)

    async def _send_whole(self, connection: UpstreamConnection, body: bytes) -> None:
        content_type, headers = connection.headers[b"content-type"], self._headers(connection)[1:]
        await send_bytes(self._send_part, body, content_type, status=connection.status, headers=headers)

    async def _send_part(self, message: Message) -> None:
        """Send a part of the answer. The client counts as slow until it has read enough of the earlier parts."""
        self._ticket.is_sending = True
        await self._exchange.send(message)
        self._ticket.is_sending = False

    async def _relay(self, connection: UpstreamConnection, first: bytes) -> ForwardOutcome | None:
        """Pass on an answer as it arrives.

        Return None after a complete answer, or the outcome if the answer breaks off.
        """
        events, headers = self._events, self._headers(connection)
        if events is None and b"content-length" in connection.headers:
            headers.append((b"content-length", connection.headers[b"content-length"]))
        await self._send_part({"type": "http.response.start", "status": connection.status, "headers": headers})
        await self._send_part({"type": "http.response.body", "body": first, "more_body": True})
        try:
            if events is not None:
                await self._relay_events(connection, events)
            else:
                while data := await connection.read():
                    await self._send_part({"type": "http.response.body", "body": data, "more_body": True})
        except UpstreamError as error:
            return await self._break_off(error)
        rest = b"" if events is None else events.end()
        await self._exchange.send({"type": "http.response.body", "body": rest, "more_body": False})
        return None

    async def _relay_events(self, connection: UpstreamConnection, events: EventBuffer) -> None:
        """Write events in the same iteration of the event loop in which they are read.

        Most of the cost of a stream is iterations of the event loop. Raises UpstreamError if the stream breaks off.
        """
        ticket, client = self._ticket, self._ticket.client

        def pass_on(data: bytes) -> None:
            if complete_events := events.add(data):
                self._note_events(complete_events)
                if not client.write_chunk(complete_events):
                    ticket.is_sending = True
                    connection.pause()

        def read_on() -> None:
            ticket.is_sending = False
            connection.resume()

        client.on_writable = read_on
        try:
            await connection.relay(pass_on)
        finally:
            client.on_writable = None
        if not events.is_whole:
            raise UpstreamError("closed", "its stream ended within an event", had_bytes=True)

    def _note_events(self, data: bytes) -> None:
        self._num_events += data.count(b"data: ")
        if _USAGE_MARK in data:  # nearly always the last one; with null in the others
            self._usage = data

    def _counted(self, outcome: ForwardOutcome) -> ForwardOutcome:
        """Return the outcome with the numbers of tokens that the upstream reports.

        If there is no report, each event with a token counts as one output token.
        """
        outcome.prompt_tokens, outcome.completion_tokens = read_usage(self._usage)
        if outcome.completion_tokens is None and self._num_events:
            outcome.completion_tokens = max(0, self._num_events - _EVENTS_WITHOUT_TOKENS)
        return outcome

    async def _break_off(self, error: UpstreamError) -> ForwardOutcome:
        """End an answer that has begun and cannot be completed.

        A stream gets an error event, and the last chunk of the body is left out. So a client that does not know error
        events sees an incomplete body, which HTTP clients report.
        """
        ticket, events = self._ticket, self._events
        if error.kind not in ("aborted", "deadline"):
            self._fail()
        status, code = STATUS_BY_FAILURE[error.kind]
        failure = ticket.error or RequestError(self.describe(error), status=status, code=code)
        if not ticket.is_client_gone:
            if events is not None and not events.is_inside_event and not ticket.is_sending:
                event = b"event: error\ndata: " + error_json(failure, self._exchange.error_form) + b"\n\n"
                await self._exchange.send({"type": "http.response.body", "body": event, "more_body": True})
            await ticket.close_client()
        return ForwardOutcome(499 if ticket.is_client_gone else failure.status, self._replica.index, failure.code)

    def _headers(self, connection: UpstreamConnection) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer. The content type comes first."""
        headers = [(name, connection.headers[name]) for name in _RELAYED_HEADERS if name in connection.headers]
        if connection.headers.get(b"content-type", b"").lower().startswith(b"text/event-stream"):
            headers.append((b"x-accel-buffering", b"no"))  # nginx would gather events into blocks
        return headers + self._exchange.headers


def _wrong_type(status: int, content_type: str, expected: str) -> UpstreamError:
    shown_type = repr(content_type[:80]) if content_type else "no content type"
    return UpstreamError(
        "malformed", f"it answered with {shown_type} (status {status}) instead of {expected}", had_bytes=True
    )
