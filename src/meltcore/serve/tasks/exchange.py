"""What most routes share: reading a request, streaming an answer, ending both, and the log."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.serve.http.http import (
    ClientDisconnectedError,
    Headers,
    error_json,
    read_body,
    request_id,
    send_bytes,
    send_error,
)
from meltcore.serve.http.operation import Operation
from meltcore.serve.requests.backend import ModelTable, other_task
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.protocol import decode_request
from meltcore.serve.requests.request_fields import header
from meltcore.serve.tasks.model_choice import ModelChoice
from meltcore.settings.server_config import ServerConfig

# OpenAI's limit of an upload. A larger --max-body raises it.
MIN_UPLOAD_BYTES = 25 * 2**20
EVENTS = b"text/event-stream; charset=utf-8"
_Form = TypeVar("_Form", bound=msgspec.Struct)


class Exchange:
    """One request and its answer. `fields` are for the log, and contain neither text nor audio."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, has_detail: bool = False) -> None:
        """Begin an exchange. With `has_detail` errors also have the field of dwani.ai's form."""
        self.scope = scope
        self._has_detail = has_detail
        self.arrived_s = time.monotonic()
        self.identity = request_id(scope)
        self.fields: dict[str, Any] = {"model": None, "user": None}
        self.content_type: bytes | None = None  # of an answer that has begun
        # Of a request that is passed on: to an upstream server, or to another endpoint, which then writes the log line.
        self.passed_body, self.passed_type, self.is_left = b"", "", False
        self.receive = receive
        self.send = send
        self.headers: Headers = [(b"x-request-id", self.identity.encode())]

    @property
    def query(self) -> dict[str, str]:
        """The fields of the URL."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    async def body(self, limit_bytes: int) -> tuple[bytes, str | None]:
        """Return the body and its content type. Raises RequestError (413), ClientDisconnectedError."""
        body = await read_body(self.scope, self.receive, limit_bytes)
        content_type = header(self.scope, b"content-type")
        return body, None if content_type is None else content_type.decode("latin-1")

    async def answer(self, body: bytes, content_type: bytes) -> None:
        """Send a complete answer."""
        self.content_type = content_type
        await send_bytes(self.send, body, content_type, headers=self.headers)

    async def answer_json(self, value: Any) -> None:
        """Send a complete answer in JSON."""
        await self.answer(msgspec.json.encode(value), b"application/json")

    async def stream(self, data: bytes, content_type: bytes) -> None:
        """Send the next part of an answer whose length is unknown. If the client is slow, the caller waits."""
        if self.content_type is None:
            self.content_type = content_type
            headers = [(b"content-type", content_type), *self.headers]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def event(self, event: dict[str, Any]) -> None:
        """Send a server-sent event."""
        await self.stream(b"data: " + msgspec.json.encode(event) + b"\n\n", EVENTS)

    async def end(self) -> None:
        """End a streamed answer."""
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: RequestError) -> None:
        """Report an error as the answer, as an event, or by breaking off an answer that has begun."""
        if self.content_type is None:
            await send_error(self.send, error, headers=self.headers, has_detail=self._has_detail)
        elif self.content_type is EVENTS:
            await self.stream(b"data: " + error_json(error) + b"\n\n", EVENTS)
            await self.end()
        else:  # without its last chunk the answer is incomplete, which HTTP clients report
            self.scope["meltcore.connection"].transport.abort()


class Endpoint(ABC):
    """A route as a raw ASGI application. If the client disconnects, the work for its request ends.

    Args:
        operations: the entries of the route in /openapi.json.
        paths: the paths where the route answers, by default the paths of its operations.
        dwani_paths: the paths where errors also have the field of dwani.ai's form.
        has_uploads: whether bodies may be as large as OpenAI's uploads.
    """

    operations: Sequence[Operation] = ()
    paths: Collection[str] = ()
    dwani_paths: Collection[str] = ()
    has_uploads = False

    def __init_subclass__(cls) -> None:
        cls.paths = cls.paths or tuple(operation.path for operation in cls.operations)

    def __init__(self, models: ModelTable, config: ServerConfig, log: Log) -> None:
        self._models = models
        self.choices = ModelChoice(models)
        self._config = config
        self._log = log

    @property
    def limit_bytes(self) -> int:
        """The limit of a body in bytes."""
        return max(MIN_UPLOAD_BYTES if self.has_uploads else 0, self._config.limits.max_body_bytes)

    @abstractmethod
    async def respond(self, exchange: Exchange) -> None:
        """Read the request and answer it. Raises RequestError, ClientDisconnectedError."""

    async def read(self, exchange: Exchange, form: type[_Form]) -> _Form:
        """Read a JSON request as `form`. Raises RequestError (400, 413), ClientDisconnectedError."""
        body, _ = await exchange.body(self.limit_bytes)
        return decode_request(body, form)

    def find_model(self, exchange: Exchange, name: str | None) -> Any:
        """Return the backend of the model that a request names.

        Without a name, return the backend of the path's default. Raises RequestError: 400 for a model of another task,
        404, 503.
        """
        path = exchange.scope["path"]
        backend = self._models.find(name or self._models.default(path))
        if path not in backend.paths:
            raise other_task(backend)
        exchange.fields["model"] = backend.names[0]
        return backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self.serve(Exchange(scope, receive, send, has_detail=scope["path"] in self.dwani_paths))

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request, and write its log line. Only this method turns errors into an answer and a log line."""
        fields = exchange.fields
        try:
            self._models.check_ready()
            await self.respond(exchange)
            fields.setdefault("status", 200)
        except RequestError as error:
            fields |= {"status": error.status, "error": error.code or error.param}
            await exchange.fail(error)
        except ClientDisconnectedError:
            fields["status"] = 499
        except Exception as error:  # a fault of ours: the client gets the form it knows, uvicorn reports the error
            fields["status"] = 500
            await exchange.fail(RequestError(f"the server failed: {type(error).__name__}", status=500))
            raise
        finally:
            if not exchange.is_left:
                fields.setdefault("error", None)
                self._log.write(
                    "request",
                    request_id=exchange.identity,
                    path=exchange.scope["path"],
                    **fields,
                    total_s=round(time.monotonic() - exchange.arrived_s, 6),
                )
