"""One keep-alive HTTP/1.1 connection, and the plain requests made over it (models, health, metrics)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

from meltcore.errors import ConfigError
from meltcore.load.http import HttpError, ResponseParser, ResponseSink


class ConnectError(Exception):
    """No connection came about; `reason` is one of the failure reasons a record keeps."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Target:
    """Where a server listens. `address` is resolved once: 10,000 connects must not ask the resolver 10,000 times."""

    scheme: str
    host: str
    port: int
    address: str
    path: str = ""  # what stands before /v1
    api_key: str | None = field(default=None, repr=False)

    def head(self, method: str, path: str, body_length: int | None = None) -> bytes:
        """Request line and header fields, up to and with the empty line."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body_length is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {body_length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def resolve_target(url: str, api_key: str | None = None) -> Target:
    """Parse `url` (http://host:port, with or without /v1) and resolve its name. Raises ConfigError."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
    except ValueError as error:
        raise ConfigError(f"{url}: not a server address ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"{url}: not a server address; give one like http://127.0.0.1:8000")
    if not (parts.path.isascii() and parts.path.isprintable()) or " " in parts.path:
        raise ConfigError(f"{url}: not a server address: its path holds a space, or no ASCII")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key holds what is no ASCII character, or a line's end")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{url}: cannot resolve the address: {error}") from error
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.scheme, parts.hostname, port, str(found[0][4][0]), path, api_key)


class Exchange(ResponseSink, Protocol):
    """One request's life on a connection. `now_s` is the arrival time of the bytes being decoded, monotonic."""

    now_s: float

    def on_failure(self, reason: str, detail: str) -> None:
        """The response will not come to an end. Called at most once, and never after `on_end`."""


class Connection(asyncio.Protocol):
    """Carries one exchange at a time. A connection that failed or was closed is never used again."""

    __slots__ = ("_exchange", "_parser", "_transport", "open")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: ResponseParser | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Write `request` and hand its response to `exchange`. A closed connection fails the exchange at once."""
        if not self.open or self._transport is None:
            exchange.on_failure("connection closed", "the server closed the idle connection")
            return
        self._exchange = exchange
        self._parser = ResponseParser(exchange)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:
            self.close()  # bytes nobody asked for: the connection is out of step
            return
        exchange.now_s = time.monotonic()
        try:
            parser.feed(data)
        except HttpError as error:
            self.fail("malformed response", str(error))
            return
        if parser.done:
            self._settle(parser)

    def _settle(self, parser: ResponseParser) -> None:
        # on_end may already have sent the next request over this connection: leave that one alone.
        if self._parser is parser:
            self._exchange = self._parser = None
            if not parser.reusable:
                self.close()

    @property
    def reusable(self) -> bool:
        """Whether the next request may go out; an exchange may ask from within `on_end`."""
        return self.open and (self._parser is None or (self._parser.done and self._parser.reusable))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:
            return
        if exc is not None:
            self.fail("connection reset", str(exc) or type(exc).__name__)
            return
        exchange.now_s = time.monotonic()
        try:
            parser.feed_eof()
        except HttpError as error:
            self.fail("connection closed", str(error))
        else:
            self._exchange = self._parser = None

    def fail(self, reason: str, detail: str) -> None:
        """Drop the connection and fail the exchange on it, if there is one."""
        exchange, self._exchange, self._parser = self._exchange, None, None
        self.open = False
        if self._transport is not None:
            self._transport.abort()
        if exchange is not None:
            exchange.now_s = time.monotonic()
            exchange.on_failure(reason, detail)

    def close(self) -> None:
        """Drop the connection without telling the exchange; what is still unread is given up."""
        self._exchange = self._parser = None
        self.open = False
        if self._transport is not None:
            self._transport.abort()


async def connect(target: Target, timeout_s: float) -> Connection:
    """Open one connection. Raises ConnectError with its reason."""
    context = ssl.create_default_context() if target.scheme == "https" else None
    opening = asyncio.get_running_loop().create_connection(
        Connection, target.address, target.port, ssl=context, server_hostname=target.host if context else None
    )
    try:
        _, connection = await asyncio.wait_for(opening, timeout_s)
    except TimeoutError as error:
        raise ConnectError("connect timeout", f"no connection within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise ConnectError("connect refused", f"{target.host}:{target.port} refused the connection") from error
    except OSError as error:
        raise ConnectError("connect failed", str(error)) from error
    return connection


class PlainExchange:
    """Collects one whole response: for control requests, never for measured ones."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.status = 0
        self._parts: list[bytes] = []
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_end(self) -> None:
        if not self.result.done():
            self.result.set_result(b"".join(self._parts))

    def on_failure(self, reason: str, detail: str) -> None:
        if not self.result.done():
            self.result.set_exception(ConnectError(reason, detail))


async def get(target: Target, path: str, timeout_s: float) -> tuple[int, bytes]:
    """GET `path` over a connection of its own: status and body. Raises ConnectError where no answer comes."""
    connection = await connect(target, timeout_s)
    exchange = PlainExchange()
    try:
        connection.send(target.head("GET", path), exchange)
        body = await asyncio.wait_for(exchange.result, timeout_s)
    except TimeoutError as error:
        raise ConnectError("first byte timeout", f"GET {path}: no answer within {timeout_s:g} s") from error
    finally:
        connection.close()
    return exchange.status, body
