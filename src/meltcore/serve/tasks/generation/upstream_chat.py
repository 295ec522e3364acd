"""Sends prompts to an upstream model, for routes of this server that need an answer of a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
from starlette.types import Message

from meltcore.common.errors import RequestError
from meltcore.serve.requests.backend import LANGUAGE_PATHS
from meltcore.serve.requests.exchange import Exchange, current_exchange
from meltcore.serve.requests.protocol import JsonRequest
from meltcore.serve.upstream.http_backend import HttpBackend

_MAX_ANSWER_BYTES = 8 * 2**20


class _ChatMessage(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _ChatMessage


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Completion).decode


class _NoConnection:
    """Replaces the connection of a client where this process itself reads the answer."""

    def __init__(self) -> None:
        self.transport = self  # whose two methods close the connection
        self._on_lost: Callable[[], None] | None = None

    def set_disconnect_callback(self, callback: Callable[[], None] | None) -> None:
        """Set the function that `close` and `abort` call."""
        self._on_lost = callback

    def close(self) -> None:
        """Call the callback, as the end of a client's connection would."""
        if self._on_lost is not None:
            self._on_lost()

    abort = close


async def _no_body() -> NoReturn:
    raise AssertionError("the body of a chat of ours is known")


async def ask_upstream(backend: HttpBackend, fields: dict[str, Any]) -> tuple[str, int, int]:
    """Return the text of a chat completion, and the numbers of prompt and output tokens. Cancelling ends the work.

    `fields` is the body of the request. Raises the RequestError of the backend, and 502 if the answer is no chat
    completion.
    """
    status, parts, size, encoding = 0, list[bytes](), 0, "identity"

    async def send(message: Message) -> None:
        nonlocal status, size, encoding
        if message["type"] == "http.response.start":
            status = message["status"]
            encoding = dict(message["headers"]).get(b"content-encoding", b"identity").decode("latin-1")
            return
        body = message.get("body", b"")
        size += len(body)
        if size <= _MAX_ANSWER_BYTES:
            parts.append(body)

    scope = {
        "type": "http",
        "headers": [(b"x-request-id", current_exchange().identity.encode()), (b"content-type", b"application/json")],
        "path": LANGUAGE_PATHS[0],
        "meltcore.connection": _NoConnection(),
    }
    exchange = Exchange(scope, _no_body, send)
    outcome = await backend.forward(exchange, msgspec.json.encode(fields), JsonRequest(model=fields["model"]))
    answer, name = b"".join(parts), backend.names[0]
    if outcome.error is not None or size > _MAX_ANSWER_BYTES:
        reason = outcome.error or f"it has more than {_MAX_ANSWER_BYTES} bytes"
        raise RequestError(f"the answer of {name} broke off: {reason}", status=502, code="upstream_failed")
    if encoding.lower() != "identity":
        message = f"{name} answered with Content-Encoding {encoding[:80]!r}, which cannot be read here; send identity"
        raise RequestError(message, status=502, code="upstream_failed")
    if status != 200:
        shown = answer[:300].decode(errors="replace")
        code = status if status in (400, 429, 503, 504) else 502
        raise RequestError(f"{name} answered with status {status}: {shown}", status=code, code="upstream_failed")
    try:
        completion = _decode(answer)
        text = completion.choices[0].message.content or ""
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError) as error:
        message = f"{name} answered with something that is no chat completion: {error}"
        raise RequestError(message, status=502, code="upstream_failed") from error
    usage = completion.usage or _Usage()
    return text, usage.prompt_tokens, usage.completion_tokens
