"""Sends responses: head and body in one write, refusals, and responses to clients of HTTP/1.0."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from meltcore.common.errors import RequestError
from meltcore.serve.requests.asgi import error_form, identity_headers, request_id, send_error
from meltcore.serve.requests.request_fields import header, shorten


class JoinedWrites:
    """Wraps a transport, and writes the head of a response together with the body that follows.

    uvicorn writes head and body separately. These are two system calls, and two TCP segments, each of which wakes the
    client.
    """

    __slots__ = ("_response_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._response_head = b""

    def write(self, data: bytes) -> None:
        """Write bytes, preceded by the stored head.

        If the bytes are a head other than 100 Continue, store them instead.
        """
        if self._response_head:
            data, self._response_head = self._response_head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._response_head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write the stored head of a response without a body, which answers HEAD."""
        if self._response_head:
            self.write(b"")

    def close(self) -> None:
        """Write the stored bytes, and close the transport."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def head_problem(scope: Scope) -> RequestError | None:
    """Return the error for a request whose headers this server cannot follow, or None if it can follow them."""
    num_hosts = 0
    for name, value in scope["headers"]:
        if name == b"host":
            num_hosts += 1
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            coding = shorten(value.decode("latin-1"))
            return RequestError(f"Transfer-Encoding {coding!r} is not known here; send chunked", status=501)
        elif name == b"expect" and value.lower() != b"100-continue" and scope["http_version"] == "1.1":
            expectation = shorten(value.decode("latin-1"))
            return RequestError(f"Expect: {expectation!r} cannot be met; only 100-continue is known", status=417)
    if num_hosts > 1 or (num_hosts == 0 and scope["http_version"] == "1.1"):  # RFC 9112, 3.2
        return RequestError(f"a request has one header Host; this one has {num_hosts or 'none'}")
    return None


class Refusal:
    """Answers every request with one error, and closes the connection. It is an ASGI application."""

    def __init__(self, error: RequestError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the error."""
        path, identity = scope["path"], request_id(scope)
        headers = [*identity_headers(path, identity), (b"connection", b"close")]
        await send_error(send, self._error, headers=headers, form=error_form(path), identity=identity)


class ResponseBeforeBody:
    """Runs an application for a client that waits to be asked for its body (`Expect: 100-continue`).

    uvicorn asks for the body when the application reads it. If the application responds without reading, the connection
    is closed after the response. Otherwise the server could not know whether the next bytes are the body or another
    request.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. Close the connection after its response if the body was not asked for."""

        async def send_and_close(message: Message) -> None:
            if self._cycle.waiting_for_100_continue:
                self._cycle.keep_alive = False
            await send(message)

        await self._app(scope, receive, send_and_close)


class ResponseOfHttp10:
    """Runs an application for a client of HTTP/1.0, which knows neither chunk sizes nor 100 Continue (RFC 9112, 6.1).

    A response without a length ends with the connection. After a response with a length the connection stays open if
    the client has sent `Connection: keep-alive`.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        cycle.chunked_encoding = False
        cycle.waiting_for_100_continue = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and send its body without chunk sizes."""
        cycle = self._cycle
        options = (header(scope, b"connection") or b"").lower().split(b",")
        cycle.keep_alive = b"keep-alive" in (option.strip() for option in options)

        async def send_without_chunks(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                names = {name for name, _ in headers}
                cycle.keep_alive &= b"content-length" in names and b"connection" not in names
                if cycle.keep_alive:
                    message = {**message, "headers": [*headers, (b"connection", b"keep-alive")]}
            else:  # uvicorn compares what is sent with the length that it has read in the head
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_without_chunks)
