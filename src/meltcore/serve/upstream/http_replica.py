"""Represents one upstream server: its address, its pool of connections, its circuit breaker and its health."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from starlette.types import Scope

from meltcore.serve.http.hops import CIRCLE_CODE, LOOP_STATUS, own_name, via_lines
from meltcore.serve.upstream.circuit_breaker import CircuitBreaker
from meltcore.serve.upstream.http_connection import UpstreamAnswer, UpstreamConnection, UpstreamError, ask, connect

HEALTH_TIMEOUT_S = 5.0  # also for the answer of a server whose processor is busy
TIMEOUTS_UNTIL_DOWN = 2  # in a row
BREAKER_FAILURES = 5  # in a row, after which a replica gets no requests
BREAKER_OPEN_S = 10.0  # until one request tries the replica again
KEEP_ALIVE_S = 4.0  # of an idle connection; vLLM, SGLang and llama.cpp close theirs after 5 s
ReplicaState = Literal["starting", "up", "down"]


class UpstreamReplica:
    """One server of an upstream model, as one process uses it.

    `index` is the number of the replica within the model.
    """

    def __init__(self, index: int, url: str, connect_timeout_s: float, api_key: str | None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.index = index
        self.url = url
        self.breaker = CircuitBreaker(BREAKER_FAILURES, BREAKER_OPEN_S)
        self.state: ReplicaState = "starting"
        self.reason = "it has not answered yet"
        self.leads_back = False  # its address is one of this server
        self.num_open = 0  # connections that carry a request
        self._connect_timeout_s = connect_timeout_s
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        # Compressed answers would have to be decoded to find their events.
        self._fixed_headers = f" HTTP/1.1\r\nHost: {host}:{self._port}\r\nAccept-Encoding: identity\r\n{key}"
        self._idle: deque[UpstreamConnection] = deque()
        self._health_path = "/health"  # or /v1/models, where a server has no such path
        self._health_timeouts_in_row = 0

    def encode(self, method: str, path: str, body: bytes, content_type: str, headers: str = "") -> bytes:
        """Return the bytes of a request. `headers` has additional headers, each with its line end."""
        length = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self._prefix}{path}{self._fixed_headers}{length}{headers}\r\n".encode("latin-1") + body

    # --- connections

    def idle_connection(self) -> UpstreamConnection | None:
        """Return the most recently used connection that is open and idle, or None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a connection to the server. Raises UpstreamError if the server does not accept it."""
        return await connect((self._host, self._port), self._ssl, self._connect_timeout_s)

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request if it is reusable, or else close it."""
        if connection.is_reusable:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def drop_idle(self, now_s: float) -> None:
        """Close connections that were idle for too long. Remove connections that the server has closed."""
        limit_s = now_s - KEEP_ALIVE_S
        while self._idle and (not self._idle[0].is_open or self._idle[0].idle_since_s <= limit_s):
            self._idle.popleft().abort()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    # --- requests of our own

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, limit_s: float, scope: Scope | None = None
    ) -> UpstreamAnswer:
        """Send a JSON request of this server, and return the complete answer. Raises UpstreamError without an answer.

        `scope` is a request from another server, on whose behalf this server asks, or None.
        """
        request = self.encode(method, path, body, "application/json", via_lines(scope))
        return await ask(self.connect(), request, limit_s)

    async def check_health(self) -> None:
        """Query the health of the server and set `state`. One late answer of a busy server is tolerated."""
        try:
            answer = await self.ask("GET", self._health_path, limit_s=HEALTH_TIMEOUT_S)
            if answer.status == 404 and self._health_path == "/health":
                self._health_path = "/v1/models"
                answer = await self.ask("GET", self._health_path, limit_s=HEALTH_TIMEOUT_S)
        except UpstreamError as error:
            is_late = error.kind in ("first_byte", "connect_timeout")
            self._health_timeouts_in_row = self._health_timeouts_in_row + 1 if is_late else 0
            if not is_late or self._health_timeouts_in_row >= TIMEOUTS_UNTIL_DOWN or self.state == "starting":
                self._set_down(str(error))
            return
        self._health_timeouts_in_row = 0
        self.leads_back = answer.status == LOOP_STATUS or (answer.status == 200 and await self._is_this_server())
        if self.leads_back:
            circle = _circle_of(answer)
            self._set_down(f"it waits in a circle: {circle}" if circle else "its address leads back to this server")
        elif answer.status == 200:
            self.state, self.reason = "up", ""
        else:
            self._set_down(f"{self._health_path} answers with status {answer.status}")

    async def _is_this_server(self) -> bool:
        """Return whether the upstream is this server itself, because its list of models has this server's name.

        This detects a circle through a gateway that drops `Via`.
        """
        try:
            answer = await self.ask("GET", "/v1/models", limit_s=HEALTH_TIMEOUT_S)
        except UpstreamError:
            return False
        return own_name().encode() in answer.body

    async def circle(self, scope: Scope) -> str | None:
        """Return a text that names the upstreams which wait for this server in a circle, or None if there is no circle.

        `scope` is the health request of a server that waits for this one.
        """
        try:
            answer = await self.ask("GET", self._health_path, limit_s=HEALTH_TIMEOUT_S, scope=scope)
        except UpstreamError:
            return None
        if answer.status != LOOP_STATUS:
            return None
        waiting_servers = _circle_of(answer)
        return f"{self.url} ({waiting_servers})" if waiting_servers else f"{self.url}, which waits for it"

    def _set_down(self, reason: str) -> None:
        self.state = "down" if self.state != "starting" else "starting"
        self.reason = reason

    # --- choice

    def problem(self, now_s: float) -> str | None:
        """Return why no request can be sent to this server now, or None if requests can be sent."""
        if self.state != "up":
            return self.reason
        if not self.breaker.allows(now_s):
            return f"it failed {BREAKER_FAILURES} times in a row; it is tried again soon"
        return None


def _circle_of(answer: UpstreamAnswer) -> str:
    """Return the names of the servers for which an upstream waits, as its answer to a health request says.

    Returns "" if the answer names none, because the request has already passed these servers.
    """
    try:
        error = msgspec.json.decode(answer.body, type=_ErrorAnswer).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return error.message if error.code == CIRCLE_CODE else ""


class _Error(msgspec.Struct):
    """The fields of an error that this server reads."""

    message: str = ""
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    """The answer to a failed request."""

    error: _Error
