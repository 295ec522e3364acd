"""Every route of the server but the two that answer prompts, and the application that joins them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from meltcore import __version__
from meltcore.errors import EngineDeadError, RequestError
from meltcore.server.answer import AnswerEndpoint
from meltcore.server.front import Front
from meltcore.server.http import (
    ClientDisconnectedError,
    check_api_key,
    error_json,
    read_body,
    request_id,
    send_bytes,
    send_error,
)
from meltcore.server.model import Model
from meltcore.server.prompts import chat_prompt, decode, encode_all
from meltcore.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, decode_request

JSON = b"application/json"
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[Scope, Receive], Awaitable[Any]]


def build_app(front: Front) -> ASGIApp:
    """The ASGI application. /health, /live and /metrics need no key: they hold counts and no user's text."""
    answers = {
        "/v1/chat/completions": AnswerEndpoint(front, ChatRequest),
        "/v1/completions": AnswerEndpoint(front, CompletionRequest),
    }
    app = _build_starlette(front, answers)
    # Web pages' requests need Starlette's headers; for all others its layers would be a fifth of the cost of a token.
    return app if front.config.cors_origins else _Shortcut(app, answers)


class _Shortcut:
    """Sends what asks for an answer straight to its endpoint, and all else through `app`."""

    def __init__(self, app: ASGIApp, answers: dict[str, AnswerEndpoint]) -> None:
        self._app = app
        self._answers = answers

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = self._answers.get(scope["path"]) if scope["method"] == "POST" else None
        return self._app(scope, receive, send) if endpoint is None else endpoint(scope, receive, send)


def _build_starlette(front: Front, answers: dict[str, AnswerEndpoint]) -> Starlette:
    pages = _Pages(front)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in answers.items()),
        Route("/v1/models", _Endpoint(front, pages.models), methods=["GET"]),
        Route("/v1/models/{name:path}", _Endpoint(front, pages.model), methods=["GET"]),
        Route("/tokenize", _Endpoint(front, pages.tokenize), methods=["POST"]),
        Route("/detokenize", _Endpoint(front, pages.detokenize), methods=["POST"]),
        Route("/health", _Endpoint(front, pages.health, open=True), methods=["GET"]),
        Route("/live", _Endpoint(front, pages.live, open=True), methods=["GET"]),
        Route("/metrics", _Endpoint(front, pages.metrics, open=True, content_type=PROMETHEUS), methods=["GET"]),
    ]
    if front.config.profile_dir is not None:
        routes.append(Route("/start_profile", _Endpoint(front, pages.start_profile), methods=["POST"]))
        routes.append(Route("/stop_profile", _Endpoint(front, pages.stop_profile), methods=["POST"]))
    middleware = []
    if front.config.cors_origins:
        origins = list(front.config.cors_origins)
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error, Exception: _server_error}
    )


class _Endpoint:
    """A page that is computed at once: checks the key, turns errors into OpenAI's form, encodes the answer."""

    def __init__(self, front: Front, handler: Handler, *, open: bool = False, content_type: bytes = JSON) -> None:
        self._front = front
        self._handler = handler
        self._open = open
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x-request-id", request_id(scope).encode())]
        try:
            if not self._open:
                check_api_key(scope, self._front.config.api_key)
            answer = await self._handler(scope, receive)
        except RequestError as error:
            await send_error(send, error, headers=headers)
        except ClientDisconnectedError:
            return
        else:
            body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
            await send_bytes(send, body, self._content_type, headers=headers)


class _Pages:
    """What the plain routes answer."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def health(self, scope: Scope, receive: Receive) -> dict[str, str]:
        problem = self._front.health.problem()
        if problem is not None:
            raise RequestError(problem, status=503, code="not_ready")
        counts = self._front.counts
        if counts.replicas == 1:
            return {"status": "ready"}
        living = len(counts.living())
        return {
            "status": "ready" if living == counts.replicas else "degraded",
            "replicas": f"{living} of {counts.replicas}",
        }

    async def live(self, scope: Scope, receive: Receive) -> dict[str, str]:
        return {"status": "live", "version": __version__}

    async def metrics(self, scope: Scope, receive: Receive) -> bytes:
        return self._front.metrics.text()

    async def models(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        model = self._front.ready_model(None)
        return {"object": "list", "data": [self._card(model, name) for name in model.names]}

    async def model(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        name = scope["path_params"]["name"]
        return self._card(self._front.ready_model(name), name)

    async def tokenize(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        request = decode_request(await self._body(scope, receive), TokenizeRequest)
        model = self._front.ready_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.messages is not None:
            tokens = await chat_prompt(
                model.text.tokenizer, model.text.template, request.messages, request.chat_template_kwargs
            )
        else:
            text = request.prompt or ""
            (tokens,) = await encode_all(
                model.text.tokenizer, [text], "prompt", add_special_tokens=request.add_special_tokens
            )
        return {"count": len(tokens), "max_model_len": model.engine.max_model_len, "tokens": tokens}

    async def detokenize(self, scope: Scope, receive: Receive) -> dict[str, str]:
        request = decode_request(await self._body(scope, receive), DetokenizeRequest)
        model = self._front.ready_model(request.model)
        return {"prompt": await decode(model.text.tokenizer, request.tokens, model.engine.vocab_size)}

    async def start_profile(self, scope: Scope, receive: Receive) -> dict[str, str]:
        return await self._profile("start")

    async def stop_profile(self, scope: Scope, receive: Receive) -> dict[str, str]:
        return await self._profile("stop")

    async def _profile(self, action: Literal["start", "stop"]) -> dict[str, str]:
        self._front.ready_model(None)
        try:
            done = await self._front.profile(action)
        except EngineDeadError as error:
            raise RequestError(str(error), status=500, code="engine_dead") from error
        if done.error is not None:
            raise RequestError(f"the profiler could not {action}: {done.error}", status=409)
        return {"path": done.path}

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        return await read_body(scope, receive, self._front.config.max_body_bytes)

    def _card(self, model: Model, name: str) -> dict[str, Any]:
        """OpenAI's fields, then what a measurement must know of what it measures."""
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "meltcore",
            "max_model_len": model.engine.max_model_len,
            "weights": model.engine.weights,
            "tokenizer": "synthetic" if model.text.tokenizer.synthetic else "real",
            "device": model.engine.device,
            "dtype": model.engine.dtype,
            "replicas": self._front.config.dp,
            "debug": list(self._front.config.engine.debug),
        }


async def _server_error(request: Request, error: Exception) -> Response:
    """A fault of ours: the client gets the form it knows, and Starlette raises the error on to the log."""
    body = error_json(RequestError(f"the server failed: {type(error).__name__}", status=500))
    return Response(body, status_code=500, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such path, wrong method), in OpenAI's form."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = error_json(RequestError(message, status=error.status_code))
    return Response(body, status_code=error.status_code, media_type="application/json", headers=error.headers)
