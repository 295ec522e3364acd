"""Reads bodies and sends JSON responses and errors as raw ASGI messages."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.serve.requests.request_fields import header, shorten

Headers = list[tuple[bytes, bytes]]
ErrorForm = Literal["openai", "dwani", "anthropic"]  # the API whose form an error has
_Result = TypeVar("_Result")

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "client_closed_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error"}
_MESSAGES_PATH = "/v1/messages"  # Anthropic's
_MAX_COPY_BYTES = 2**20  # on the event loop; bytes.join releases the GIL from here on
_DISCARD_BYTES = 256 * 2**20
_DISCARD_S = 5.0
_MAX_MESSAGE_CHARS = 2048  # of an error: parts of it are what the client sent
_random_bits = random.Random().getrandbits  # noqa: S311 - an id need not be secret, and uuid4 takes 3 us
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")


class ClientDisconnectedError(Exception):
    """Reports that the client disconnected before its request was answered."""


def request_id(scope: Scope) -> str:
    """Return the client's x-request-id if it is a plain token of at most 128 characters. Otherwise return a new id."""
    header_value = header(scope, b"x-request-id")
    return (
        header_value.decode()
        if header_value is not None and _REQUEST_ID.fullmatch(header_value)
        else f"{_random_bits(128):032x}"
    )


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Return the whole request body.

    Raises RequestError: 413 for a body of more than `limit_bytes`, and 415 for a compressed body.
    """
    coding = header(scope, b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"", b"identity"):
        await discard_body(scope, receive)
        text = shorten(coding.decode("latin-1"))
        raise RequestError(f"Content-Encoding {text!r} is not decoded here; send the body as it is", status=415)
    length = header(scope, b"content-length")
    if length is not None and int(length) > limit_bytes:
        await discard_body(scope, receive)
        raise _body_too_large_error(f"{int(length):,} bytes", limit_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body = message.get("body", b"")
        size += len(body)
        if size > limit_bytes:
            await discard_body(scope, receive)
            raise _body_too_large_error(f"more than {limit_bytes:,} bytes", limit_bytes)
        chunks.append(body)
        if not message.get("more_body", False):
            return await join_pieces(chunks)


async def join_pieces(pieces: Sequence[bytes]) -> bytes:
    """Return the pieces of a body as one bytes object.

    Above 1 MiB a thread copies them, and the event loop runs meanwhile.
    """
    if sum(map(len, pieces)) < _MAX_COPY_BYTES:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


async def discard_body(scope: Scope, receive: Receive) -> None:
    """Read the rest of the body within bounds, and drop it.

    Without this a client that is still sending could lose the response to a connection reset. A client that waits to be
    asked for its body (`Expect: 100-continue`) is not asked.
    """
    connection = scope.get("meltcore.connection")
    if connection is not None and connection.holds_body(scope):
        return
    size = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while size < _DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _body_too_large_error(size_text: str, limit_bytes: int) -> RequestError:
    return RequestError(
        f"the body has {size_text}; the limit is {limit_bytes:,} bytes (--max-body, or limits.max_body of a fleet)",
        status=413,
        code="body_too_large",
    )


async def while_connected(scope: Scope, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnectedError."""
    task = asyncio.create_task(work)
    connection = scope["meltcore.connection"]
    connection.set_disconnect_callback(task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        own_task = asyncio.current_task()
        if task.cancelled() and not (own_task is not None and own_task.cancelling()):
            raise ClientDisconnectedError from None
        task.cancel()
        raise
    finally:
        connection.set_disconnect_callback(None)


async def finish_all(work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run coroutines concurrently and return their results.

    The first error ends the other coroutines, and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]


async def finish_batch(field: str, work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return one result per coroutine, in order. `work` has one coroutine per entry of the request's field `field`.

    The first error ends the other coroutines and is raised. It names the entry: "files[2]: ...".
    """

    async def finish(name: str, each: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            return await each
        except RequestError as error:
            message = f"{name}: {error.message}"
            raise RequestError(message, param=name, status=error.status, code=error.code) from error

    return await finish_all(finish(f"{field}[{index}]", each) for index, each in enumerate(work))


def error_form(path: str) -> ErrorForm:
    """Return the API whose form an error at a path has, whether or not there is such a route."""
    return "anthropic" if path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/") else "openai"


def identity_headers(path: str, identity: str) -> Headers:
    """Return the headers of an answer that name its request, as clients of the path's API read them."""
    names = (b"x-request-id", b"request-id") if error_form(path) == "anthropic" else (b"x-request-id",)
    return [(name, identity.encode()) for name in names]


def error_json(error: RequestError, form: ErrorForm = "openai", identity: str | None = None) -> bytes:
    """Return an error in OpenAI's form, with the additional fields of another API's form.

    Anthropic's form has the `identity` of the request, unless it is None.
    """
    error_type = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if form == "anthropic":
        error_type = _ANTHROPIC_TYPES.get(error.status, "api_error" if error_type == "server_error" else error_type)
    message, param = error.message[:_MAX_MESSAGE_CHARS], shorten(error.param)
    error_fields = {"message": message, "type": error_type, "param": param, "code": error.code}
    named = {} if identity is None else {"request_id": identity}
    additional = {"dwani": {"detail": message}, "anthropic": {"type": "error", **named}}.get(form, {})
    return msgspec.json.encode({**additional, "error": error_fields})


async def send_bytes(
    send: Send, body: bytes, content_type: bytes, *, status: int = 200, headers: Headers | None = None
) -> None:
    """Respond with a body whose length is known."""
    all_headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *(headers or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send,
    error: RequestError,
    *,
    headers: Headers | None = None,
    form: ErrorForm = "openai",
    identity: str | None = None,
) -> None:
    """Respond with `error`. Statuses 429 and 503 say when to retry. After a 413 the rest of the body is not read."""
    extra: Headers = list(headers or ())
    if error.status in (429, 503):
        extra.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1))))
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.status == 413:
        extra.append((b"connection", b"close"))
    body = error_json(error, form, identity)
    await send_bytes(send, body, b"application/json", status=error.status, headers=extra)
