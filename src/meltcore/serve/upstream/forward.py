"""Requests for models whose servers answer in bytes of their own: they are passed on as they came, nothing decoded.

An endpoint of this module stands before the one of our own models on the same path. It reads the body, finds the
model's name, and passes the request to its backend, or to the other endpoint.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.serve.http.forms import find_field, is_multipart
from meltcore.serve.http.http import ClientDisconnectedError, Headers, discard_body, read_body, request_id, send_error
from meltcore.serve.requests.backend import Backend, ModelTable
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.request_fields import header, shorten
from meltcore.serve.requests.task_backends import SpeechBackend, SynthesisBackend, TranslationBackend
from meltcore.settings.routes_config import RoutesConfig

# Paths of OpenAI's and vLLM's APIs that no model of ours serves, and foreign servers may.
FOREIGN_PATHS = ("/v1/embeddings", "/v1/rerank", "/v1/responses", "/v1/messages", "/v1/audio/translations")
LANGUAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
FORWARDED_PATHS = (
    *LANGUAGE_PATHS,
    *("/v1/audio/transcriptions", "/v1/audio/speech", "/v1/translate"),
    *FOREIGN_PATHS,
)


class _Fields(msgspec.Struct):
    """What the API needs of a request; the rest is the upstream's to check."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    priority: Any = None


_decode_fields = msgspec.json.Decoder(_Fields).decode


@dataclass(slots=True)
class ForwardedRequest:
    """One request and the way to answer it. is_streamed: its answer is server-sent events."""

    scope: Scope
    send: Send
    path: str
    request_id: str
    arrived_s: float  # time.monotonic()
    body: bytes
    content_type: str
    model: str  # the name that the client used
    is_streamed: bool
    priority: int = 0  # vLLM's field
    first_byte_s: float | None = None  # time.monotonic(), of the body of the answer

    @property
    def headers(self) -> Headers:
        """The headers that every answer of ours has."""
        return [(b"x-request-id", self.request_id.encode())]


class ForwardOutcome(msgspec.Struct):
    """How a request ended, for the log. error: the code of an error of ours; the upstream's have none.

    prompt_tokens, completion_tokens: as the upstream counts them, else its events; None where neither tells.
    """

    status: int
    replica: int | None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@runtime_checkable
class ForwardingBackend(Protocol):
    """A backend whose server answers with bytes that are passed on."""

    names: tuple[str, ...]
    paths: tuple[str, ...]

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""

    async def forward(self, request: ForwardedRequest) -> ForwardOutcome:
        """Send the request on and its answer back. Raises RequestError, in which case nothing was sent back."""


def is_forwarding(backend: object) -> TypeGuard[ForwardingBackend]:
    """Return whether a backend forwards. Of a protocol, isinstance looks at every member: 30 us per request."""
    return hasattr(backend, "forward")


