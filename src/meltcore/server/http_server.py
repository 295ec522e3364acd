"""uvicorn as one front's HTTP server: it is given connections, for the listening socket is the first front's alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meltcore.errors import RequestError
from meltcore.server.counts import Counts
from meltcore.server.http import error_json
from meltcore.server.idle import IdleTrim

KEEP_ALIVE_S = 75
CLOSE_S = 2  # whole seconds: uvicorn's limit for connections to close
SILENT_LIMIT_S = 60.0  # a client that owes us the rest of its request and sends nothing for so long is cut off
SILENT_LOOK_S = 5.0
MAX_HEAD_BYTES = 64 * 1024  # of request line and headers; the last piece that is read may go beyond
MAX_PIPELINED = 16  # requests that a client may send ahead of its answers; more are left unread until then
GC_THRESHOLDS = (50_000, 20, 100)  # young objects are requests; collecting every 700 would pause streams for nothing

# A client that offers HTTP/2 this way (Java's, `curl --http2`) goes on with HTTP/1.1 where nobody takes the offer; the
# parser would take it, and with it the request's body for something else.
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class HttpServer:
    """Serves `app` on the connections it is given."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
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
        self._server = _Uvicorn(self._config)
        self._counts = counts
        self._taking: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Until `stop`, and then until the connections are closed, or CLOSE_S have passed."""
        IdleTrim(self._counts)
        self._drop_silent()
        await self._server.serve(sockets=[])

    def stop(self) -> None:
        self._server.should_exit = True
        # Whoever has not taken the answer by then, or not sent the whole request, is cut off. uvicorn's own way, to
        # cancel what serves them, leaves a traceback of each.
        asyncio.get_running_loop().call_later(CLOSE_S - 0.5, lambda: self._cut_off(self._connections()))

    def _connections(self) -> list[Any]:
        return list(self._server.server_state.connections)

    def _cut_off(self, connections: Iterable[Any]) -> None:
        for connection in connections:
            connection.transport.abort()

    def take(self, connection: socket.socket) -> None:
        """Serve an accepted connection."""
        task = asyncio.create_task(self._take(connection))
        self._taking.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._taken)

    def _drop_silent(self) -> None:
        """Once every few seconds for all connections: a timer each would be one more object for each of them."""
        loop = asyncio.get_running_loop()
        heard_before_s = loop.time() - SILENT_LIMIT_S
        self._cut_off(each for each in self._connections() if each.is_silent(heard_before_s))
        loop.call_later(SILENT_LOOK_S, self._drop_silent)

    def _taken(self, task: asyncio.Task[Any]) -> None:
        self._taking.discard(task)
        if not self._taking:
            self._taking.clear()  # an emptied set keeps the room of all it has held

    async def _take(self, connection: socket.socket) -> None:
        def protocol() -> _Protocol:
            return _Protocol(self._config, self._server.server_state, self._counts)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the client is gone already
            connection.close()
            self._counts.add("connections_closed")


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which the application finds in its scope: to drop the connection of a client that does not
    read, and to be told when one is lost without a task that waits for it. It bounds what uvicorn does not: the size of
    a request's head, and how long a client may take to go on with its request."""

    def __init__(self, config: uvicorn.Config, state: Any, counts: Counts) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._counts = counts
        self._lost = False
        self._on_lost: Callable[[], None] | None = None
        self._heard_s = self.loop.time()
        self._receiving = self._in_head = False  # a request has begun to come; its headers are not complete
        self._head_bytes = 0

    def is_silent(self, heard_before_s: float) -> bool:
        """Whether the client owes us a request, its first or the rest of one, and was last heard before that time."""
        waiting = self._receiving or self.cycle is None
        # While an answer is sent, or reading is paused, the client has nothing to hurry for.
        return waiting and self._on_lost is None and not self.flow.read_paused and self._heard_s < heard_before_s

    def data_received(self, data: bytes) -> None:
        self._heard_s = self.loop.time()
        if not self._receiving:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head + end) + rest
        head_of = self.scope if self._in_head else None
        super().data_received(data)
        if self._in_head and self.scope is head_of:  # all of it was of one head, which is not complete yet
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Call once when the client has gone, now where it has already; None: nobody asks any more."""
        self._on_lost = call
        if call is None:
            return
        if self._lost:
            call()
        else:
            self.flow.resume_reading()  # paused by a long body; the end of a connection comes after what was sent

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = self._in_head = True
        self._head_bytes = 0
        self.scope["meltcore.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if self._on_lost is not None and len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn reads no further; the end of the connection would go unseen

    def on_message_complete(self) -> None:
        self._receiving = False
        super().on_message_complete()

    def _refuse_head(self) -> None:
        error = RequestError(f"the request's headers have more than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
        body = error_json(error)
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
        self.transport.write(b"%sconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (head, len(body), body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._counts.add("connections_closed")
        self._lost = True
        if self._on_lost is not None:
            self._on_lost()
        for table in (self.connections, self.tasks):
            if not table:
                table.clear()  # an emptied set keeps the room of all it has held


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: stopping has to drain the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def calm_collector() -> None:
    """What loading left lives as long as the process: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
