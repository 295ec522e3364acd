"""Holds the waiting requests of a batch engine by padded cost and priority, and selects the next batch."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from meltcore.protocol.batch import TaskRequest

Request = TypeVar("Request", bound=TaskRequest)

# A request joins a batch of a larger padded cost if padding adds at most this factor to its cost.
_MAX_PADDING = 2


def cost_buckets(max_cost: int, *, first: int = 32, per_doubling: int = 4) -> list[int]:
    """Return increasing costs up to `max_cost`, with `per_doubling` costs in each factor of 2.

    A request of at least `first` is padded by at most 1 / per_doubling of its cost. Few buckets let requests share
    batches.
    """
    buckets: list[int] = []
    base = first
    while not buckets or buckets[-1] < max_cost:
        buckets += [base + base * step // per_doubling for step in range(per_doubling)]
        base *= 2
    return [*(bucket for bucket in buckets if bucket < max_cost), max_cost]


class WaitingRequest(msgspec.Struct, Generic[Request], frozen=True, gc=False):
    """One waiting request, its cost, and the larger cost to which it is padded."""

    request: Request
    cost: int
    padded_cost: int


class WaitingQueue(Generic[Request]):
    """Holds waiting requests in a heap per padded cost. Adding, removing and taking a request take logarithmic time."""

    def __init__(self, buckets: Sequence[int]) -> None:
        """Create an empty queue. `buckets` increase; the last one is the largest cost of a request."""
        self._buckets = list(buckets)
        # Of each padded cost: priority, deadline, arrival and request; the smallest is served first.
        self._heaps: dict[int, list[tuple[int, float, int, WaitingRequest[Request]]]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._waiting: dict[str, WaitingRequest[Request]] = {}  # ended requests remain in the heaps until they surface
        self._num_added = 0
        self.cost = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request: Request, cost: int) -> None:
        """Queue a request of a cost that is at most the largest bucket."""
        self._num_added += 1
        deadline_s = float("inf") if request.deadline_s is None else request.deadline_s
        padded_cost = self._buckets[bisect_left(self._buckets, cost)]
        waiting = WaitingRequest(request, cost, padded_cost)
        self._waiting[request.request_id] = waiting
        self.cost += cost
        entry = request.priority, deadline_s, self._num_added, waiting
        heapq.heappush(self._heaps.setdefault(padded_cost, []), entry)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (deadline_s, request.request_id))

    def remove(self, request_id: str) -> WaitingRequest[Request] | None:
        """Remove a request and return it. Returns None if the request does not wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self.cost -= waiting.cost
        return waiting

    def take_expired(self, now_s: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        requests = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            waiting = self.remove(heapq.heappop(self._deadlines)[1])
            if waiting is not None:
                requests.append(waiting.request)
        return requests

    def take(self, max_cost: int, bound: int | None = None) -> list[WaitingRequest[Request]]:
        """Remove and return the next batch, or an empty list if the first request does not fit.

        The first request in order determines the padded cost. Requests of that padded cost follow in order. Then come
        requests of smaller padded costs, if padding does not make them more than twice as expensive.

        Args:
            max_cost: the maximum cost of the batch with its padding.
            bound: a smaller limit for batches of several requests. None sets no such limit.
        """
        tops = [top for each in list(self._heaps) if (top := self._first_waiting(each)) is not None]
        if not tops or (first := min(tops)[-1]).padded_cost > max_cost:
            return []
        max_rows = max(1, (max_cost if bound is None else min(max_cost, bound)) // first.padded_cost)
        batch: list[WaitingRequest[Request]] = []
        for padded_cost in sorted(self._heaps, reverse=True):
            if not first.padded_cost >= padded_cost > first.padded_cost / _MAX_PADDING:
                continue
            heap = self._heaps[padded_cost]
            while heap and len(batch) < max_rows:
                waiting = heapq.heappop(heap)[-1]
                if self._waiting.get(waiting.request.request_id) is waiting:
                    self.remove(waiting.request.request_id)
                    batch.append(waiting)
        return batch

    def _first_waiting(self, padded_cost: int) -> tuple[int, float, int, WaitingRequest[Request]] | None:
        """Return the first entry of a padded cost whose request waits. Ended requests before it are dropped."""
        heap = self._heaps[padded_cost]
        while heap:
            waiting = heap[0][-1]
            if self._waiting.get(waiting.request.request_id) is waiting:
                return heap[0]
            heapq.heappop(heap)
        del self._heaps[padded_cost]
        return None
