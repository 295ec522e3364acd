"""Runs requests to one model from admission to their end, for all tasks.

The queue starts all children of a ticket at the ticket's turn. The children of a lost replica are sent to another
replica once. Each child is counted and ended exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Literal, TypeVar

from meltcore.common.errors import RequestError
from meltcore.protocol.engines import ToEngine
from meltcore.protocol.shell import AbortRequests
from meltcore.serve.requests.admission import MODEL_ASLEEP
from meltcore.serve.requests.request_queue import RequestQueue
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.settings.config import PriorityClass

Outcome = Literal["finished", "aborted", "failed"]
TIME_CHECK_S = 1.0
MIN_TIME_CHECKS = 20  # within the limit: a request ends at most a twentieth of it late
_Child = TypeVar("_Child", bound=Child)
_Ticket = TypeVar("_Ticket", bound=Ticket[Any])


class OpenTickets(Generic[_Child]):
    """Holds the tickets of one model that are open in this process. Children are found by their id."""

    def __init__(
        self, stats: ModelStats, send: Callable[[ToEngine, int], None], queue: RequestQueue, limit_s: float
    ) -> None:
        """Create an empty table.

        Args:
            stats: statistics of the model.
            send: `send(message, replica)` sends a message to an engine.
            queue: queue of the model.
            limit_s: the server's time limit for a request, in seconds.
        """
        self._stats = stats
        self._send = send
        self._queue = queue
        queue.accept, queue.start = self.accept, self.start
        self.limit_s = limit_s
        self._open: dict[str, _Child] = {}

    def __len__(self) -> int:
        """Return the number of open children."""
        return len(self._open)

    def __iter__(self) -> Iterator[_Child]:
        """Iterate over the open children."""
        return iter(self._open.values())

    def find(self, request_id: str, replica: int) -> _Child | None:
        """Return the open child with this id if `replica` works on it.

        Returns None for the late output of a lost replica, when another replica works on the child.
        """
        child = self._open.get(request_id)
        return child if child is not None and child.replica == replica else None

    # --- from the admission to a replica

    def admit(
        self, ticket: Ticket[_Child], default_class: PriorityClass, *, units: float, cost: float, priority: int = 0
    ) -> None:
        """Start a request now or when its turn in the queue comes. If it is refused, raise RequestError (429, 503).

        A refused request is not counted. The parameters after `ticket` are those of `Ticket.request_turn`.
        """
        ticket.request_turn(default_class, units=units, cost=cost, priority=priority)
        self._queue.admit(ticket)

    def accept(self, ticket: Ticket[_Child]) -> None:
        """Count every child of a request as in flight. Each child will be ended once."""
        for child in ticket.children:
            self._open[child.request_id] = child
            self._stats.add("waiting_prompt_tokens", child.waiting_tokens)
        self._stats.add("accepted", len(ticket.children))
        self._stats.set_in_flight(len(self._open))

    def start(self, ticket: Ticket[_Child]) -> None:
        """Send each child to the living replica with the least work.

        If no replica lives, the first replica gets the child. A message that this replica has died will arrive soon,
        and ends the request.
        """
        for child in ticket.children:
            self.place(child, min(self._stats.live_replicas() or [0], key=self._stats.open_tokens))
        ticket.begin()

    def place(self, child: _Child, replica: int) -> None:
        """Assign a child to a replica in the statistics, and send its messages to this replica."""
        child.replica = replica
        self._stats.assign(child.replica, child.cost)
        for message in child.messages():
            self._send(message, child.replica)

    def leave(self, child: _Child) -> None:
        """Remove a child from the statistics of its replica."""
        if child.replica is not None:
            self._stats.unassign(child.replica, child.cost)
            child.replica = None

    def send(self, child: _Child, message: ToEngine) -> None:
        """Send one more message of a child to its replica. Raises RequestError if the ticket has ended."""
        if child.ticket.error is not None:
            raise child.ticket.error
        assert child.replica is not None
        self._send(message, child.replica)

    @asynccontextmanager
    async def admitted(
        self, ticket: Ticket[_Child], default_class: PriorityClass, *, units: float, cost: float
    ) -> AsyncIterator[None]:
        """Wait for a request's turn before the block. After the block, end the children that are still open.

        If the ticket fails during the block, the block ends with the error. Raises RequestError: 429 if the queue is
        full, 503 while the model cannot serve, and 504 after the time limit.
        """
        turn = ticket.turn = asyncio.get_running_loop().create_future()
        self.admit(ticket, default_class, units=units, cost=cost)
        left_s = ticket.arrived_s + ticket.exchange.limit_s(self.limit_s) - time.monotonic()
        outcome: Outcome = "aborted"
        try:
            async with asyncio.timeout(left_s) as ticket.time_limit:
                await turn
                yield
            if ticket.error is not None:  # it came too late to end the block
                raise ticket.error
            outcome = "finished"
        except TimeoutError as error:
            raise ticket.error or self.overdue(ticket) from error
        except RequestError as error:
            if error.status >= 500 and error.status != 504 and error.code != MODEL_ASLEEP:
                outcome = "failed"
            raise
        finally:
            self._drop(ticket, outcome)
            ticket.children.clear()  # they refer to it: a cycle would keep both until the next collection

    def overdue(self, ticket: Ticket[_Child]) -> RequestError:
        """Return the error for a request that exceeds its time limit."""
        if ticket.is_queued:
            self._stats.add(f"refused_deadline/{ticket.priority_class}")
        return ticket.exchange.overdue(self.limit_s)

    # --- the loss of a replica

    def retry(self, replica: int, others: Sequence[int]) -> None:
        """Send each request of a lost replica to one of the replicas `others`, if its client has received nothing yet.

        A request is retried only once.
        """
        lost: dict[Ticket[_Child], list[_Child]] = {}
        for child in self._open.values():
            ticket = child.ticket
            if child.replica == replica and child.can_retry and not ticket.is_retried:
                lost.setdefault(ticket, []).append(child)
        for ticket, children in lost.items():
            ticket.is_retried = True
            ticket.exchange.retries += 1
            self._abort(children)  # the replica may be out of reach only
            for child in children:
                self.leave(child)
                self._stats.add("retried")
                child.restart()
                self.place(child, min(others, key=self._stats.open_tokens))

    # --- the end

    def end_all(self, error: RequestError, outcome: Outcome, replica: int | None = None) -> None:
        """End all requests, or only the requests that `replica` runs. Waiting requests belong to no replica."""
        for child in list(self._open.values()):
            if child.needs_replica and replica in (None, child.replica):
                self.end(child.ticket, error, outcome)

    def end(self, ticket: Ticket[_Child], error: RequestError, outcome: Outcome) -> None:
        """End the open children of a request, and report an error to the client.

        Does nothing for a request that has ended.
        """
        if ticket.error is None and (ticket.open_children or ticket.is_sending or outcome == "failed"):
            ticket.error = error
            self._drop(ticket, outcome)
            ticket.fail()

    def _drop(self, ticket: Ticket[_Child], outcome: Outcome) -> None:
        open_children = [child for child in ticket.children if child.request_id in self._open]
        self._abort(open_children)
        for child in open_children:
            self.close(child, outcome)

    def _abort(self, children: Sequence[_Child]) -> None:
        """Tell the engines to end children."""
        ids_by_replica: dict[int, list[str]] = {}
        for child in children:
            if child.replica is not None and (ids := child.open_ids()):
                ids_by_replica.setdefault(child.replica, []).extend(ids)
        for replica, ids in sorted(ids_by_replica.items()):
            self._send(AbortRequests(ids), replica)

    def close(self, child: _Child, outcome: Outcome) -> None:
        """Count the end of a child. The next request gets its slot."""
        if self._open.pop(child.request_id, None) is None:
            return
        if not self._open:
            self._open.clear()  # an emptied dict keeps the memory of its largest size
        stats, ticket = self._stats, child.ticket
        ticket.open_children -= 1
        stats.add("waiting_prompt_tokens", -child.waiting_tokens)
        self.leave(child)
        stats.add(outcome)
        stats.set("in_flight", len(self._open))
        if ticket.open_children:
            self._queue.free_slots()
        elif ticket.is_queued:
            self._queue.leave(ticket)
        else:
            self._queue.free_slots(ticket, self.settle(ticket))

    def settle(self, ticket: Ticket[_Child]) -> float:
        """Return the real cost of an ended request, in the unit of its expected cost.

        By default this is the expected cost.
        """
        return ticket.cost


class RequestTimeLimit(Generic[_Ticket]):
    """Calls `on_overdue` once for each watched request that is older than its limit. One timer serves all requests.

    One timer per request would add three objects to the event loop, which keeps hundreds of them for reuse. These would
    retain far more memory than their own size. Only a request that has asked for a shorter limit than `limit_s` has a
    timer of its own.
    """

    def __init__(self, limit_s: float, on_overdue: Callable[[_Ticket], None]) -> None:
        self.limit_s = limit_s
        self._on_overdue = on_overdue
        self._watched: set[_Ticket] = set()
        self._timers: dict[_Ticket, asyncio.TimerHandle] = {}
        self._scheduled = False

    def watch(self, ticket: _Ticket) -> None:
        """Limit the time of a request, counted from its arrival."""
        limit_s = ticket.exchange.limit_s(self.limit_s)
        if limit_s < self.limit_s:
            left_s = ticket.arrived_s + limit_s - time.monotonic()
            timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._end_early, ticket)
            self._timers[ticket] = timer
            return
        self._watched.add(ticket)
        if not self._scheduled:
            self._schedule()

    def forget(self, ticket: _Ticket) -> None:
        """Stop watching a request that has ended. Does nothing for a request that is not watched."""
        if timer := self._timers.pop(ticket, None):
            timer.cancel()
        self._watched.discard(ticket)
        if not self._watched:
            self._watched.clear()  # an emptied set keeps the memory of its largest size

    def _end_early(self, ticket: _Ticket) -> None:
        del self._timers[ticket]
        self._on_overdue(ticket)

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(min(TIME_CHECK_S, self.limit_s / MIN_TIME_CHECKS), self._check)

    def _check(self) -> None:
        arrived_before_s = time.monotonic() - self.limit_s
        overdue = [ticket for ticket in self._watched if ticket.arrived_s <= arrived_before_s]
        for ticket in overdue:
            self._watched.discard(ticket)
            self._on_overdue(ticket)
        self._scheduled = False
        if self._watched:
            self._schedule()
