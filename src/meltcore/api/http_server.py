"""uvicorn as the HTTP server of one process. It is given connections: the listening socket is the supervisor's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meltcore.api.http import error_json
from meltcore.api.stats import ServerStats
from meltcore.errors import RequestError
from meltcore.host_memory import trim_memory

KEEP_ALIVE_S = 75
CLOSE_S = 2  # whole seconds: uvicorn's limit for connections to close
# A client is disconnected when it sends nothing of a request that it has begun (or that the connection begins with) for
# SILENT_LIMIT_S, when the headers take longer than HEAD_LIMIT_S, or the whole request longer than REQUEST_LIMIT_S. A
# request that has begun gets status 408 first.
SILENT_LIMIT_S = 60.0
HEAD_LIMIT_S = 60.0
REQUEST_LIMIT_S = 300.0
LATE_CHECK_S = 5.0
MAX_HEAD_BYTES = 64 * 1024  # of request line and headers; the last data that is read may exceed it
MAX_PIPELINED = 16  # requests that a client may send ahead of its responses; more are left unread until then
GC_THRESHOLDS = (50_000, 20, 100)  # young objects are requests: a collection every 700 would only pause streams
IDLE_CHECK_S = 1.0
LAG_CHECK_S = 0.05
MIN_EVENTS = 256  # requests and ends of connections; what fewer leave behind is not worth a walk through the heap

# A client that offers HTTP/2 this way (Java's, `curl --http2`) continues with HTTP/1.1 when the offer is not accepted.
# The parser would accept it, and take the request's body for something else.
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class HttpServer:
    """Serves `app` on the connections it is given."""

    def __init__(self, app: ASGIApp, stats: ServerStats) -> None:
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            http=_Protocol,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._config.load()
        self._server = EmbeddedServer(self._config)
        self._stats = stats
        self._connecting: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Serve until `stop`, then until the connections are closed or CLOSE_S have passed."""
        IdleTrim(self._stats)
        _LagWatch(self._stats)
        self._disconnect_late()
        await self._server.serve(sockets=[])

    def stop(self) -> None:
        """Accept no more requests and let `serve` return."""
        self._server.should_exit = True
        # A client that has not read its response or sent its request by then is disconnected here. uvicorn would cancel
        # the task that serves it, which prints a traceback.
        asyncio.get_running_loop().call_later(CLOSE_S - 0.5, self._disconnect_all)

    def add_connection(self, connection: socket.socket) -> None:
        """Serve an accepted connection."""
        task = asyncio.create_task(self._connect(connection))
        self._connecting.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._connected)

    def _connections(self) -> list[Any]:
        return list(self._server.server_state.connections)

    def _disconnect_all(self) -> None:
        _abort(self._connections())

    def _disconnect_late(self) -> None:
        """Check all connections every few seconds: a timer per connection would be one more object for each."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in self._connections():
            if connection.is_late(now_s):
                connection.close_late()
        loop.call_later(LATE_CHECK_S, self._disconnect_late)

    def _connected(self, task: asyncio.Task[Any]) -> None:
        self._connecting.discard(task)
        if not self._connecting:
            self._connecting.clear()  # an emptied set keeps the memory of its largest size

    async def _connect(self, connection: socket.socket) -> None:
        def protocol() -> _Protocol:
            return _Protocol(self._config, self._server.server_state, self._stats)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the client is gone already
            connection.close()
            self._stats.add("connections_closed")


def _abort(connections: Iterable[Any]) -> None:
    for connection in connections:
        connection.transport.abort()


class IdleTrim:
    """Returns memory to the system once a burst of requests is over; the allocator would keep it for the next."""

    def __init__(self, stats: ServerStats) -> None:
        self._stats = stats
        self._seen = 0.0
        self._trimmed = 0.0
        asyncio.get_running_loop().call_later(IDLE_CHECK_S, self._check)

    def _check(self) -> None:
        events = self._stats.events()
        idle = events == self._seen and self._stats.is_idle()
        self._seen = events
        if idle and events >= self._trimmed + MIN_EVENTS:
            self._trimmed = events
            trim_memory()
        asyncio.get_running_loop().call_later(IDLE_CHECK_S, self._check)


class _LagWatch:
    """Observes how late a timer runs: as long as every other event of the loop waits at that moment."""

    def __init__(self, stats: ServerStats) -> None:
        self._stats = stats
        self._start()

    def _start(self) -> None:
        # uvloop's clock counts whole milliseconds, and stands still within a turn of the loop.
        self._due_s = time.monotonic() + LAG_CHECK_S
        asyncio.get_running_loop().call_later(LAG_CHECK_S, self._check)

    def _check(self) -> None:
        self._stats.event_loop_lag.observe(max(0.0, time.monotonic() - self._due_s))
        self._start()


class _JoinedWrites:
    """A transport that writes the head of a response together with the body that follows.

    uvicorn writes them one after the other: two system calls, and two segments for the client to wake up for.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """Write bytes, after the head that was kept. A head other than 100 Continue is kept."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write the head that is kept: no body follows an answer to HEAD."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Write what is kept, and close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which the application finds in its scope.

    The application can drop the connection of a client that does not read, and learn of a lost connection without a
    task that waits for it. Of a stream it can write chunks without a task. The protocol bounds the size of a request's
    head and the time to send a request, which uvicorn does not.
    """

    def __init__(self, config: uvicorn.Config, state: Any, stats: ServerStats) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._stats = stats
        self._lost = False
        self._on_lost: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None  # called once when `write_chunk` may be called again
        self._received_s = self.loop.time()
        self._receiving = self._in_head = False  # a request has begun to arrive; its headers are not complete
        self._waiting_since_s: float | None = self._received_s  # for the rest of a request, or the first one
        self._head_bytes = 0
        self._timed_out = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_JoinedWrites(transport))  # type: ignore[arg-type]

    def write_chunk(self, data: bytes) -> bool:
        """Write bytes of the body of a response that has begun without a length; returns whether more may follow."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self.flow.write_paused

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def is_late(self, now_s: float) -> bool:
        """Returns whether the client takes too long to send its first request or the rest of one."""
        # While a response is sent, or reading is paused, the client does not have to hurry.
        if self._waiting_since_s is None or self._on_lost is not None or self.flow.read_paused:
            return False
        in_body = self._receiving and not self._in_head
        limit_s = REQUEST_LIMIT_S if in_body else HEAD_LIMIT_S
        return now_s - self._received_s > SILENT_LIMIT_S or now_s - self._waiting_since_s > limit_s

    def close_late(self) -> None:
        """Disconnect a client that is late, after status 408 where a request has begun to arrive."""
        if self._timed_out or not self._can_refuse():
            self.transport.abort()
            return
        self._timed_out = True
        part, limit_s = ("headers", HEAD_LIMIT_S) if self._in_head else ("headers and body", REQUEST_LIMIT_S)
        message = (
            f"the request's {part} took too long to arrive: the limits are {limit_s:g} s, "
            f"and {SILENT_LIMIT_S:g} s without data"
        )
        self._refuse(b"408 Request Timeout", RequestError(message, status=408, code="request_timeout"))

    def _can_refuse(self) -> bool:
        """Returns whether a response of our own would be the answer to the request that is arriving."""
        if not self._receiving or self.pipeline:
            return False
        if self._in_head:
            return self.cycle is None or self.cycle.response_complete
        return not self.cycle.response_started

    def data_received(self, data: bytes) -> None:
        self._received_s = self.loop.time()
        if self._waiting_since_s is None:
            self._waiting_since_s = self._received_s
        if not self._receiving:
            head, end, body = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head + end) + body
        scope_of_head = self.scope if self._in_head else None
        super().data_received(data)
        if self._in_head and self.scope is scope_of_head:  # all of it belongs to one head, which is not complete yet
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def set_disconnect_callback(self, callback: Callable[[], None] | None) -> None:
        """Set a callback for when the client disconnects. It is called now if that has happened; None removes it."""
        self._on_lost = callback
        if callback is None:
            if self._waiting_since_s is not None:  # for the next request, which could wait until now
                self._waiting_since_s = self._received_s = self.loop.time()
        elif self._lost:
            callback()
        else:
            self.flow.resume_reading()  # paused by a long body: the end of a connection comes after its data

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = self._in_head = True
        self._waiting_since_s = self._waiting_since_s or self._received_s
        self._head_bytes = 0
        self.scope["meltcore.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if self._on_lost is not None and len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn stops reading here; the end of the connection would go unseen

    def on_message_complete(self) -> None:
        self._receiving = False
        self._waiting_since_s = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def _refuse_head(self) -> None:
        error = RequestError(f"the request's headers have more than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
        self._refuse(b"431 Request Header Fields Too Large", error)

    def _refuse(self, status: bytes, error: RequestError) -> None:
        """Send `error` past the application, and disconnect."""
        body = error_json(error)
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n" % status
        self.transport.write(b"%sconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (head, len(body), body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stats.add("connections_closed")
        self._lost = True
        if self._on_lost is not None:
            self._on_lost()
        for table in (self.connections, self.tasks):
            if not table:
                table.clear()  # an emptied set keeps the memory of its largest size


class EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor drains requests before a process ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def tune_gc() -> None:
    """Freeze the objects made while loading, which live as long as the process, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
