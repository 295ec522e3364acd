"""The queue of one model before its engines, as one API server process uses it.

While the engines have free slots and nothing waits, a request goes to them immediately. Otherwise it waits in this
queue. Its place there can still change with its class, its deadline and the loss of its client. The engines get a few
more requests than they run, so that a freed slot is filled immediately. Several processes share the engines' slots
through the statistics.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from meltcore.common.errors import RequestError
from meltcore.serve.requests.admission import Admission, DrainRate, Load, asleep_error
from meltcore.serve.requests.fair_queue import FairQueue
from meltcore.serve.requests.stats import CLASSES, ModelStats
from meltcore.serve.requests.ticket import Ticket

# Other processes' ends of requests make room that no message tells of.
TURN_CHECK_S = 0.005
MAX_STARTS = 64  # per iteration of the event loop: they take milliseconds
LOOKAHEAD = 4  # a fourth of an engine's slots more than it runs is sent to it
# An answer's length as a queue expects it, and how much one answer changes that.
EXPECTED_OUTPUT_TOKENS, OUTPUT_TOKENS_WEIGHT = 128.0, 0.02
EQUAL_SHARES = tuple(1 for _ in CLASSES)


def max_requests_at_engine(slots: int) -> int:
    """Return how many requests may be at one engine with `slots` slots: those that run, and a few that wait there."""
    return slots + max(1, slots // LOOKAHEAD)


class RequestQueue:
    """Admits requests, lets them wait for their turn, and starts them.

    The table of open tickets sets `accept`, which counts a request as in flight, and `start`, which sends it to the
    engines.
    """

    accept: Callable[[Ticket[Any]], None]
    start: Callable[[Ticket[Any]], None]

    def __init__(
        self,
        stats: ModelStats,
        admission: Admission,
        *,
        slots: int,
        shares: Sequence[float],
        waiting_units: Callable[[], float] | None = None,
    ) -> None:
        """Create an empty queue for replicas of `slots` slots.

        `waiting_units` returns the number of waiting units in all processes. By default it sums the units of the
        requests in the queues.
        """
        self._stats = stats
        self._admission = admission
        self._slots = slots
        self._max_requests_per_replica = max_requests_at_engine(slots)
        self._fair_queue = FairQueue(stats, shares)
        self._shares = {name: share / sum(shares) for name, share in zip(CLASSES, shares, strict=True)}
        self._rate = DrainRate(max(1, len(stats.shared.rows) - 1))
        self._waiting_units = waiting_units or self._queued_units
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many requests of this process wait in the queue."""
        return len(self._fair_queue)

    def admit(self, ticket: Ticket[Any]) -> None:
        """Accept a request, and start it now or at its turn.

        Raises RequestError: 429 if the queue is full, and 503 for a model that sleeps. The request is then neither
        counted nor started.
        """
        stats = self._stats
        ticket.exchange.admissions.append((stats.task, ticket.priority_class))  # also if it is refused: its log line
        with stats.shared.locked():  # the limits are those of all API servers together
            in_flight, replicas = round(stats.total("in_flight")), len(stats.live_replicas())
            if not replicas and stats.is_asleep:
                self._check_sleep(ticket)
            num_queued = stats.total("queue_requests")
            # Nearly every request of a server that keeps up: it waits for nothing, so no bound is near.
            if (
                num_queued
                or in_flight + len(ticket.children) > self._slots * replicas
                or not self._admission.fits(self._waiting_units(), ticket.units)
            ):
                self._check(ticket, in_flight, replicas)
            self.accept(ticket)
            if num_queued or in_flight >= self._max_requests_per_replica * replicas:
                self._fair_queue.push(ticket)
                ticket.exchange.queued_models.append(stats)
                stats.add("queue_requests", len(ticket.children))
                self._fair_queue.beat(time.monotonic())
            else:
                self.start(ticket)
        if ticket.is_queued:
            self._watch()
        else:
            stats.queue_waits[ticket.priority_class].observe(0.0)

    def _queued_units(self) -> float:
        stats = self._stats
        return stats.total("queue_requests") and sum(stats.total(f"queue_units/{name}") for name in CLASSES)

    def leave(self, ticket: Ticket[Any]) -> None:
        """Remove a request that has ended while it waited. Does nothing for a request that was started."""
        if not ticket.is_queued:
            return
        with self._stats.shared.locked():
            self._fair_queue.remove(ticket)
            self._stats.add("queue_requests", -len(ticket.children))
        self._note_wait(ticket)

    def free_slots(self, ticket: Ticket[Any] | None = None, cost: float = 0.0) -> None:
        """Free the slots of an ended request, and start the next requests.

        `cost` is the real cost of the ended request.
        """
        now_s = time.monotonic()
        if ticket is not None and ticket.charge:
            with self._stats.shared.locked():
                self._fair_queue.settle(ticket, cost)
        if self._rate.is_due(now_s):
            self._rate.record(now_s, self._stats.num_ended())
        if self._fair_queue and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_next)

    def _check(self, ticket: Ticket[Any], in_flight: int, replicas: int) -> None:
        stats, name = self._stats, ticket.priority_class
        load = Load(
            in_flight,
            self._waiting_units(),
            sum(stats.total(f"queue_requests/{other}") for other in CLASSES if other != name),
            sum(stats.total(f"queue_units/{other}") for other in CLASSES if other != name),
        )
        try:
            self._admission.check(
                load,
                requests=len(ticket.children),
                replicas=replicas,
                units=ticket.units,
                share=self._shares[name],
            )
        except RequestError as error:
            stats.add("rejected_queue_full")
            stats.add(f"refused_full/{name}")
            now_s, num_ended = time.monotonic(), stats.num_ended()
            error.retry_after_s = self._rate.retry_after_s(
                now_s, num_ended, excess=error.retry_after_s or 0.0, requests=len(ticket.children)
            )
            if self._rate.is_due(now_s):
                self._rate.record(now_s, num_ended)
            if stats.is_asleep:
                stats.set("wanted_s", now_s)
                raise asleep_error(stats, f"the model sleeps, and {error.message}") from error
            raise

    def _check_sleep(self, ticket: Ticket[Any]) -> None:
        """Raise RequestError (503) for a request whose deadline passes before its sleeping model can wake up.

        The model is marked as wanted, so that the supervisor wakes it for later requests.
        """
        stats, now_s = self._stats, time.monotonic()
        limit_s, wake_s = ticket.exchange.limit_s(math.inf), stats.wake_at_s() - now_s
        if wake_s > limit_s:
            stats.set("wanted_s", now_s)
            stats.add("rejected_sleeping")
            stats.add(f"refused_deadline/{ticket.priority_class}")
            message = f"the model sleeps and cannot serve for {wake_s:.1f} s; X-Request-Timeout is {limit_s:g} s"
            raise asleep_error(stats, message)

    def _start_next(self) -> None:
        """Start the next requests in order, as long as the engines have slots for them."""
        self._is_scheduled = False
        stats = self._stats
        started_tickets: list[Ticket[Any]] = []
        with stats.shared.locked():
            now_s = time.monotonic()
            self._fair_queue.beat(now_s)
            num_running = round(stats.total("in_flight") - stats.total("queue_requests"))
            num_free = self._max_requests_per_replica * len(stats.live_replicas()) - num_running
            while (
                num_free > 0
                and len(started_tickets) < MAX_STARTS
                and (ticket := self._fair_queue.pop(now_s)) is not None
            ):
                stats.add("queue_requests", -len(ticket.children))
                num_free -= len(ticket.children)
                ticket.exchange.queued_models.remove(stats)
                started_tickets.append(ticket)
                self.start(ticket)
        for ticket in started_tickets:
            self._note_wait(ticket)
        if len(started_tickets) == MAX_STARTS:
            self.free_slots()

    def _note_wait(self, ticket: Ticket[Any]) -> None:
        wait_s = time.monotonic() - ticket.admitted_s
        ticket.exchange.queue_wait_s += wait_s
        self._stats.queue_waits[ticket.priority_class].observe(wait_s)

    def _watch(self) -> None:
        """Set a timer to check whether a waiting request of this process is the next one."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_CHECK_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.free_slots()
        if self._fair_queue:
            self._watch()
