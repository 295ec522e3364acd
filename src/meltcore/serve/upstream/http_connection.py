"""Keeps an HTTP/1.1 connection to a server alive for one request after another. The bytes of answers are not changed.

It is used for upstream servers and for the admin socket of a fleet, and is built on asyncio and httptools, the parser
of uvicorn. An HTTP client library would wake its reader and allocate for each chunk, and could not say whether a failed
request has reached the server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, cast

import httptools

from meltcore.common.errors import MeltcoreError

# Of an answer that the client has not taken yet. Beyond it the upstream is not read.
MAX_UNREAD_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 4 * 2**20  # of an answer that is read as a whole
FailureKind = Literal["connect", "connect_timeout", "closed", "malformed", "first_byte", "idle", "deadline", "aborted"]


class UpstreamError(MeltcoreError):
    """Reports that an upstream gave no complete answer. `had_bytes` says whether the answer had begun."""

    def __init__(self, kind: FailureKind, message: str, *, had_bytes: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.had_bytes = had_bytes


class UpstreamAnswer(NamedTuple):
    """A complete answer from an upstream."""

    status: int
    content_type: str
    body: bytes


class UpstreamConnection(asyncio.Protocol):
    """Carries one request at a time. After an error or `abort` it cannot be used again."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser: Any = None
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], None] | None = None  # of the rest of a body
        self._error: UpstreamError | None = None
        self._head_bytes = 0
        self._keeps_alive = False
        self._is_framed = False  # by a length or by chunks; else the answer ends with the connection
        self.status = 0  # the next three: from `response_head` on
        self.headers: dict[bytes, bytes] = {}
        self.is_complete = False
        self.has_body = False  # a byte of the body has come
        self.is_open = False
        self.sent_s = 0.0  # loop time of the request
        self.last_byte_s = 0.0  # of the last byte that came, or of the request
        self.idle_since_s = 0.0  # between requests

    # --- use

    def send(self, request: bytes) -> None:
        """Write a request: its head and body."""
        self._parser = httptools.HttpResponseParser(self)
        self._chunks.clear()
        self._unread_bytes = self._head_bytes = self.status = 0
        self.headers = {}
        self.is_complete = self.has_body = self._is_framed = self._keeps_alive = False
        self.sent_s = self.last_byte_s = self._loop.time()
        if self.is_open:
            self._transport.write(request)
        else:
            self._error = self._error or UpstreamError("closed", "it closed the connection")

    async def response_head(self) -> None:
        """Wait for the status and the headers. Raises UpstreamError if the connection fails first."""
        while self.status == 0:
            await self._wait()

    async def read(self) -> bytes:
        """Return the bytes of the body that have arrived, or b"" at the end of the body.

        Raises UpstreamError if the connection fails before the end.
        """
        while not self._chunks:
            if self.is_complete:
                return b""
            await self._wait()
        data = self._take()
        self.resume()
        return data

    async def relay(self, sink: Callable[[bytes], None]) -> None:
        """Pass the rest of the body to `sink`, each part when it is read, without waking a task.

        `sink` may call `pause` to stop the reading until `resume` is called. Raises UpstreamError if the connection
        fails.
        """
        self._sink = sink
        try:
            self.resume()
            if self._chunks:
                sink(self._take())
            while not self.is_complete:
                await self._wait()
        finally:
            self._sink = None

    def pause(self) -> None:
        """Stop reading the body until `resume`. Bytes that were already read are still passed on."""
        if not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue to read the body after `pause`."""
        if self._is_paused:
            self._is_paused = False
            self.last_byte_s = self._loop.time()  # the upstream could not send until now
            if self.is_open:
                self._transport.resume_reading()

    @property
    def is_waiting_for_upstream(self) -> bool:
        """Whether this process waits for bytes of the upstream.

        False while it waits until the client has read earlier bytes.
        """
        return not self.is_complete and not self._chunks and not self._is_paused

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can carry another request."""
        return self.is_open and self.is_complete and self._error is None and self._keeps_alive

    def fail(self, kind: FailureKind, message: str) -> None:
        """Close the connection because of an error.

        Callers that wait for the answer get the bytes that came before, and then an UpstreamError.
        """
        if self._error is None:
            self._error = UpstreamError(kind, message, had_bytes=self.has_begun)
        self.is_open = False
        self._transport.abort()
        self._wake()

    @property
    def has_begun(self) -> bool:
        """Whether a part of the answer has arrived."""
        return self.status != 0 or self._head_bytes > 0

    def abort(self) -> None:
        """Close the connection. The answer is lost."""
        self.fail("aborted", "the request was ended")

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes. Stop reading while the client takes no bytes."""
        if self._parser is None or self.is_complete:
            self.fail("malformed", "it sent bytes without a request")
            return
        self.last_byte_s = self._loop.time()
        if self.status == 0:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail("malformed", "it changed the protocol")
            return
        except httptools.HttpParserError as error:
            self.fail("malformed", f"its answer is not HTTP: {str(error)[:100]}")
            return
        if self.status == 0 and self._head_bytes > MAX_HEAD_BYTES:
            self.fail("malformed", f"the head of its answer has more than {MAX_HEAD_BYTES} bytes")
            return
        if self._sink is not None:
            if self._chunks:
                self._sink(self._take())
            if self.is_complete:
                self._wake()
            return
        if self._unread_bytes > MAX_UNREAD_BYTES and not self.is_complete:
            self.pause()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer.

        An answer without a length or chunks is complete when the connection ends. Any other answer ends with an error.
        """
        self.is_open = False
        if self._error is None and not self.is_complete:
            if self.status and not self._is_framed and exc is None:
                self.is_complete = True
            else:
                reason = f": {exc.strerror or exc}" if isinstance(exc, OSError) else ""
                self._error = UpstreamError("closed", f"it closed the connection{reason}", had_bytes=self.has_begun)
        self._wake()

    # --- httptools

    def on_message_begin(self) -> None:
        """Begin an answer, which may follow an informational answer."""
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header under its name in lower case."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Accept the head of the answer. The head of an informational answer (100 Continue) is ignored."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        self.status = status
        self._is_framed = (
            b"content-length" in self.headers or b"transfer-encoding" in self.headers or status in (204, 304)
        )

    def on_body(self, data: bytes) -> None:
        """Store bytes of the body until they are read."""
        self.has_body = True
        self._chunks.append(data)
        self._unread_bytes += len(data)

    def on_message_complete(self) -> None:
        """End the answer."""
        self.is_complete = self.status != 0
        self._keeps_alive = self._parser.should_keep_alive()  # the parser forgets it after this call

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._unread_bytes = 0
        return data

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def connect(address: tuple[str, int] | str, context: ssl.SSLContext | None, limit_s: float) -> UpstreamConnection:
    """Open a connection to a host and port, or to the path of a Unix socket.

    Raises UpstreamError if this fails, or takes longer than `limit_s` seconds.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            if isinstance(address, str):
                _, connection = await loop.create_unix_connection(UpstreamConnection, address)
            else:
                _, connection = await loop.create_connection(UpstreamConnection, *address, ssl=context)
    except TimeoutError as error:
        raise UpstreamError("connect_timeout", f"it took no connection within {limit_s:g} s") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UpstreamError("connect", f"it cannot be connected to: {reason}") from error
    return connection


async def read_answer(connection: UpstreamConnection) -> UpstreamAnswer:
    """Wait for the complete answer to the sent request, and return it.

    Raises UpstreamError if the connection fails, and for an answer of more than MAX_ANSWER_BYTES.
    """
    await connection.response_head()
    parts, size = [], 0
    while data := await connection.read():
        parts.append(data)
        size += len(data)
        if size > MAX_ANSWER_BYTES:
            raise UpstreamError("malformed", f"its answer has more than {MAX_ANSWER_BYTES} bytes", had_bytes=True)
    content_type = connection.headers.get(b"content-type", b"").decode("latin-1")
    return UpstreamAnswer(connection.status, content_type, b"".join(parts))


async def ask(connecting: Awaitable[UpstreamConnection], request: bytes, limit_s: float) -> UpstreamAnswer:
    """Send one request over a new connection, and return the complete answer.

    Raises UpstreamError if there is no complete answer within `limit_s` seconds.
    """
    connection: UpstreamConnection | None = None
    try:
        async with asyncio.timeout(limit_s):
            connection = await connecting
            connection.send(request)
            return await read_answer(connection)
    except TimeoutError as error:
        raise UpstreamError("first_byte", f"no answer within {limit_s:g} s") from error
    finally:
        if connection is not None:
            connection.abort()
