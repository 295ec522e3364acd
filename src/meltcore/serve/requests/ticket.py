"""Represents one request to a model. Its children are the requests to engines that together make the answer.

`open_tickets.py` admits tickets, places their children at replicas and ends them. `fair_queue.py` decides which waiting
ticket is next.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from meltcore.common.errors import RequestError
from meltcore.protocol.engines import ToEngine
from meltcore.serve.requests.exchange import current_exchange
from meltcore.serve.requests.stats import CLASSES
from meltcore.settings.config import PriorityClass

# Within a class requests are served in order of arrival. Each step of OpenAI's field `priority` counts as much time.
PRIORITY_STEP_S = 1.0
MAX_PRIORITY_STEPS = 60  # so a request is overtaken only by those that arrive within this many steps
# These ids are unique among all API server processes, because their requests share the engines. The client's
# x-request-id does not serve for this, because two clients may send the same one.
_child_ids = (f"{os.getpid():x}-{counter}" for counter in itertools.count(1))


class Child:
    """One request to an engine, as a part of a ticket. The statistics count it as one request."""

    __slots__ = ("cost", "replica", "request_id", "ticket", "waiting_tokens")

    def __init__(self, ticket: Ticket[Any], cost: int = 0, waiting_tokens: int = 0) -> None:
        """Add a child to a ticket.

        Args:
            ticket: the request to which the child belongs.
            cost: tokens or other units of work, by which the replica with the least work is chosen.
            waiting_tokens: prompt tokens of the child, which the statistics count until an engine has processed them.
        """
        self.ticket = ticket
        self.request_id = next(_child_ids)
        self.replica: int | None = None  # the replica that works on the child, once the ticket's turn has come
        self.cost = cost
        self.waiting_tokens = waiting_tokens
        ticket.children.append(self)
        ticket.open_children += 1

    @property
    def needs_replica(self) -> bool:
        """Whether the child ends if its replica is lost or the server stops."""
        return True

    @property
    def can_retry(self) -> bool:
        """Whether the client still gets one consistent answer if another replica begins this child again."""
        return True

    def messages(self) -> Sequence[ToEngine]:
        """Return the messages for the child's replica. They are sent again to another replica if the first is lost."""
        return ()

    def open_ids(self) -> Sequence[str]:
        """Return the ids of the messages on which the child's replica is still working."""
        return ()

    def restart(self) -> None:
        """Discard the output of a lost replica, because another replica begins the request again."""


_Child = TypeVar("_Child", bound=Child)


class Ticket(Generic[_Child]):
    """One request to a model, as the queue and the backend see it."""

    def __init__(self, arrived_s: float) -> None:
        """Open a ticket for the current exchange. `arrived_s` is the time.monotonic() at which the request arrived."""
        self.arrived_s = arrived_s
        self.exchange = current_exchange()
        self.children: list[_Child] = []
        self.open_children = 0
        # The queue reads the following fields, which `request_turn` sets.
        self.priority_class: PriorityClass = "standard"
        self.priority = 0  # the priority in messages to engines
        self.units = 0.0  # prompt tokens, characters or seconds of audio that wait with this ticket
        self.cost = 0.0  # the expected work; after the start, the work that is known
        self.admitted_s = self.order_s = 0.0
        self.is_queued = False
        self.charge = 0.0  # the cost that the priority class was charged for this ticket
        self.is_retried = False
        self.error: RequestError | None = None  # the error that has ended the ticket
        self.is_sending = False  # True inside `await send(...)`: the client is not reading
        # The coroutine that serves the ticket waits for `turn` first, and `time_limit` ends it.
        self.turn: asyncio.Future[None] | None = None
        self.time_limit: asyncio.Timeout | None = None

    def request_turn(self, default_class: PriorityClass, *, units: float, cost: float = 1.0, priority: int = 0) -> None:
        """Set the fields by which the queue orders the request.

        Args:
            default_class: the model's class, for a request that names no class.
            units: waiting units of the request, in the unit of the queue.
            cost: expected work, in the same unit for all requests of a model.
            priority: the field of vLLM's API. Within a class, requests with lower values come earlier.
        """
        self.priority_class = self.exchange.class_of(default_class, priority)
        # The engines see the class too: one that can start overtakes what was sent ahead. The queue has decided how
        # much of each class they get, so this starves none.
        self.priority = CLASSES.index(self.priority_class) - 1
        self.units, self.cost = units, cost
        self.admitted_s = time.monotonic()
        self.order_s = self.admitted_s + PRIORITY_STEP_S * max(-MAX_PRIORITY_STEPS, min(MAX_PRIORITY_STEPS, priority))

    def begin(self) -> None:
        """Note that the queue has started the request."""
        if self.turn is not None and not self.turn.done():  # its coroutine may be about to end it
            self.turn.set_result(None)

    def fail(self) -> None:
        """End the coroutine that serves the request. The coroutine raises the ticket's error."""
        if self.time_limit is not None and not self.time_limit.expired():
            self.time_limit.reschedule(asyncio.get_running_loop().time())
