"""Implements the closed loop and the open loop that decide when requests are sent.

In a closed loop, each of a fixed number of connections sends its next request when the previous request has ended. In
an open loop, requests start at times drawn beforehand, whether or not the server keeps up. The release is the time when
a loop sends its first requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from meltcore.measure.load.config import ArrivalProcess
from meltcore.measure.load.wire.connection import HttpConnection, HttpRequestError, connect
from meltcore.measure.load.workloads.dispatcher import Dispatcher
from meltcore.measure.load.workloads.workload import EncodedRequest, RequestBuilder

# A listen queue holds 4,096 at most on a stock Linux, often 128: more connects than that are retried after 1 s.
MAX_CONCURRENT_CONNECTS = 256
# Servers close connections after 5 s without a request (uvicorn's default). One about to be closed is not reused: a
# request lost to that race would count as the server's failure.
MAX_IDLE_S = 3.0


def arrival_offsets(rate: float, num_requests: int, arrivals: ArrivalProcess, seed: int) -> np.ndarray:
    """Return the seconds from the release to each intended start: [num_requests] float64. The first value is 0.

    Poisson intervals are scaled so that the last arrival falls on (num_requests - 1) / rate. Without the scaling, the
    seed would change the offered rate by 1 to 2 %.
    """
    duration_s = (num_requests - 1) / rate
    if arrivals == "constant" or num_requests < 3:
        return np.linspace(0.0, duration_s, num_requests)
    intervals_s = np.random.default_rng(seed).exponential(size=num_requests - 1)
    offsets_s = np.concatenate(([0.0], np.cumsum(intervals_s)))
    return np.asarray(offsets_s * (duration_s / offsets_s[-1]))


class RequestLoop(ABC):
    """Sends the requests of a level. It sets `finished` when every request has its record."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        builder: RequestBuilder,
        connect_timeout_s: float,
        *,
        retry_refused: bool,
    ) -> None:
        self._dispatcher = dispatcher
        if retry_refused:
            dispatcher.on_refused = self._send_later
        dispatcher.on_stale = self._connect_and_send
        self._builder = builder
        self._connect_timeout_s = connect_timeout_s
        self._connections: set[HttpConnection] = set()
        self._connecting: dict[int, tuple[asyncio.Task[None], float]] = {}  # by index, with the intended start
        self._refused: dict[int, tuple[asyncio.TimerHandle, float]] = {}  # likewise, until they are sent again
        self.finished = asyncio.Event()

    @property
    def num_connections(self) -> int:
        """Return the number of connections opened so far."""
        return len(self._connections)

    async def open(self) -> None:  # noqa: B027 - an open loop has nothing to prepare
        """Open connections before the release, if the loop uses fixed connections."""

    @abstractmethod
    def release(self, at_s: float) -> None:
        """Start sending requests at the time.monotonic() `at_s`."""

    @abstractmethod
    def _on_done(self, connection: HttpConnection | None) -> None:
        """Handle the end of a request.

        `connection` is the connection of the request, or None if it cannot be reused.
        """

    @abstractmethod
    def _stop(self) -> list[int]:
        """Stop sending. Return the indexes of the requests that were never started."""

    def stop(self, *, fail_remaining: str | None = None) -> None:
        """Stop sending. With `fail_remaining`, each unsent request gets a record with this failure reason.

        Refused requests that wait to be sent again always get such a record.
        """
        for index, (timer, intended_s) in self._refused.items():
            timer.cancel()
            self._dispatcher.fail_unsent(index, intended_s, fail_remaining or "interrupted", "refused, not sent again")
        self._refused.clear()
        unsent = [(index, intended_s) for index, (_, intended_s) in self._connecting.items()]
        for task, _ in self._connecting.values():
            task.cancel()
        now_s = time.monotonic()
        unsent += [(index, now_s) for index in self._stop()]
        if fail_remaining is not None:
            for index, intended_s in unsent:
                self._dispatcher.fail_unsent(index, intended_s, fail_remaining, "never sent")

    def close(self) -> None:
        """Close every connection."""
        for connection in self._connections:
            connection.close()

    def _send(self, connection: HttpConnection, index: int, intended_s: float) -> None:
        self._dispatcher.send(connection, self._builder.build(index), intended_s, self._on_done)

    def _send_later(self, connection: HttpConnection | None, index: int, intended_s: float, wait_s: float) -> None:
        """Send a refused request again after `wait_s`, the server's Retry-After."""
        since_s = time.monotonic()

        def send_again() -> None:
            del self._refused[index]
            if connection is None:
                self._connect_and_send(index, intended_s)
            elif connection.is_open and time.monotonic() - since_s < MAX_IDLE_S:
                self._send(connection, index, intended_s)
            else:
                connection.close()
                self._connections.discard(connection)
                self._connect_and_send(index, intended_s)

        self._refused[index] = (asyncio.get_running_loop().call_later(wait_s, send_again), intended_s)

    def _connect_and_send(self, index: int, intended_s: float) -> None:
        self._connecting[index] = (asyncio.ensure_future(self._connect(index, intended_s)), intended_s)

    async def _connect(self, index: int, intended_s: float) -> None:
        try:
            connection = await connect(self._builder.target, self._connect_timeout_s)
        except HttpRequestError as error:
            del self._connecting[index]
            self._dispatcher.fail_unsent(index, intended_s, error.reason, error.detail)
            self._on_done(None)
            return
        del self._connecting[index]
        self._connections.add(connection)
        self._send(connection, index, intended_s)


