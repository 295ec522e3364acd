"""Runs uvicorn as the HTTP server of one process.

The supervisor has the listening socket, and passes connections on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from meltcore.common.host_memory import trim_memory
from meltcore.serve.http.http_protocol import HEAD_LIMIT_S, HttpProtocol
from meltcore.serve.http.tls import TlsCertificate
from meltcore.serve.requests.stats import ServerStats

KEEP_ALIVE_S = 75
CLOSE_S = 2  # whole seconds: uvicorn's limit for connections to close
LATE_CHECK_S = 5.0
GC_THRESHOLDS = (50_000, 20, 100)  # young objects are requests: a collection every 700 would only pause streams
IDLE_CHECK_S = 1.0
LAG_CHECK_S = 0.05
MIN_EVENTS = 256  # requests and ends of connections; what fewer leave behind is not worth a walk through the heap


class HttpServer:
    """Serves `app` on the connections it is given."""

    def __init__(self, app: ASGIApp, stats: ServerStats, certificate: TlsCertificate | None = None) -> None:
        """Create the server. It serves https if it has a certificate."""
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            http=HttpProtocol,
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
        self._certificate = certificate
        self._connection_tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Serve requests until `stop` is called. Then wait until the connections are closed, at most CLOSE_S."""
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
        self._connection_tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._forget_task)

    def _connections(self) -> list[Any]:
        return list(self._server.server_state.connections)

    def _disconnect_all(self) -> None:
        _abort(self._connections())

    def _disconnect_late(self) -> None:
        """Disconnect late clients every few seconds.

        One timer serves all connections, to save an object per connection.
        """
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in self._connections():
            if connection.is_late(now_s):
                connection.close_late()
        loop.call_later(LATE_CHECK_S, self._disconnect_late)

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._connection_tasks.discard(task)
        if not self._connection_tasks:
            self._connection_tasks.clear()  # an emptied set keeps the memory of its largest size

    async def _connect(self, connection: socket.socket) -> None:
        def protocol() -> HttpProtocol:
            return HttpProtocol(self._config, self._server.server_state, self._stats)

        tls: dict[str, Any] = {}
        if self._certificate is not None:
            tls = {
                "ssl": self._certificate.context(),
                "ssl_handshake_timeout": HEAD_LIMIT_S,
                "ssl_shutdown_timeout": CLOSE_S,
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection, **tls)
        except OSError:  # the client is gone already, does not trust the certificate, or speaks no TLS
            connection.close()
            self._stats.add("connections_closed")


def _abort(connections: Iterable[Any]) -> None:
    for connection in connections:
        connection.transport.abort()


class IdleTrim:
    """Returns memory to the operating system when a burst of requests has ended.

    Without this the allocator would keep the memory for a later burst.
    """

    def __init__(self, stats: ServerStats) -> None:
        self._stats = stats
        self._seen_events = 0.0
        self._trimmed_events = 0.0
        asyncio.get_running_loop().call_later(IDLE_CHECK_S, self._check)

    def _check(self) -> None:
        events = self._stats.events()
        is_idle = events == self._seen_events and self._stats.is_idle()
        self._seen_events = events
        if is_idle and events >= self._trimmed_events + MIN_EVENTS:
            self._trimmed_events = events
            trim_memory()
        asyncio.get_running_loop().call_later(IDLE_CHECK_S, self._check)


class _LagWatch:
    """Measures how many seconds late a timer runs.

    All other events of the event loop are delayed by about this time.
    """

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


class EmbeddedServer(uvicorn.Server):
    """Runs uvicorn without its signal handlers, because the supervisor drains requests before a process ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers unchanged."""
        yield


def tune_gc() -> None:
    """Exclude the objects made while loading from garbage collection, and collect less often from now on.

    Those excluded before are collected first: what a removed model had would else be kept, with its descriptors.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
