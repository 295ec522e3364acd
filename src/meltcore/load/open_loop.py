"""Open loop: requests start at times drawn beforehand, whether or not the server keeps up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from meltcore.load.config import Arrivals
from meltcore.load.connection import ConnectError, Connection, Target, connect
from meltcore.load.flight import Flight
from meltcore.load.requests import RequestMaker

# Servers drop connections after 5 s without a request (uvicorn's default); one about to be dropped is not reused,
# because a request lost to that race would be booked as the server's failure.
MAX_IDLE_S = 3.0


def arrival_offsets(rate: float, count: int, arrivals: Arrivals, seed: int) -> np.ndarray:
    """[count] seconds from the release to each intended start; the first is 0.

    Poisson gaps are scaled so that the last arrival falls on (count - 1) / rate: the rate offered is the rate asked
    for, without the 1 to 2 % that a seed would otherwise add or take.
    """
    span_s = (count - 1) / rate
    if arrivals == "constant" or count < 3:
        return np.linspace(0.0, span_s, count)
    gaps = np.random.default_rng(seed).exponential(size=count - 1)
    drawn = np.concatenate(([0.0], np.cumsum(gaps)))
    return drawn * (span_s / drawn[-1])


class OpenLoop:
    """Starts request `indexes[k]` at `offsets_s[k]` after the release, over as many connections as that takes."""

    def __init__(
        self,
        flight: Flight,
        maker: RequestMaker,
        target: Target,
        indexes: Sequence[int],
        offsets_s: np.ndarray,
        connect_timeout_s: float,
    ) -> None:
        self._flight = flight
        self._maker = maker
        self._target = target
        self._connect_timeout_s = connect_timeout_s
        self._plan = list(zip(indexes, offsets_s.tolist(), strict=True))
        self._next = 0  # position in the plan
        self._left = len(indexes)
        self._idle: list[tuple[Connection, float]] = []
        self._connections: set[Connection] = set()
        self._starting: dict[int, tuple[asyncio.Task[None], float]] = {}  # by index, with the intended start
        self._clock: asyncio.Task[None] | None = None
        self.finished = asyncio.Event()

    @property
    def connected(self) -> int:
        return len(self._connections)

    async def open(self) -> None:
        """Nothing to prepare: a connection is part of what an arriving user waits for."""

    def release(self, at_s: float) -> None:
        self._clock = asyncio.ensure_future(self._run_clock(at_s))

    def stop(self, *, fail_rest_as: str | None = None) -> None:
        """Start nothing more. `fail_rest_as`: requests never sent get a record with this failure."""
        if self._clock is not None:
            self._clock.cancel()
        waiting = [(index, intended_s) for index, (_, intended_s) in self._starting.items()]
        for task, _ in self._starting.values():
            task.cancel()
        if fail_rest_as is not None:
            now_s = time.monotonic()
            for index, intended_s in [*waiting, *((index, now_s) for index, _ in self._plan[self._next :])]:
                self._flight.fail_unsent(index, intended_s, fail_rest_as, "never sent")

    def close(self) -> None:
        """Drop every connection."""
        for connection in self._connections:
            connection.close()

    async def _run_clock(self, at_s: float) -> None:
        for index, offset_s in self._plan:
            due_s = at_s + offset_s
            while (wait_s := due_s - time.monotonic()) > 0:  # uvloop's timers round to 1 ms and may fire early
                await asyncio.sleep(wait_s)
            self._next += 1
            self._start(index, due_s)

    def _start(self, index: int, intended_s: float) -> None:
        oldest_s = time.monotonic() - MAX_IDLE_S
        while self._idle:
            connection, since_s = self._idle.pop()
            if since_s >= oldest_s and connection.open:
                self._flight.launch(connection, self._maker.make(index), intended_s, self._ended)
                return
            connection.close()
            self._connections.discard(connection)
        self._starting[index] = (asyncio.ensure_future(self._connect(index, intended_s)), intended_s)

    async def _connect(self, index: int, intended_s: float) -> None:
        try:
            connection = await connect(self._target, self._connect_timeout_s)
        except ConnectError as error:
            del self._starting[index]
            self._flight.fail_unsent(index, intended_s, error.reason, error.detail)
            self._ended(None)
            return
        del self._starting[index]
        self._connections.add(connection)
        self._flight.launch(connection, self._maker.make(index), intended_s, self._ended)

    def _ended(self, connection: Connection | None) -> None:
        if connection is not None:
            self._idle.append((connection, time.monotonic()))
        self._left -= 1
        if self._left == 0:
            self.finished.set()
