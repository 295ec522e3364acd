"""The base class of most routes: it reads a request, chooses the model, and turns errors into answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.serve.http.operation import Operation
from meltcore.serve.requests.asgi import ClientDisconnectedError
from meltcore.serve.requests.backend import ModelTable, other_task
from meltcore.serve.requests.exchange import Exchange, current_exchange
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.protocol import decode_request
from meltcore.serve.tasks.model_choice import ModelChoice
from meltcore.settings.fleet_spec import FleetSpec

# OpenAI's limit of an upload. A larger --max-body raises it.
MIN_UPLOAD_BYTES = 25 * 2**20
_Form = TypeVar("_Form", bound=msgspec.Struct)


class Endpoint(ABC):
    """Serves a route as a raw ASGI application. If the client disconnects, the work for its request ends.

    Args:
        operations: the entries of the route in /openapi.json.
        paths: the paths of the route, by default the paths of its operations.
        dwani_paths: the paths where errors also have the field `detail`, as in dwani.ai's API.
        has_uploads: whether bodies may be as large as OpenAI's uploads.
        is_by_language: whether the language of a request that names no model decides which model answers.
    """

    operations: Sequence[Operation] = ()
    paths: Collection[str] = ()
    dwani_paths: Collection[str] = ()
    has_uploads = is_by_language = False

    def __init_subclass__(cls) -> None:
        cls.paths = cls.paths or tuple(operation.path for operation in cls.operations)

    def __init__(self, models: ModelTable, config: FleetSpec, log: Log) -> None:
        self._models = models
        self.choices = ModelChoice(models)
        self._config = config
        self._log = log
        self.limit_bytes = max(MIN_UPLOAD_BYTES if self.has_uploads else 0, config.limits.max_body_bytes)  # of a body

    @abstractmethod
    async def respond(self, exchange: Exchange) -> None:
        """Read the request and answer it.

        Raises RequestError if the request cannot be served, and ClientDisconnectedError if the client is gone.
        """

    async def read(self, exchange: Exchange, form: type[_Form]) -> _Form:
        """Read a JSON request as `form`. Raises RequestError (400, 413), ClientDisconnectedError."""
        return decode_request(await exchange.body(self.limit_bytes), form)

    def find_model(self, exchange: Exchange, name: str | None) -> Any:
        """Return the backend of the model that a request names.

        If the request names no model, return the default backend of the path. Raises RequestError: 400 for a model of
        another task, 404, 503.
        """
        path = exchange.scope["path"]
        backend = self._models.find(name or self._models.default(path))
        exchange.fields["model"] = backend.names[0]
        if path not in backend.paths:
            raise other_task(backend)
        return backend

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        exchange = current_exchange()
        exchange.receive, exchange.send = receive, send  # layers between the gate and the route may wrap them
        if scope["path"] in self.dwani_paths:
            exchange.error_form = "dwani"
        return self.serve(exchange)

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request, and write its log line. Only this method turns errors into an answer and a log line."""
        fields = exchange.fields
        fields |= {"model": None, "user": None}
        try:
            self._models.check_ready()
            await self.respond(exchange)
            fields.setdefault("status", 200)
        except RequestError as error:
            fields["model"] = error.model or fields["model"]
            await exchange.fail(error)
        except ClientDisconnectedError:
            fields["status"] = 499
        except Exception as error:  # a fault of ours: the client gets the form it knows, uvicorn reports the error
            await exchange.fail(RequestError(f"the server failed: {type(error).__name__}", status=500))
            raise
        finally:
            fields.setdefault("error", None)
            exchange.write_line(self._log)
