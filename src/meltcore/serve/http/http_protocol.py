"""Handles one HTTP connection.

It adds bounds to uvicorn's protocol, and answers requests that uvicorn would misread.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from meltcore.common.errors import RequestError
from meltcore.serve.http.http_responses import JoinedWrites, Refusal, ResponseBeforeBody, ResponseOfHttp10, head_problem
from meltcore.serve.requests.asgi import error_json, request_id
from meltcore.serve.requests.request_fields import shorten
from meltcore.serve.requests.stats import ServerStats

# A client is disconnected when it sends nothing of a request that it has begun (or that the connection begins with) for
# SILENT_LIMIT_S, when the headers take longer than HEAD_LIMIT_S, or the whole request longer than REQUEST_LIMIT_S. A
# request that has begun gets status 408 first.
SILENT_LIMIT_S = 60.0
HEAD_LIMIT_S = 60.0
REQUEST_LIMIT_S = 300.0
MAX_HEAD_BYTES = 64 * 1024  # of request line and headers
MAX_PIPELINED = 16  # requests that a client may send ahead of its responses; more are left unread until then


class HttpProtocol(HttpToolsProtocol):
    """Extends uvicorn's protocol. The application finds the protocol in the scope of a request.

    The application can drop the connection of a client that does not read. It can also learn of a lost connection, and
    write chunks of a stream, without a task. The protocol limits the size of a request's head and the time to send a
    request, which uvicorn does not do.

    An offer to change to another protocol is ignored. Clients of HTTP/1.0 get no chunk sizes. A body that is announced
    with `Expect: 100-continue` is requested when it is read, and never after a refusal. If a client sends bytes that
    are no request, the response to them follows the responses to the requests before them.
    """

    def __init__(self, config: uvicorn.Config, state: Any, stats: ServerStats) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._stats = stats
        self._is_lost = False
        self._on_lost: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None  # called once when `write_chunk` may be called again
        self._received_s = self.loop.time()
        self._is_receiving = self._is_in_head = False  # a request has begun to arrive; its headers are not complete
        self._waiting_since_s: float | None = self._received_s  # for the rest of a request, or the first one
        self._head_bytes = 0
        self._is_timed_out = False
        self._is_rejected = False  # what arrives from now on is not read
        self._has_chunk_sizes = True  # of the response in progress

    def connection_made(self, transport: Any) -> None:
        """Begin to serve a connection."""
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that the connection is lost."""
        super().connection_lost(exc)
        self._stats.add("connections_closed")
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()
        # Scopes refer to this protocol. With them it would stay in memory until a garbage collection, which is rare.
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.pipeline.clear()
        for table in (self.connections, self.tasks):
            if not table:
                table.clear()  # an emptied set keeps the memory of its largest size

    # --- for the application

    def write_chunk(self, data: bytes) -> bool:
        """Write a part of the body of a response that has begun without a length.

        Return whether more may follow now.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._has_chunk_sizes else data)
        return not self.flow.write_paused

    def set_disconnect_callback(self, callback: Callable[[], None] | None) -> None:
        """Set the function that is called when the client disconnects. None removes the function.

        If the client has already disconnected, the function is called immediately.
        """
        self._on_lost = callback
        if callback is None:
            if self._waiting_since_s is not None:  # for the next request, which could wait until now
                self._waiting_since_s = self._received_s = self.loop.time()
        elif self._is_lost:
            callback()
        else:
            self.flow.resume_reading()  # paused by a long body: the end of a connection comes after its data

    def holds_body(self, scope: Scope) -> bool:
        """Return whether the client of this request waits to be asked for the body (`Expect: 100-continue`)."""
        return self.cycle is not None and self.cycle.scope is scope and self.cycle.waiting_for_100_continue

    def resume_writing(self) -> None:
        """Let the application continue to write, because the client has read."""
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    # --- late clients

    def is_late(self, now_s: float) -> bool:
        """Return whether the client takes too long to send its first request or the rest of a request."""
        # While a response is sent, or reading is paused, the client does not have to hurry.
        if self._waiting_since_s is None or self._on_lost is not None or self.flow.read_paused:
            return False
        is_in_body = self._is_receiving and not self._is_in_head
        limit_s = REQUEST_LIMIT_S if is_in_body else HEAD_LIMIT_S
        return now_s - self._received_s > SILENT_LIMIT_S or now_s - self._waiting_since_s > limit_s

    def close_late(self) -> None:
        """Disconnect a client that is late. If a request has begun to arrive, first answer it with status 408."""
        if self._is_timed_out or not self._is_receiving or not self._can_refuse():
            self.transport.abort()
            return
        self._is_timed_out = True
        part, limit_s = ("headers", HEAD_LIMIT_S) if self._is_in_head else ("headers and body", REQUEST_LIMIT_S)
        message = (
            f"the request's {part} took too long to arrive: the limits are {limit_s:g} s, "
            f"and {SILENT_LIMIT_S:g} s without data"
        )
        self._refuse(RequestError(message, status=408, code="request_timeout"))

    # --- parsing

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes, and refuse a head that does not end."""
        if self._is_rejected:
            return
        self._received_s = self.loop.time()
        if self._waiting_since_s is None:
            self._waiting_since_s = self._received_s
        self._unset_keepalive_if_required()
        scope_of_head = self.scope if self._is_in_head else None
        self._parse(data)
        if self._is_in_head and self.scope is scope_of_head:  # all of it belongs to one head, which is not complete yet
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._reject_long_head()

    def _reject_long_head(self) -> None:
        message = f"the request's headers have more than {MAX_HEAD_BYTES} bytes"
        self._reject(RequestError(message, status=431, code="headers_too_large"))

    def _parse(self, data: bytes) -> None:
        """Parse the received bytes."""
        while not self._is_rejected:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                # The parser stops after the head that offers another protocol (HTTP/2 by Java's clients and
                # `curl --http2`, TLS, WebSocket). The client goes on in HTTP/1.1 when the offer is not taken up: its
                # request is parsed again without the offer, by a parser that has not seen it.
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            except httptools.HttpParserCallbackError as error:  # a fault of this server's, not of the request
                self.logger.error("a request could not be read", exc_info=error)
                self._reject(RequestError("the server has failed to read the request", status=500))
            except httptools.HttpParserError as error:
                self._reject(RequestError(f"the request is not valid HTTP: {shorten(str(error))}"))
            else:
                return

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        header_lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((method + b" " + self.url + b" HTTP/" + version, *header_lines, b"\r\n"))

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._is_receiving = self._is_in_head = True
        self._waiting_since_s = self._waiting_since_s or self._received_s
        self._head_bytes = 0
        self.scope["meltcore.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header.

        Spaces around its value are removed, because uvicorn does not recognize `Expect: 100-continue` with spaces.
        Trailers after a chunked body are dropped (RFC 9110, 6.5.1), because the request may already be running without
        them.
        """
        if self._is_in_head:
            super().on_header(name, value.strip())

    def on_headers_complete(self) -> None:
        """Start the request. If its head offers another protocol, the head is parsed again without the offer."""
        if self.parser.get_method() == b"CONNECT":
            self._reject(RequestError("CONNECT: this server is no proxy", status=405))
        elif (version := self.parser.get_http_version()) not in ("1.0", "1.1"):  # the parser lets 0.9 and 2.0 pass
            self._reject(RequestError(f"the version of HTTP is {version}; this server has 1.0 and 1.1"))
        elif len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._reject_long_head()  # its end came with the data that made it too long
        else:
            self._check_target()
        if self._is_rejected or self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._is_in_head = False
        if self._on_lost is not None and len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn stops reading here; the end of the connection would go unseen

    def _check_target(self) -> None:
        """Reject a request target that is neither a path nor a URL. A URL without a path gets the path "/".

        RFC 9112, 3.2.2 gives this meaning to such a URL.
        """
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            url = shorten(self.url.decode("latin-1"))
            self._reject(RequestError(f"the request target {url!r} is neither a path nor an address"))
            return
        if target.path is None:
            self.url = b"/?" + target.query if target.query else b"/"

    def on_body(self, body: bytes) -> None:
        """Store a part of the body until the application reads it."""
        if self._is_rejected:
            return
        self.cycle.waiting_for_100_continue = False  # the client has not waited
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the whole request has arrived. No time limit applies while the client waits for the response."""
        if self._is_rejected or self.parser.should_upgrade():
            return
        self._is_receiving = False
        self._waiting_since_s = None
        self.cycle.waiting_for_100_continue = False
        super().on_message_complete()

    # --- responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the application for the next request of the connection. Requests with invalid headers are refused."""
        scope: Any = cycle.scope
        problem = None if isinstance(app, Refusal) else head_problem(scope)
        if problem is not None:
            app = Refusal(problem)
        self._has_chunk_sizes = scope["http_version"] == "1.1"
        if not self._has_chunk_sizes:
            app = ResponseOfHttp10(app, cycle)
        elif cycle.waiting_for_100_continue:
            app = ResponseBeforeBody(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next response."""
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def _can_refuse(self) -> bool:
        """Return whether a response sent now would reach the client as the answer to the request that is arriving."""
        if self.pipeline:
            return False
        if self._has_begun():
            return not self.cycle.response_started
        return self.cycle is None or self.cycle.response_complete

    def _has_begun(self) -> bool:
        """Return whether the application was started for the arriving request, whose headers are complete then."""
        return self._is_receiving and self.cycle is not None and self.cycle.scope is self.scope

    def _reject(self, error: RequestError) -> None:
        """Answer bytes that are no request, after the answers to the requests before them, and disconnect."""
        self._is_rejected = True
        if self._can_refuse():
            self._refuse(error)
        elif self._has_begun():
            self._drop_body(error)
        else:
            refusal: Any = Refusal(error)
            self.pipeline.appendleft((self._refused_cycle(), refusal))

    def _drop_body(self, error: RequestError) -> None:
        """Refuse the request whose body is arriving. If its response may have begun, close the connection instead."""
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            refusal: Any = Refusal(error)
            self.pipeline[0] = (self.cycle, refusal)
        else:
            self.transport.close()

    def _refused_cycle(self) -> RequestResponseCycle:
        scope = {**self.scope, "method": "GET", "path": "", "query_string": b"", "http_version": "1.1"}
        return RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )

    def _refuse(self, error: RequestError) -> None:
        """Send `error` without the application, and disconnect."""
        body = error_json(error)
        status = http.HTTPStatus(error.status)
        identity = request_id({"headers": self.headers or ()})
        response_head = (
            f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\nx-request-id: {identity}\r\n"
        )
        self.transport.write(
            b"%sconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (response_head.encode(), len(body), body)
        )
        self.transport.close()
