"""The models in an API server process, and the route."""

from functools import partial

import msgspec

from echo_task.messages import Shout
from meltcore.serve.engines.batch_backend import BatchBackend
from meltcore.serve.http.operation import Operation
from meltcore.serve.requests.admission import Unit
from meltcore.serve.requests.asgi import while_connected
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.tasks.endpoint import Endpoint


class EchoForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of POST /v1/echo."""

    text: str
    model: str | None = None


class EchoBackend(BatchBackend):
    """Sends texts to a replica, one at a time."""

    purpose, slots = "echoes: POST /v1/echo", 1
    unit = Unit("echoes", "--max-queue-chars", "max_queue_chars")


class EchoEndpoint(Endpoint):
    """POST /v1/echo."""

    operations = (Operation("post", "/v1/echo", "Echo a text", EchoForm, example={"text": "hello"}),)

    async def respond(self, exchange: Exchange) -> None:
        form = await self.read(exchange, EchoForm)
        backend: EchoBackend = self.find_model(exchange, form.model)
        work = backend.results([partial(Shout, text=form.text)], [len(form.text)], units=1)
        (echo,) = await while_connected(exchange.scope, work)
        await exchange.answer_json({"text": echo.text})
