"""The models in an API server process, and the route."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from echo_task.messages import Echo, Shout
from meltcore.common.errors import RequestError
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.http.http import while_connected
from meltcore.serve.http.operation import Operation
from meltcore.serve.requests.admission import Unit
from meltcore.serve.requests.backend import other_task
from meltcore.serve.requests.protocol import decode_request
from meltcore.serve.requests.ticket import Child, OpenTickets, Ticket
from meltcore.serve.tasks.exchange import Endpoint, Exchange


class EchoForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of POST /v1/echo."""

    text: str
    model: str | None = None


class _Call(Child):
    """A text at a replica."""

    def __init__(self, ticket: Ticket[Any], text: str) -> None:
        super().__init__(ticket, len(text))
        self.echo: asyncio.Future[Echo] = asyncio.get_running_loop().create_future()
        self._text = text

    def messages(self) -> Sequence[Shout]:
        return [Shout(request_id=self.request_id, text=self._text)]

    def open_ids(self) -> Sequence[str]:
        return [self.request_id]


class EchoBackend(EngineBackend):
    """Sends texts to a replica."""

    purpose = "echoes: POST /v1/echo"
    unit = Unit("echoes", "--max-queue-chars", "max_queue_chars")

    def open(self, text: Any, engine: Any, created: int) -> None:
        super().open(text, engine, created)
        queue = self._new_queue(slots=1)
        self.tickets: OpenTickets[_Call] = OpenTickets(self.stats, self._send, queue, self._limit_s)

    def on_output(self, replica: int, output: Echo) -> None:
        if (call := self.tickets.find(output.request_id, replica)) is not None:
            call.echo.set_result(output)

    async def echo(self, text: str) -> str:
        self._loaded()
        ticket: Ticket[_Call] = Ticket(time.monotonic())
        call = _Call(ticket, text)
        async with self.tickets.admitted(ticket, self.config.priority_class, units=1, cost=1):
            echo = await call.echo
        if echo.finish_reason != "stop":
            raise RequestError(echo.error or "there is no echo", status=500)
        return echo.text

    def model_card(self, name: str) -> dict[str, Any]:
        return self._card(name, self._loaded(), {})


class EchoEndpoint(Endpoint):
    """POST /v1/echo."""

    paths, dwani_paths = ("/v1/echo",), ()
    operations = (Operation("post", "/v1/echo", "Echo a text", EchoForm, example={"text": "hello"}),)

    async def respond(self, exchange: Exchange) -> None:
        body, _ = await exchange.body(self._config.max_body_bytes)
        form = decode_request(body, EchoForm)
        backend = self._models.find(form.model or self._models.default("/v1/echo"))
        if not isinstance(backend, EchoBackend):
            raise other_task(backend)
        exchange.fields["model"] = backend.names[0]
        text = await while_connected(exchange.scope, backend.echo(form.text))
        await exchange.answer(msgspec.json.encode({"text": text}), b"application/json")
