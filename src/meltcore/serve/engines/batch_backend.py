"""Serves requests whose answer is sent as a whole. A request has one or several messages, each with one result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from meltcore.common.errors import RequestError
from meltcore.protocol.batch import TaskRequest, TaskResult
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.open_tickets import OpenTickets
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.settings.config import PriorityClass

_ERROR_BY_FINISH_REASON = {"deadline": (504, "request_timeout"), "error": (500, None), "abort": (500, None)}


class BatchPart(Child):
    """One message of a request to an engine. `result` is set when the engine has sent its result."""

    ticket: BatchTicket
    result: Any

    def __init__(
        self, ticket: BatchTicket, message: Callable[..., TaskRequest], cost: int, waiting_tokens: int = 0
    ) -> None:
        """Add a message to a request.

        `message` is a function that makes the message from the arguments request_id, priority and arrived_s.
        """
        super().__init__(ticket, cost, waiting_tokens)
        self._message = message

    def messages(self) -> Sequence[TaskRequest]:
        """Return the one message of this part."""
        ticket = self.ticket
        return [self._message(request_id=self.request_id, priority=ticket.priority, arrived_s=ticket.arrived_s)]

    def open_ids(self) -> Sequence[str]:
        """Return the id of the one message of this part."""
        return [self.request_id]


class BatchTicket(Ticket[BatchPart]):
    """One request. Its future is resolved when the last result has arrived."""

    def __init__(self, arrived_s: float) -> None:
        super().__init__(arrived_s)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class BatchTickets(OpenTickets[BatchPart]):
    """Holds the open requests to one model of a batch engine."""

    async def results(
        self, ticket: BatchTicket, default_class: PriorityClass, *, units: float, cost: float
    ) -> list[Any]:
        """Return one result per message, in order. Cancelling the call ends the work in the engines.

        Raises RequestError: 429 if the queue is full, 500 or 503 if an engine fails, and 504 after the time limit.

        Args:
            ticket: the request with its messages.
            default_class: the model's class, for a request that names no class.
            units: waiting units of the request, in the unit of the queue.
            cost: expected work, in the same unit for all requests of a model.
        """
        parts = list(ticket.children)
        if not parts:
            return []
        async with self.admitted(ticket, default_class, units=units, cost=cost):
            await ticket.done
        return [part.result for part in parts]

    def on_output(self, replica: int, output: TaskResult) -> None:
        """Store the result of a message, and resolve the request's future if it was the last result.

        A result from a lost replica is dropped if another replica works on the message.
        """
        part = self.find(output.request_id, replica)
        if part is None or output.finish_reason is None:
            return
        ticket, stats = part.ticket, self._stats
        if output.finish_reason != "stop":
            status, code = _ERROR_BY_FINISH_REASON[output.finish_reason]
            error = RequestError(output.error or "the engine ended the request", status=status, code=code)
            self.close(part, "failed")
            self.end(ticket, error, "failed")
            return
        part.result = output
        stats.add("generation_tokens", output.num_tokens)
        stats.finish(
            "stop",
            prompt_tokens=part.waiting_tokens,
            arrived_s=ticket.arrived_s,
            first_token_s=None,
            now_s=time.monotonic(),
            times=None,
        )
        if output.times is not None:
            stats.histograms["request_queue_time_seconds"].observe(output.times.started_s - output.times.arrived_s)
        self.close(part, "finished")
        if not ticket.open_children:
            ticket.done.set_result(None)


class BatchBackend(EngineBackend):
    """The backend of a model whose answers are sent as a whole. The queue counts `slots` messages for each replica."""

    slots = 64
    tickets: BatchTickets | None = None

    def open(self, text: Any, engine: Any, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        super().open(text, engine, created)
        self.tickets = BatchTickets(self.stats, self._send, self._new_queue(self.slots), self._limit_s)

    def on_output(self, replica: int, output: TaskResult) -> None:
        """Pass a result to the request to which it belongs."""
        if self.tickets is not None:
            self.tickets.on_output(replica, output)

    async def results(self, messages: Sequence[Callable[..., TaskRequest]], costs: Sequence[int], units: float) -> Any:
        """Return one result per message of a request, in order. Cancelling the call ends the work in the engines.

        Raises RequestError: 429 if the queue is full, 500 or 503 if an engine fails, and 504 after the time limit.

        Args:
            messages: functions that make the messages from the arguments request_id, priority and arrived_s.
            costs: cost of each message, by which a replica is chosen.
            units: units of the request, in the unit by which the queue is bounded beside the number of requests.
        """
        self._loaded()
        self._live_replicas()
        assert self.tickets is not None
        ticket = BatchTicket(time.monotonic())
        for message, cost in zip(messages, costs, strict=True):
            BatchPart(ticket, message, cost)
        return await self.tickets.results(ticket, self.config.priority, units=units, cost=sum(costs))
