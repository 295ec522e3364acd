"""Builds the ASGI application from all routes of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meltcore import __version__
from meltcore.common.errors import EngineDeadError, RequestError
from meltcore.serve.docs import ApiDocs
from meltcore.serve.endpoints import endpoint_types
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.http.gate import RequestGate
from meltcore.serve.http.hops import CIRCLE_CODE, LOOP_STATUS, may_probe, own_name
from meltcore.serve.http.origins import OriginCheck
from meltcore.serve.http.page import ChatPage
from meltcore.serve.http.paths import DOCS_PATHS
from meltcore.serve.requests.asgi import (
    ClientDisconnectedError,
    error_form,
    error_json,
    identity_headers,
    request_id,
    while_connected,
)
from meltcore.serve.requests.backend import (
    LANGUAGE_PATHS,
    SERVING,
    Backend,
    ModelTable,
    other_task,
    reasons_text,
)
from meltcore.serve.requests.exchange import Exchange, current_exchange
from meltcore.serve.requests.keys import ApiKeys
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.protocol import DetokenizeRequest, TokenizeRequest, decode_request
from meltcore.serve.requests.request_fields import shorten
from meltcore.serve.requests.tracing import Tracing
from meltcore.serve.status import Status
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.forwarding import UPSTREAM_PATHS, ForwardingEndpoint, forwarded_paths
from meltcore.serve.tasks.generation.local_engine import LocalEngine, local_engine
from meltcore.settings.fleet_spec import FleetSpec

JSON = b"application/json"
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[Exchange], Awaitable[Any]]


def build_app(
    models: ModelTable,
    config: FleetSpec,
    metrics: Metrics,
    log: Log,
    keys: ApiKeys,
    tracing: Tracing | None = None,
) -> ASGIApp:
    """Return the ASGI application. Its gate checks origins and keys before all routes."""

    def forwarding(own: Endpoint | None) -> ForwardingEndpoint:
        return ForwardingEndpoint(own, models, config, log)

    endpoints: dict[str, Endpoint] = {}
    for each in (kind(models, config, log) for kind in endpoint_types()):
        endpoints |= {path: forwarding(each) if path in forwarded_paths() else each for path in each.paths}
    upstream = dict.fromkeys(UPSTREAM_PATHS, forwarding(None))
    app = _build_starlette(_Handlers(models, config, metrics), config, {**upstream, **endpoints})
    # Starlette's layers would be a fifth of the cost per token.
    allowed_origins = config.server.allowed_origins
    origin_check = OriginCheck(config.server.host, allowed_origins)
    gate = RequestGate(_Shortcut(app, endpoints), keys, log, origin_check, tracing)
    if not allowed_origins:
        return gate
    # Outside of the gate: a browser asks for permission without the key.
    return CORSMiddleware(gate, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])


class _Shortcut:
    """Passes a request that a model answers to its endpoint without Starlette, and any other request to `app`.

    Responses that Starlette makes without a handler, such as a redirect, get a request id too.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is not None:
            return endpoint(scope, receive, send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if all(name != b"x-request-id" for name, _ in headers):
                    message = {**message, "headers": [*headers, *identity_headers(scope["path"], request_id(scope))]}
            await send(message)

        return self._app(scope, receive, send_with_id)


def _build_starlette(
    handlers: _Handlers,
    config: FleetSpec,
    endpoints: Mapping[str, Endpoint],
) -> Starlette:
    docs = ApiDocs()
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        Route("/", ChatPage(), methods=["GET"]),
        *(Route(path, docs, methods=["GET"]) for path in DOCS_PATHS),
        Route("/v1/status", _Endpoint(handlers.status), methods=["GET"]),
        Route("/v1/models", _Endpoint(handlers.models), methods=["GET"]),
        Route("/v1/models/{name:path}", _Endpoint(handlers.model), methods=["GET"]),
        Route("/tokenize", _Endpoint(handlers.tokenize), methods=["POST"]),
        Route("/detokenize", _Endpoint(handlers.detokenize), methods=["POST"]),
        Route("/health", _Endpoint(handlers.health), methods=["GET"]),
        Route("/v1/health", _Endpoint(handlers.dwani_health), methods=["GET"]),
        Route("/live", _Endpoint(handlers.live), methods=["GET"]),
        Route("/metrics", _Endpoint(handlers.metrics, content_type=PROMETHEUS), methods=["GET"]),
    ]
    if config.server.profiling:
        routes.append(Route("/start_profile", _Endpoint(handlers.start_profile), methods=["POST"]))
        routes.append(Route("/stop_profile", _Endpoint(handlers.stop_profile), methods=["POST"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _server_error})


class _Endpoint:
    """Calls a handler, and sends its return value or its error as the answer. The gate has already checked the key."""

    def __init__(self, handler: Handler, *, content_type: bytes = JSON) -> None:
        self._handler = handler
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = current_exchange()
        exchange.scope, exchange.receive, exchange.send = scope, receive, send  # Starlette has added to them
        try:
            result = await self._handler(exchange)
        except RequestError as error:
            await exchange.fail(error)
        except ClientDisconnectedError:
            return
        else:
            body = result if isinstance(result, bytes) else msgspec.json.encode(result)
            await exchange.answer(body, self._content_type)


class _Handlers:
    """Has the handlers of all routes that no model answers."""

    def __init__(self, models: ModelTable, config: FleetSpec, metrics: Metrics) -> None:
        self._models = models
        self._config = config
        self._metrics = metrics
        self._status = Status(models)

    async def health(self, exchange: Exchange) -> dict[str, Any]:
        """Answer "ready" if all models can serve, "degraded" if some can, and status 503 if none can.

        "degraded" names the models that cannot serve or lack a replica. A model that sleeps can serve, because its
        requests wait. The status is 508 if all models wait for the server that sends this request.
        """
        backends = self._models.backends
        problems = {backend.names[0]: backend.health.problem() for backend in backends}
        reasons = {name: problem for name, problem in problems.items() if problem is not None}
        if len(reasons) == len(problems):
            await self._check_circle(exchange.scope)
            message = reasons_text(reasons or {"": "loading: starting"})
            raise RequestError(message, status=503, code="not_ready")
        sleeping = [backend for backend in backends if backend.health.status in ("sleeping", "waking")]
        awake = [backend for backend in backends if backend not in sleeping]
        replicas = sum(backend.stats.replicas for backend in awake)
        num_live = sum(backend.stats.num_serving() for backend in awake)
        answer: dict[str, Any] = {"status": "ready" if num_live == replicas and not reasons else "degraded"}
        if replicas > 1:
            answer["replicas"] = f"{num_live} of {replicas}"
        for backend in awake:
            num_live_replicas = backend.stats.num_serving()
            if num_live_replicas < backend.stats.replicas:
                reasons.setdefault(backend.names[0], f"{num_live_replicas} of {backend.stats.replicas} replicas serve")
        if reasons:
            answer["models"] = reasons
        if sleeping:
            answer["sleeping"] = [backend.names[0] for backend in sleeping]
        return answer

    async def _check_circle(self, scope: Scope) -> None:
        """Raise RequestError (508) if all models wait in a circle.

        In a circle the upstreams of each model wait for a server that this request has passed.
        """
        if not may_probe(scope):
            return
        circles = {backend.names[0]: await backend.health.circle(scope) for backend in self._models.backends}
        found = [f"its model {name} waits for {circle}" for name, circle in circles.items() if circle is not None]
        if found and len(found) == len(circles):
            raise RequestError("; ".join(found), status=LOOP_STATUS, code=CIRCLE_CODE)

    async def dwani_health(self, exchange: Exchange) -> dict[str, str]:
        """Answer a health request in dwani.ai's form."""
        await self.health(exchange)
        return {"status": "healthy", "model": self._models.backends[0].names[0]}

    async def live(self, _exchange: Exchange) -> dict[str, str]:
        return {"status": "live", "version": __version__}

    async def metrics(self, _exchange: Exchange) -> bytes:
        return self._metrics.text()

    async def status(self, _exchange: Exchange) -> dict[str, Any]:
        return await self._status.read()

    async def models(self, _exchange: Exchange) -> dict[str, Any]:
        self._models.check_ready()
        ready = (backend for backend in self._models.backends if backend.health.status in SERVING)
        cards = [_model_card(backend, name) for backend in ready for name in backend.names]
        return {"object": "list", "data": cards, "server": own_name()}

    async def model(self, exchange: Exchange) -> dict[str, Any]:
        name = exchange.scope["path_params"]["name"]
        if not name:  # of /v1/models/, which is the list
            return await self.models(exchange)
        return _model_card(self._models.find(name), name)

    async def tokenize(self, exchange: Exchange) -> dict[str, Any]:
        request = decode_request(await self._body(exchange), TokenizeRequest)
        return await self._language_model(request.model).tokenize(request)

    async def detokenize(self, exchange: Exchange) -> dict[str, Any]:
        request = decode_request(await self._body(exchange), DetokenizeRequest)
        return await self._language_model(request.model).detokenize(request)

    def _language_model(self, name: str | None) -> LocalEngine:
        return local_engine(self._models.find(name or self._models.default(LANGUAGE_PATHS[0])))

    async def start_profile(self, exchange: Exchange) -> dict[str, str]:
        return await while_connected(exchange.scope, self._profile("start"))

    async def stop_profile(self, exchange: Exchange) -> dict[str, str]:
        # Nsight Systems ends the server when the range ends, often before the engine has answered.
        return await while_connected(exchange.scope, self._profile("stop"))

    async def _profile(self, action: Literal["start", "stop"]) -> dict[str, str]:
        """Start or stop a profile of the first model.

        It is a trace in --profile-dir, or the capture range of Nsight Systems.
        """
        profiler = self._config.server.profiler
        directory = "" if profiler == "cuda" else str(self._config.server.profile_dir)
        backend = self._models.find(None)
        if not isinstance(backend, EngineBackend):
            raise other_task(backend)
        try:
            result = await backend.profile(action, directory, profiler)
        except EngineDeadError as error:
            raise RequestError(str(error), status=503, code="engine_dead") from error
        if result.error is not None:
            raise RequestError(f"the profiler could not {action}: {result.error}", status=409)
        return {"path": result.path}

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.body(self._config.limits.max_body_bytes)


def _model_card(backend: Backend, name: str) -> dict[str, Any]:
    """Return the card of a model. `root` is the model's first name. A model that sleeps has its status in the card."""
    status = backend.health.status
    card = backend.model_card(name) | {"root": backend.names[0]}
    return card if status == "ready" else card | {"status": status}


async def _server_error(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception. Starlette raises the exception again for the log."""
    return _error_response(request, RequestError(f"the server failed: {type(error).__name__}", status=500))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors (no such path, wrong method) in the form of the path's API."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {shorten(request.url.path)}: {error.detail}"
    return _error_response(request, RequestError(message, status=error.status_code), error.headers)


def _error_response(request: Request, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    path, identity = request.url.path, request_id(request.scope)
    body = error_json(error, error_form(path), identity)
    response = Response(body, status_code=error.status, media_type="application/json", headers=headers)
    response.raw_headers += identity_headers(path, identity)
    return response
