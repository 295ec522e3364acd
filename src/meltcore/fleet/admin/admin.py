"""Serves the admin requests of a fleet over HTTP, at a Unix socket or a port. `meltcore ps` and `reload` use it.

The socket is in the folder of the server's sockets, which only the user of the server may enter. The port listens on
127.0.0.1 only. Web pages cannot use the port: a request is refused if it has the header Origin, or a Host that is not
this machine.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.fleet.admin.operations import FleetOperations
from meltcore.protocol.sockets import ADMIN_SOCKET
from meltcore.serve.http.http_server import EmbeddedServer
from meltcore.serve.http.origins import host_name, is_loopback
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.upstream.http_connection import UpstreamConnection, UpstreamError, ask, connect

_START_LIMIT_S, _START_POLL_S = 10.0, 0.005
_CLOSE_LIMIT_S = 2.0
_PS_LIMIT_S = 10.0
_CHANGE_LIMIT_S = 3600.0  # of a restart: every model may drain and load


class AdminServer:
    """HTTP server of a fleet's admin API, on the supervisor's event loop."""

    def __init__(
        self,
        operations: FleetOperations,
        metrics: Metrics,
        folder: Path,
        listener: socket.socket | None,
    ) -> None:
        """Prepare the socket in `folder`. `listener` is the socket of the admin port."""
        self._operations = operations
        self._metrics = metrics
        app = Starlette(
            routes=[
                Route("/ps", self._ps, methods=["GET"]),
                Route("/metrics", self._metrics_page, methods=["GET"]),
                Route("/reload", _endpoint(lambda _: operations.reload()), methods=["POST"]),
                Route("/restart", _endpoint(operations.restart), methods=["POST"]),
                Route("/sleep", _endpoint(lambda name: operations.sleep(name or "")), methods=["POST"]),
                Route("/wake_up", _endpoint(lambda name: operations.wake(name or "")), methods=["POST"]),
            ]
        )
        settings: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False, "ws": "none"}
        unix_config = uvicorn.Config(app, uds=str(folder / ADMIN_SOCKET), **settings)
        self._servers: list[tuple[EmbeddedServer, list[socket.socket] | None]] = [(EmbeddedServer(unix_config), None)]
        if listener is not None:
            self._servers.append((EmbeddedServer(uvicorn.Config(app, **settings)), [listener]))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        """Start the server. Raises MeltcoreError if it does not accept requests in time."""
        self._tasks = [asyncio.create_task(server.serve(sockets=sockets)) for server, sockets in self._servers]
        deadline_s = time.monotonic() + _START_LIMIT_S
        while not all(server.started for server, _ in self._servers):
            if time.monotonic() > deadline_s or any(task.done() for task in self._tasks):
                await self.__aexit__()
                raise MeltcoreError(f"the fleet's commands are not answered within {_START_LIMIT_S:g} s of the start")
            await asyncio.sleep(_START_POLL_S)

    async def __aexit__(self, *_error: object) -> None:
        """Stop serving, and end requests in progress."""
        for server, _ in self._servers:
            server.should_exit = server.force_exit = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_LIMIT_S)
        for task in self._tasks:
            task.cancel()

    async def _ps(self, request: Request) -> Response:
        return _refusal(request) or _json(self._operations.rows())

    async def _metrics_page(self, request: Request) -> Response:
        return _refusal(request) or Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


def _refusal(request: Request) -> Response | None:
    if "origin" in request.headers:
        return _json({"error": "web pages may not use the admin port"}, 403)
    host = request.headers.get("host", "localhost")
    if not is_loopback(host_name(host)):
        return _json({"error": f"the header Host is {host!r}; the admin port takes localhost and 127.0.0.1 alone"}, 403)
    return None


def _endpoint(operation: Callable[[str | None], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with the result of `operation` for the model that a request names, if any."""

    async def answer(request: Request) -> Response:
        try:
            return _refusal(request) or _json(await operation(request.query_params.get("model")))
        except MeltcoreError as error:
            return _json({"error": str(error)}, 409)
        except asyncio.CancelledError:  # uvicorn ends its requests when the fleet ends
            return _json({"error": "the fleet is going down"}, 503)

    return answer


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def call_admin(path: str, method: str, route: str, limit_s: float = _PS_LIMIT_S, **query: str) -> Any:
    """Send a request to the fleet whose admin socket is at `path`, and return the answer.

    Ctrl-C ends the wait alone; a line says so once a change has been sent. Raises ConfigError with the fleet's message
    if the fleet refuses the request or does not answer.
    """
    has_connected = False

    async def connect_fleet() -> UpstreamConnection:
        nonlocal has_connected
        connection = await connect(path, None, limit_s)
        has_connected = True  # `ask` sends the request without another wait
        return connection

    target = f"{route}?{urlencode(query)}" if query else route
    request = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
    try:
        answer = asyncio.run(ask(connect_fleet(), request, limit_s))
    except UpstreamError as error:
        raise ConfigError(f"the fleet does not answer at {path}: {error}") from error
    except KeyboardInterrupt:
        if has_connected and method == "POST":
            print("meltcore: the fleet goes on with it; `meltcore ps` shows its models", file=sys.stderr)
        raise
    try:
        content = msgspec.json.decode(answer.body)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the fleet sent no JSON for {route} (status {answer.status})") from error
    if answer.status != HTTPStatus.OK:
        raise ConfigError(str(content["error"]))
    return content


def change_fleet(path: str, route: str, **query: str) -> Any:
    """Send a request to change the fleet whose admin socket is at `path`, and return the answer, as `call_admin`."""
    return call_admin(path, "POST", route, _CHANGE_LIMIT_S, **query)