class ForwardingEndpoint:
    """Passes requests of forwarding backends on, and all others to `own`, the endpoint of our own models."""

    def __init__(
        self, own: ASGIApp | None, models: ModelTable, log: Log, limit_bytes: int, routes: RoutesConfig
    ) -> None:
        """Create the endpoint. own: None on a path that no model of ours serves. limit_bytes: of a body."""
        self._own = own
        self._models = models
        self._log = log
        self._limit_bytes = limit_bytes
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if not any(is_forwarding(backend) for backend in self._models.backends):
            await self._answer_own(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            self._models.check_ready()
            body = (await read_body(scope, receive, self._limit_bytes)).removeprefix(codecs.BOM_UTF8)
            content_type = (header(scope, b"content-type") or b"application/json").decode("latin-1")
            fields = read_fields(body, content_type)
            name = None if fields is None else fields.model or self._default(scope["path"])
            named = None if name is None else self._models.get(name)
            if fields is None or not is_forwarding(named):
                if self._own is None:
                    raise self._not_here(fields, name, scope["path"])
                await self._answer_own(scope, _replay(body, receive), send)
                return
            exchange.fields |= {"model": named.names[0], "user": fields.user, "stream": bool(fields.stream)}
            await self._forward(exchange, named, body, content_type, fields)
        except RequestError as error:
            exchange.fields |= {"status": error.status, "error": error.code or error.param}
            await send_error(send, error, headers=exchange.headers)
        except ClientDisconnectedError:
            exchange.fields["status"] = 499
        except Exception as error:  # a fault of ours: the client gets the form it knows, uvicorn reports the error
            failure = RequestError(f"the server failed: {type(error).__name__}", status=500)
            await send_error(send, failure, headers=exchange.headers)
            raise
        seconds = round(time.monotonic() - exchange.arrived_s, 6)
        path = scope["path"]
        self._log.write("request", request_id=exchange.identity, path=path, **exchange.fields, total_s=seconds)

    def _not_here(self, fields: _Fields | None, name: str | None, path: str) -> RequestError:
        if fields is None:
            return RequestError("the body is neither a JSON object nor a form")
        return _not_served(self._models.find(name), path)

    def _default(self, path: str) -> str | None:
        """Return the model of a request that names none. Speech and translation choose theirs by language."""
        has_default = path in LANGUAGE_PATHS or path in FOREIGN_PATHS
        return default_model(self._models, self._routes, path) if has_default else None

    async def _answer_own(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._own is None:
            await discard_body(scope, receive)  # a client that is still sending would lose the answer to a reset
            raise HTTPException(404)
        await self._own(scope, receive, send)

    async def _forward(
        self, exchange: _Exchange, backend: ForwardingBackend, body: bytes, content_type: str, fields: _Fields
    ) -> None:
        path = exchange.scope["path"]
        if path not in backend.paths:
            raise _not_served(backend, path)
        request = ForwardedRequest(
            scope=exchange.scope,
            send=exchange.send,
            path=path,
            request_id=exchange.identity,
            arrived_s=exchange.arrived_s,
            body=body,
            content_type=content_type,
            model=fields.model or "",
            is_streamed=bool(fields.stream),
            priority=fields.priority if isinstance(fields.priority, int) else 0,
        )
        outcome = await backend.forward(request)
        if request.first_byte_s is not None:
            exchange.fields["ttft_s"] = round(request.first_byte_s - exchange.arrived_s, 6)
        exchange.fields |= msgspec.structs.asdict(outcome)


class _Exchange:
    """One request and its answer. `fields` are for the log: no text."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.send = send
        self.arrived_s = time.monotonic()
        self.identity = request_id(scope)
        self.headers: Headers = [(b"x-request-id", self.identity.encode())]
        self.fields: dict[str, Any] = {}


def read_fields(body: bytes, content_type: str) -> _Fields | None:
    """Return the fields that the API needs of a JSON body or a form. None means that it is neither."""
    if is_multipart(content_type):
        place = find_field(body, content_type, "model")
        return _Fields() if place is None else _Fields(body[place].decode(errors="replace"))
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the endpoint of our own models says what is wrong


def routes_of(backend: Backend | ForwardingBackend) -> Sequence[str]:
    """Return the routes for the task of a model."""
    if is_forwarding(backend):
        return backend.paths
    if isinstance(backend, SpeechBackend):
        return ("/v1/audio/transcriptions",)
    if isinstance(backend, SynthesisBackend):
        return ("/v1/audio/speech",)
    is_translation = isinstance(backend, TranslationBackend) and backend.translates
    return ("/v1/translate",) if is_translation else LANGUAGE_PATHS


def default_model(models: ModelTable, routes: RoutesConfig, path: str) -> str | None:
    """Return the model for a request that names none. None means that no model serves `path`.

    It is `chat_model` of the fleet's routes for chats and completions, else the first model that serves the path.
    """
    chat_model = (models.routes or routes).chat_model
    if chat_model is not None and path in LANGUAGE_PATHS:
        return chat_model
    return next((backend.names[0] for backend in models.backends if path in routes_of(backend)), None)


def _not_served(backend: Backend | ForwardingBackend, path: str) -> RequestError:
    routes = ", ".join(routes_of(backend))
    return RequestError(
        f"the model {backend.names[0]} does not serve {shorten(path)}; it serves {routes}", param="model"
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return the `receive` of a request whose body has been read."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
