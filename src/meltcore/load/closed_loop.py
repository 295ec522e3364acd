"""Closed loop: a fixed number of connections, each of which sends its next request when the last one has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from meltcore.load.connection import ConnectError, Connection, Target, connect
from meltcore.load.flight import Flight
from meltcore.load.requests import Request, RequestMaker

# A listen queue holds 4,096 at most on a stock Linux, often 128: a storm of connects ends in retries after 1 s.
CONNECTS_AT_ONCE = 256


class ClosedLoop:
    """Requests `indexes` over `width` connections. `finished` is set when each of them has its record."""

    def __init__(
        self,
        flight: Flight,
        maker: RequestMaker,
        target: Target,
        indexes: Sequence[int],
        width: int,
        connect_timeout_s: float,
    ) -> None:
        self._flight = flight
        self._maker = maker
        self._target = target
        self._width = width
        self._connect_timeout_s = connect_timeout_s
        self._left = len(indexes)
        self._indexes: Iterator[int] = iter(indexes)
        self._ready: list[tuple[Connection | ConnectError, Request]] = []
        self._connections: list[Connection] = []
        self._reconnects: dict[int, tuple[asyncio.Task[None], float]] = {}  # by index, with the intended start
        self._stopped = False
        self.finished = asyncio.Event()

    async def open(self) -> None:
        """Open every connection and make every first request, so that the release has nothing to do but write."""
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def open_one() -> Connection | ConnectError:
            async with gate:
                try:
                    connection = await connect(self._target, self._connect_timeout_s)
                except ConnectError as error:
                    return error
                self._connections.append(connection)
                return connection

        opened = await asyncio.gather(*(open_one() for _ in range(self._width)))
        self._ready = [(each, self._maker.make(next(self._indexes))) for each in opened]

    def release(self, at_s: float) -> None:
        """Send all first requests in one go: no answer is read before the last of them is out."""
        ready, self._ready = self._ready, []
        failed = []
        launch, ended = self._flight.launch, self._ended
        for connection, request in ready:
            if isinstance(connection, Connection):
                launch(connection, request, at_s, ended)
            else:
                failed.append((connection, request))
        for error, request in failed:
            self._flight.fail_unsent(request.index, at_s, error.reason, error.detail)
            self._ended(None)

    @property
    def connected(self) -> int:
        return len(self._connections)

    def stop(self, *, fail_rest_as: str | None = None) -> None:
        """Send nothing more. `fail_rest_as`: requests never sent get a record with this failure."""
        self._stopped = True
        waiting = [(index, intended_s) for index, (_, intended_s) in self._reconnects.items()]
        for task, _ in self._reconnects.values():
            task.cancel()
        if fail_rest_as is not None:
            now_s = time.monotonic()
            for index, intended_s in [*waiting, *((index, now_s) for index in self._indexes)]:
                self._flight.fail_unsent(index, intended_s, fail_rest_as, "never sent")

    def close(self) -> None:
        """Drop every connection."""
        for connection in self._connections:
            connection.close()

    def _ended(self, connection: Connection | None) -> None:
        self._left -= 1
        if self._left == 0:
            self.finished.set()
        if self._stopped:
            return
        index = next(self._indexes, None)
        if index is None:
            return
        now_s = time.monotonic()
        if connection is not None:
            self._flight.launch(connection, self._maker.make(index), now_s, self._ended)
        else:
            self._reconnects[index] = (asyncio.ensure_future(self._reconnect(index, now_s)), now_s)

    async def _reconnect(self, index: int, intended_s: float) -> None:
        try:
            connection = await connect(self._target, self._connect_timeout_s)
        except ConnectError as error:
            del self._reconnects[index]
            self._flight.fail_unsent(index, intended_s, error.reason, error.detail)
            self._ended(None)
            return
        del self._reconnects[index]
        self._connections.append(connection)
        self._flight.launch(connection, self._maker.make(index), intended_s, self._ended)
