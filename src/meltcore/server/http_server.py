"""uvicorn as one front's HTTP server: it is given connections, for the listening socket is the first front's alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Iterator
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
        task.add_done_callback(self._taking.discard)

    async def _take(self, connection: socket.socket) -> None:
        def protocol() -> _Protocol:
            return _Protocol(self._config, self._server.server_state, self._counts)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the client is gone already
            connection.close()
            self._counts.add("connections_closed")


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which also lets the application drop a connection whose client does not read."""

    def __init__(self, config: uvicorn.Config, state: Any, counts: Counts) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._counts = counts

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["meltcore.transport"] = self.transport  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._counts.add("connections_closed")


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
