"""uvicorn as one front's HTTP server: it is given connections, for the listening socket is the first front's alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meltcore.server.counts import Counts
from meltcore.server.idle import IdleTrim

KEEP_ALIVE_S = 75
CLOSE_S = 2  # whole seconds: uvicorn's limit for connections to close
GC_THRESHOLDS = (50_000, 20, 100)  # young objects are requests; collecting every 700 would pause streams for nothing


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
        await self._server.serve(sockets=[])

    def stop(self) -> None:
        self._server.should_exit = True

    def take(self, connection: socket.socket) -> None:
        """Serve an accepted connection."""
        task = asyncio.create_task(self._take(connection))
        self._taking.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._taken)

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
    read, and to be told when one is lost without a task that waits for it."""

    def __init__(self, config: uvicorn.Config, state: Any, counts: Counts) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._counts = counts
        self._lost = False
        self._on_lost: Callable[[], None] | None = None

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
        self.scope["meltcore.connection"] = self  # type: ignore[typeddict-unknown-key]

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
