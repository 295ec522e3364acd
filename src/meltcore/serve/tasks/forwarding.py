"""Forwards requests to upstream servers, and their answers to clients, without decoding either.

On a path that can be forwarded, an endpoint of this module replaces the endpoint of Meltcore's own models. It reads the
body and finds the model's name. Then it passes the request to the backend of an upstream model, or to the replaced
endpoint.
"""

from __future__ import annotations

import codecs
from collections.abc import Awaitable
from typing import NoReturn

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.common.tasks import tasks
from meltcore.serve.http.forms import find_field, is_multipart
from meltcore.serve.requests.asgi import discard_body
from meltcore.serve.requests.backend import Backend, ModelTable
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.protocol import JsonRequest
from meltcore.serve.requests.request_fields import shorten
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.upstream.http_backend import HttpBackend
from meltcore.settings.fleet_spec import FleetSpec

# Paths of OpenAI's and Anthropic's APIs that belong to no task, and that upstream servers may serve.
UPSTREAM_PATHS = ("/v1/responses", "/v1/messages", "/v1/audio/translations")


def forwarded_paths() -> tuple[str, ...]:
    """Return the paths whose requests may be forwarded to upstream servers."""
    return (*(path for task in tasks().values() for path in task.paths), *UPSTREAM_PATHS)


_decode_request = msgspec.json.Decoder(JsonRequest).decode


class ForwardingEndpoint(Endpoint):
    """Passes a request to a forwarding backend, or to `own`, the endpoint of Meltcore's own models."""

    def __init__(self, own: Endpoint | None, models: ModelTable, config: FleetSpec, log: Log) -> None:
        """Create the endpoint. `own` is None if no model of Meltcore's own serves the path."""
        super().__init__(models, config, log)
        self._own = own
        if own is not None:
            self.limit_bytes, self.dwani_paths = own.limit_bytes, own.dwani_paths

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        if any(isinstance(backend, HttpBackend) for backend in self._models.backends):
            return super().__call__(scope, receive, send)
        return _not_found(scope, receive) if self._own is None else self._own(scope, receive, send)

    async def respond(self, exchange: Exchange) -> None:
        """Forward a request, or let `own` answer it.

        Raises RequestError if the request fails, and ClientDisconnectedError if its client is gone.
        """
        path = exchange.scope["path"]
        body = (await exchange.body(self.limit_bytes)).removeprefix(codecs.BOM_UTF8)
        request = read_request(body, exchange.body_type)
        name = None if request is None else request.model or self._default(path)
        backend = None if name is None else self._models.get(name)
        if request is None or not isinstance(backend, HttpBackend):
            if self._own is None:
                raise self._not_here(request, name, path)
            exchange.buffered_body = body
            await self._own.respond(exchange)
            return
        exchange.fields |= {"model": backend.names[0], "user": request.user, "stream": bool(request.stream)}
        if path not in backend.paths:
            raise _not_served(backend, path)
        exchange.fields |= msgspec.structs.asdict(await backend.forward(exchange, body, request))

    def _default(self, path: str) -> str | None:
        """Return the model of a request that names none. Returns None if the language of the request decides later."""
        return None if self._own is not None and self._own.is_by_language else self._models.default(path)

    def _not_here(self, request: JsonRequest | None, name: str | None, path: str) -> RequestError:
        if request is None:
            return RequestError("the body is neither a JSON object nor a form")
        return _not_served(self._models.find(name), path)


async def _not_found(scope: Scope, receive: Receive) -> NoReturn:
    await discard_body(scope, receive)  # a client that is still sending would lose the answer to a reset
    raise HTTPException(404)


def read_request(body: bytes, content_type: str) -> JsonRequest | None:
    """Return the few fields of a body that the server itself needs. Returns None if the body cannot be decoded."""
    if is_multipart(content_type):
        place = find_field(body, content_type, "model")
        return JsonRequest() if place is None else JsonRequest(model=body[place].decode(errors="replace"))
    try:
        return _decode_request(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the endpoint of our own models says what is wrong


def _not_served(backend: Backend, path: str) -> RequestError:
    routes = ", ".join(backend.paths)
    return RequestError(
        f"the model {backend.names[0]} does not serve {shorten(path)}; it serves {routes}", param="model"
    )