class ClosedLoop(RequestLoop):
    """Sends requests over `num_connections` connections, each of which carries one request at a time.

    With `duration_s`, no connection sends another request after this time since the release.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        builder: RequestBuilder,
        indexes: Sequence[int],
        connect_timeout_s: float,
        *,
        num_connections: int,
        duration_s: float | None = None,
        retry_refused: bool = False,
    ) -> None:
        super().__init__(dispatcher, builder, connect_timeout_s, retry_refused=retry_refused)
        self._num_connections = self._num_open = num_connections
        self._duration_s = math.inf if duration_s is None else duration_s
        self._ends_s = math.inf
        self._indexes = iter(indexes)
        self._first_requests: list[tuple[HttpConnection | HttpRequestError, EncodedRequest]] = []
        self._stopped = False

    async def open(self) -> None:
        """Open every connection and build its first request, so that the release only has to write."""
        connect_slots = asyncio.Semaphore(MAX_CONCURRENT_CONNECTS)

        async def open_connection() -> HttpConnection | HttpRequestError:
            async with connect_slots:
                try:
                    connection = await connect(self._builder.target, self._connect_timeout_s)
                except HttpRequestError as error:
                    return error
                self._connections.add(connection)
                return connection

        connections = await asyncio.gather(*(open_connection() for _ in range(self._num_connections)))
        self._first_requests = [(connection, self._builder.build(next(self._indexes))) for connection in connections]

    def release(self, at_s: float) -> None:
        """Send all first requests in one burst. No answer is read before the last request is written."""
        self._ends_s = at_s + self._duration_s
        first_requests, self._first_requests = self._first_requests, []
        unconnected_requests = []
        send, on_done = self._dispatcher.send, self._on_done
        for connection, request in first_requests:
            if isinstance(connection, HttpConnection):
                send(connection, request, at_s, on_done)
            else:
                unconnected_requests.append((connection, request))
        for error, request in unconnected_requests:
            self._dispatcher.fail_unsent(request.index, at_s, error.reason, error.detail)
            self._on_done(None)

    def _stop(self) -> list[int]:
        self._stopped = True
        return [] if self._duration_s < math.inf else list(self._indexes)

    def _on_done(self, connection: HttpConnection | None) -> None:
        now_s = time.monotonic()
        index = None if self._stopped or now_s >= self._ends_s else next(self._indexes, None)
        if index is None:
            self._num_open -= 1
            if self._num_open == 0:
                self.finished.set()
            return
        if connection is not None:
            self._send(connection, index, now_s)
        else:
            self._connect_and_send(index, now_s)


class OpenLoop(RequestLoop):
    """Sends request `indexes[k]` at `offsets_s[k]` after the release, over as many connections as needed."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        builder: RequestBuilder,
        indexes: Sequence[int],
        connect_timeout_s: float,
        *,
        offsets_s: np.ndarray,
        retry_refused: bool = False,
    ) -> None:
        super().__init__(dispatcher, builder, connect_timeout_s, retry_refused=retry_refused)
        self._num_remaining = len(indexes)
        self._schedule = list(zip(indexes, offsets_s.tolist(), strict=True))
        self._num_started = 0  # position in the schedule
        self._idle_connections: list[tuple[HttpConnection, float]] = []
        self._schedule_task: asyncio.Task[None] | None = None

    def release(self, at_s: float) -> None:
        """Start the schedule.

        A connection is opened when its request is due, because a real user waits for the connection too.
        """
        self._schedule_task = asyncio.ensure_future(self._run_schedule(at_s))

    def _stop(self) -> list[int]:
        if self._schedule_task is not None:
            self._schedule_task.cancel()
        return [index for index, _ in self._schedule[self._num_started :]]

    async def _run_schedule(self, at_s: float) -> None:
        for index, offset_s in self._schedule:
            due_s = at_s + offset_s
            # Waits until a time, for no event; uvloop's timers round to 1 ms and may fire early.
            while (wait_s := due_s - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(wait_s)
            self._num_started += 1
            self._start_request(index, due_s)

    def _start_request(self, index: int, intended_s: float) -> None:
        min_idle_since_s = time.monotonic() - MAX_IDLE_S
        while self._idle_connections:
            connection, idle_since_s = self._idle_connections.pop()
            if idle_since_s >= min_idle_since_s and connection.is_open:
                self._send(connection, index, intended_s)
                return
            connection.close()
            self._connections.discard(connection)
        self._connect_and_send(index, intended_s)

    def _on_done(self, connection: HttpConnection | None) -> None:
        if connection is not None:
            self._idle_connections.append((connection, time.monotonic()))
        self._num_remaining -= 1
        if self._num_remaining == 0:
            self.finished.set()
