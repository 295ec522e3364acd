"""Decides which waiting request of a model is next. Priority classes share the model by weight, over all processes.

The method is start-time fair queueing. Each class has a virtual time at which its next request may begin. The class
with the earliest time is served, and its time advances by the request's cost divided by the share of the class. A class
without waiting requests does not save up time: it begins again at the virtual time of the last request served. So
classes with waiting requests get their shares of the work, and the unused share of a class goes to the others. Every
request is served after a bounded amount of work for other requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

from meltcore.serve.requests.stats import CLASSES, ModelStats
from meltcore.serve.requests.ticket import Ticket
from meltcore.settings.config import PriorityClass

# A process that has given no sign of life for so long does not keep the others from its turn.
STALE_S = 0.1


class _Columns:
    """The columns in which a row of the statistics has the values of one priority class."""

    def __init__(self, stats: ModelStats, name: PriorityClass) -> None:
        self.requests, self.units, self.head_s, self.finish = (
            stats.column(f"queue_{column}/{name}") for column in ("requests", "units", "head_s", "finish")
        )


class FairQueue:
    """Holds the waiting requests of one process.

    Every method except `len` requires that the statistics' lock is held.
    """

    def __init__(self, stats: ModelStats, shares: Sequence[float]) -> None:
        """Create an empty queue. `shares` has one number greater than 0 per class, in the order of CLASSES."""
        self._rows, self._row = stats.shared.rows, stats.row
        self._shares = [share / sum(shares) for share in shares]
        self._columns = [_Columns(stats, name) for name in CLASSES]
        self._virtual_time_column, self._alive_column = stats.column("queue_virtual"), stats.column("queue_alive_s")
        self._heaps: list[list[tuple[float, int, Ticket[Any]]]] = [[] for _ in CLASSES]
        self._counter = count()
        self._length = 0

    def __len__(self) -> int:
        """Return how many requests of this process wait."""
        return self._length

    def push(self, ticket: Ticket[Any]) -> None:
        """Add a request."""
        index = CLASSES.index(ticket.priority_class)
        columns = self._columns[index]
        if not any(row[columns.requests] for row in self._rows):  # what the class did not use is not saved up
            virtual_time = max(row[self._virtual_time_column] for row in self._rows)
            self._row[columns.finish] += max(0.0, virtual_time - self._total(columns.finish))
        heapq.heappush(self._heaps[index], (ticket.order_s, next(self._counter), ticket))
        ticket.is_queued = True
        self._length += 1
        self._count(index, ticket, 1)

    def remove(self, ticket: Ticket[Any]) -> None:
        """Remove a waiting request that has expired, or whose client has disconnected."""
        self._take(CLASSES.index(ticket.priority_class), ticket)

    def beat(self, now_s: float) -> None:
        """Store the current time, so that other processes see that this process lives and will start its requests."""
        self._row[self._alive_column] = now_s

    def pop(self, now_s: float) -> Ticket[Any] | None:
        """Remove and return the next request.

        Returns None if the queue is empty, or if the next request belongs to another process.
        """
        earliest = None
        for index, columns in enumerate(self._columns):
            start_time = None
            for row in self._rows:
                if not row[columns.requests] or (row is not self._row and now_s - row[self._alive_column] > STALE_S):
                    continue
                if start_time is None:
                    start_time = self._total(columns.finish)
                candidate = (start_time, index, row[columns.head_s])
                if earliest is None or candidate < earliest[0]:
                    earliest = candidate, row
        if earliest is None or earliest[1] is not self._row:
            return None
        (start_time, index, _), _ = earliest
        ticket = self._heaps[index][0][2]  # the head is never one that was removed
        self._take(index, ticket)
        ticket.charge = ticket.cost
        self._row[self._columns[index].finish] += ticket.cost / self._shares[index]
        self._row[self._virtual_time_column] = max(start_time, *(row[self._virtual_time_column] for row in self._rows))
        return ticket

    def settle(self, ticket: Ticket[Any], cost: float) -> None:
        """Replace the expected cost of a served request by its real `cost` in the virtual time of its class."""
        if ticket.charge:
            index = CLASSES.index(ticket.priority_class)
            self._row[self._columns[index].finish] += (cost - ticket.charge) / self._shares[index]
            ticket.charge = 0.0

    def _total(self, column: int) -> float:
        return sum(row[column] for row in self._rows)

    def _take(self, index: int, ticket: Ticket[Any]) -> None:
        ticket.is_queued = False
        self._length -= 1
        self._count(index, ticket, -1)

    def _count(self, index: int, ticket: Ticket[Any], sign: int) -> None:
        columns, heap = self._columns[index], self._heaps[index]
        self._row[columns.requests] += sign * len(ticket.children)
        self._row[columns.units] += sign * ticket.units
        while heap and not heap[0][2].is_queued:
            heapq.heappop(heap)
        if not heap:
            heap.clear()  # an emptied list keeps the memory of its largest size
        self._row[columns.head_s] = heap[0][0] if heap else 0.0
