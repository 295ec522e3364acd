"""Implements a keep-alive HTTP/1.1 connection, and single requests that each open their own connection."""

from __future__ import annotations

import asyncio
import inspect
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from meltcore.common.errors import ConfigError
from meltcore.measure.load.wire.http import HttpError, ResponseHandler, ResponseParser

_Result = TypeVar("_Result")

MAX_BODY_BYTES = 64 * 2**20  # of a single request's response; the longest that Meltcore asks for have a few MB


class HttpRequestError(Exception):
    """Reports that a request got no complete response.

    `reason` is the failure reason for records, such as "timeout" or "connect refused".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Target:
    """Describes the address of a server.

    `address` is the resolved host: 10,000 connects must not ask the resolver 10,000 times.
    """

    scheme: str
    host: str
    port: int
    address: str
    path: str = ""  # prefix before /v1
    api_key: str | None = field(default=None, repr=False)

    def encode_head(
        self, method: str, path: str, body_length: int | None = None, content_type: str = "application/json"
    ) -> bytes:
        """Encode request line and header fields, including the empty line."""
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self._host}:{self.port}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body_length is not None:
            lines += [f"Content-Type: {content_type}", f"Content-Length: {body_length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def url(self) -> str:
        """Return the base URL, without `/v1`."""
        return f"{self.scheme}://{self._host}:{self.port}{self.path}"

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_target(url: str, api_key: str | None = None) -> Target:
    """Parse a server address without resolving its host name.

    `url` is like http://host:port, with or without /v1 at its end. Raises ConfigError for a malformed address or key.
    """
    try:
        split_url = urlsplit(url if "://" in url else f"http://{url}")
        host = (split_url.hostname or "").encode("idna").decode()
        port = split_url.port or (443 if split_url.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"{url!r}: not a server address ({error})") from error
    if split_url.scheme not in ("http", "https") or not host or split_url.query:
        raise ConfigError(f"{url!r}: not a server address; give one like http://127.0.0.1:8000")
    if not _is_header_value(host + split_url.path) or " " in host + split_url.path:
        raise ConfigError(f"{url!r}: not a server address: it holds a space or a non-ASCII character")
    if api_key is not None and not _is_header_value(api_key):
        raise ConfigError("the API key holds a non-ASCII or control character")
    path = split_url.path.rstrip("/").removesuffix("/v1")
    return Target(split_url.scheme, host, port, host, path, api_key or None)


def resolve_target(url: str, api_key: str | None = None) -> Target:
    """Parse a server address and resolve its host name.

    Raises ConfigError for a malformed address or key, and for a host that cannot be resolved.
    """
    target = parse_target(url, api_key)
    try:
        addresses = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{url}: cannot resolve the address: {error}") from error
    return replace(target, address=str(addresses[0][4][0]))


def _is_header_value(text: str) -> bool:
    return text.isascii() and text.isprintable()


class HttpConnection(asyncio.Protocol):
    """Carries one request at a time over a TCP connection. After a failure or `close` it cannot be used again."""

    __slots__ = ("_answered", "_handler", "_num_sent", "_parser", "_transport", "is_open")

    def __init__(self) -> None:
        self._num_sent = 0
        self._answered = False  # a byte of the current response came
        self._transport: asyncio.Transport | None = None
        self._handler: ResponseHandler | None = None
        self._parser: ResponseParser | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport that asyncio has opened."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def send(self, request: bytes, handler: ResponseHandler) -> None:
        """Write `request` and pass its response to `handler`. On a closed connection `handler` fails immediately."""
        self._num_sent += 1
        self._answered = False
        if not self.is_open or self._transport is None:
            handler.on_failure("connection closed", "the server closed the idle connection")
            return
        self._handler = handler
        self._parser = ResponseParser(handler)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Decode received bytes and pass them to the handler of the current request."""
        handler, parser = self._handler, self._parser
        if handler is None or parser is None:
            self.close()  # bytes without a request: the connection is out of step
            return
        handler.now_s = time.monotonic()
        self._answered = True
        try:
            parser.feed(data)
        except HttpError as error:
            self.fail("malformed response", str(error))
            return
        if parser.is_done:
            self._finish_request(parser)

    def _finish_request(self, parser: ResponseParser) -> None:
        # on_end may already have sent the next request over this connection: leave that one untouched.
        if self._parser is parser:
            self._handler = self._parser = None
            if not parser.is_reusable:
                self.close()

    @property
    def is_reusable(self) -> bool:
        """Return whether the next request may be sent. The value is also valid inside `on_end`."""
        return self.is_open and (self._parser is None or (self._parser.is_done and self._parser.is_reusable))

    @property
    def is_stale(self) -> bool:
        """Return whether an earlier request was answered and no byte of the current response has arrived."""
        return self._num_sent > 1 and not self._answered

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the current request if its response is not complete. Some responses end by closing the connection."""
        self.is_open = False
        handler, parser = self._handler, self._parser
        if handler is None or parser is None:
            return
        if exc is not None:
            self.fail("connection reset", str(exc) or type(exc).__name__)
            return
        handler.now_s = time.monotonic()
        try:
            parser.feed_eof()
        except HttpError as error:
            self.fail("connection closed", str(error))
        else:
            self._handler = self._parser = None

    def fail(self, reason: str, detail: str) -> None:
        """Drop the connection and fail its current request, if there is one."""
        handler, self._handler, self._parser = self._handler, None, None
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        if handler is not None:
            handler.now_s = time.monotonic()
            handler.on_failure(reason, detail)

    def close(self) -> None:
        """Drop the connection without calling the handler. Bytes that have not been read yet are lost."""
        self._handler = self._parser = None
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


async def connect(target: Target, timeout_s: float) -> HttpConnection:
    """Open one connection to `target`. Raises HttpRequestError if that fails or takes longer than `timeout_s`."""
    ssl_context = ssl.create_default_context() if target.scheme == "https" else None
    new_connection = asyncio.get_running_loop().create_connection(
        HttpConnection,
        target.address,
        target.port,
        ssl=ssl_context,
        server_hostname=target.host if ssl_context else None,
    )
    try:
        async with asyncio.timeout(timeout_s):
            _transport, connection = await new_connection
    except TimeoutError as error:
        raise HttpRequestError("connect timeout", f"no connection within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise HttpRequestError("connect refused", f"{target.host}:{target.port} refused the connection") from error
    except OSError as error:
        raise HttpRequestError("connect failed", error.strerror or str(error)) from error
    return connection


class Response(NamedTuple):
    """Holds one complete response. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class _BufferedResponse:
    """Collects one response of at most MAX_BODY_BYTES. Measured requests do not use this class."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.status_and_headers: tuple[int, dict[str, str]] | None = None
        self._body = bytearray()
        self.future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status_and_headers = status, headers

    def on_body(self, data: bytes) -> None:
        if len(self._body) + len(data) > MAX_BODY_BYTES:
            self.on_failure("malformed response", f"the body is longer than {MAX_BODY_BYTES:,} bytes")
        else:
            self._body += data

    def on_end(self) -> None:
        if not self.future.done() and self.status_and_headers is not None:
            self.future.set_result(Response(*self.status_and_headers, bytes(self._body)))

    def on_failure(self, reason: str, detail: str) -> None:
        if not self.future.done():
            self.future.set_exception(HttpRequestError(reason, detail))


async def request(target: Target, method: str, path: str, body: bytes | None = None, *, timeout_s: float) -> Response:
    """Send one request over a connection of its own and return the response.

    The complete response must arrive within `timeout_s`. Raises HttpRequestError for any failure, with the reason
    "timeout" past this limit.
    """
    deadline_s = time.monotonic() + timeout_s
    connection = await connect(target, timeout_s)
    response = _BufferedResponse()
    try:
        head = target.encode_head(method, path, None if body is None else len(body))
        connection.send(head + (body or b""), response)
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
            return await response.future
    except TimeoutError as error:
        state_text = "no answer" if response.status_and_headers is None else "the answer was not complete"
        raise HttpRequestError("timeout", f"{state_text} within {timeout_s:g} s") from error
    finally:
        connection.close()


async def get(target: Target, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Send a GET request for `path`. Return the status and the body. Raises HttpRequestError without a response."""
    response = await request(target, "GET", path, timeout_s=timeout_s)
    return response.status, response.body


def run_coroutine(
    coroutine: Coroutine[Any, Any, _Result], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> _Result:
    """Run `coroutine` on a new event loop and return its result, as `asyncio.run` does.

    An interrupt that arrives while the loop is being created raises KeyboardInterrupt before the coroutine has started.
    The coroutine is closed then. Otherwise Python would warn on standard error that the coroutine was never awaited.
    An interrupt also raises KeyboardInterrupt if the coroutine ended in spite of it.
    """
    kept = _keep_interrupt(coroutine)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(kept)
    finally:
        for each in (kept, coroutine):
            if inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
                each.close()


async def _keep_interrupt(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `coroutine`, or raise CancelledError if it was cancelled and returned nevertheless.

    A cancellation can get lost where it meets a result or a time limit.
    """
    result = await coroutine
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return result
