"""Decides which waiting request of a model is next. Priority classes share the model by weight, over all processes.

The method is start-time fair queueing. Each class has a virtual time at which its next request may begin. The class
with the earliest time is served, and its time advances by the request's cost divided by the share of the class. A class
without waiting requests does not save up time: it begins again at the virtual time of the last request served. So
classes with waiting requests get their shares of the work, and the unused share of a class goes to the others. Every
request is served after a bounded amount of work for other requests.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from itertools import count

from meltcore.serve.requests.stats import CLASSES, ModelStats
from meltcore.settings.config import PriorityClass

# Within a class requests are served in order of arrival. Each step of OpenAI's field `priority` counts as much time.
PRIORITY_STEP_S = 1.0
MAX_STEPS = 60  # so a request is overtaken only by those that arrive within this many steps
# A process that has given no sign of life for so long does not keep the others from its turn.
STALE_S = 0.1


class Waiting:
    """One request, from its admission on. `start` sends the request to the engines, once."""

    __slots__ = (
        *("admitted_s", "charge", "cost", "is_held", "order_s", "priority_class", "requests", "start", "task", "units"),
        *("held_by", "wait_s"),
    )

    def __init__(
        self,
        priority_class: PriorityClass,
        start: Callable[[], None],
        *,
        requests: int = 1,
        units: float = 0.0,
        cost: float = 1.0,
        priority: int = 0,
    ) -> None:
        """Describe a request.

        Args:
            priority_class: class of the request.
            start: sends the request to the engines.
            requests: number of engine slots that the request takes.
            units: prompt tokens, characters or seconds of audio that wait with the request.
            cost: expected work, in the same unit for all requests of a model.
            priority: order within the class. Lower values are earlier.
        """
        self.priority_class: PriorityClass = priority_class
        self.start = start
        self.requests = requests
        self.units = units
        self.cost = cost
        self.admitted_s = time.monotonic()
        self.order_s = self.admitted_s + PRIORITY_STEP_S * max(-MAX_STEPS, min(MAX_STEPS, priority))
        self.is_held = False
        self.wait_s = 0.0  # in the queue, once it is started
        self.task = ""  # of the model whose queue it is in
        self.held_by: ModelStats | None = None  # of the model for which it waits, until it is started
        self.charge = 0.0  # what its class has paid for it


class _Columns:
    """The columns of a class in the rows of the statistics."""

    def __init__(self, stats: ModelStats, name: PriorityClass) -> None:
        self.requests, self.units, self.head_s, self.finish = (
            stats.column(f"queue_{column}/{name}") for column in ("requests", "units", "head_s", "finish")
        )


class FairQueue:
    """The waiting requests of one process. Every method except `len` must be called with the statistics' lock held."""

    def __init__(self, stats: ModelStats, shares: Sequence[float]) -> None:
        """Create an empty queue. `shares` has a share greater than 0 for each class, in the order of CLASSES."""
        self._rows, self._row = stats.shared.rows, stats.row
        self._shares = [share / sum(shares) for share in shares]
        self._columns = [_Columns(stats, name) for name in CLASSES]
        self._virtual, self._alive_s = stats.column("queue_virtual"), stats.column("queue_alive_s")
        self._heaps: list[list[tuple[float, int, Waiting]]] = [[] for _ in CLASSES]
        self._number = count()
        self._length = 0

    def __len__(self) -> int:
        """Return how many requests of this process wait."""
        return self._length

    def push(self, waiting: Waiting) -> None:
        """Add a request."""
        index = CLASSES.index(waiting.priority_class)
        columns = self._columns[index]
        if not any(row[columns.requests] for row in self._rows):  # what the class did not use is not saved up
            virtual = max(row[self._virtual] for row in self._rows)
            self._row[columns.finish] += max(0.0, virtual - self._total(columns.finish))
        heapq.heappush(self._heaps[index], (waiting.order_s, next(self._number), waiting))
        waiting.is_held = True
        self._length += 1
        self._count(index, waiting, 1)

    def remove(self, waiting: Waiting) -> None:
        """Remove a waiting request that has expired, or whose client has disconnected."""
        self._take(CLASSES.index(waiting.priority_class), waiting)

    def beat(self, now_s: float) -> None:
        """Show the other processes that this process is alive and starts its requests when they are next."""
        self._row[self._alive_s] = now_s

    def pop(self, now_s: float) -> Waiting | None:
        """Remove and return the next request.

        Returns None if the queue is empty, or if the next request belongs to another process.
        """
        turn = None
        for index, columns in enumerate(self._columns):
            begin = None
            for row in self._rows:
                if not row[columns.requests] or (row is not self._row and now_s - row[self._alive_s] > STALE_S):
                    continue
                if begin is None:
                    begin = self._total(columns.finish)
                candidate = (begin, index, row[columns.head_s])
                if turn is None or candidate < turn[0]:
                    turn = candidate, row
        if turn is None or turn[1] is not self._row:
            return None
        (begin, index, _), _ = turn
        waiting = self._heaps[index][0][2]  # the head is never one that was removed
        self._take(index, waiting)
        waiting.charge = waiting.cost
        self._row[self._columns[index].finish] += waiting.cost / self._shares[index]
        self._row[self._virtual] = max(begin, *(row[self._virtual] for row in self._rows))
        return waiting

    def settle(self, waiting: Waiting, cost: float) -> None:
        """Replace the expected cost that was charged to the class of a served request by the real `cost`."""
        if waiting.charge:
            index = CLASSES.index(waiting.priority_class)
            self._row[self._columns[index].finish] += (cost - waiting.charge) / self._shares[index]
            waiting.charge = 0.0

    def _total(self, column: int) -> float:
        return sum(row[column] for row in self._rows)

    def _take(self, index: int, waiting: Waiting) -> None:
        waiting.is_held = False
        self._length -= 1
        self._count(index, waiting, -1)

    def _count(self, index: int, waiting: Waiting, sign: int) -> None:
        columns, heap = self._columns[index], self._heaps[index]
        self._row[columns.requests] += sign * waiting.requests
        self._row[columns.units] += sign * waiting.units
        while heap and not heap[0][2].is_held:
            heapq.heappop(heap)
        if not heap:
            heap.clear()  # an emptied list keeps the memory of its largest size
        self._row[columns.head_s] = heap[0][0] if heap else 0.0
