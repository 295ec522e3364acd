"""One process's share of a level: opens its connections, waits for the common release, sees its requests through."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from meltcore.load.closed_loop import ClosedLoop
from meltcore.load.config import Level, LoadConfig
from meltcore.load.connection import Target
from meltcore.load.flight import SWEEP_S, Flight
from meltcore.load.open_loop import OpenLoop, arrival_offsets
from meltcore.load.record import Record
from meltcore.load.requests import RequestMaker
from meltcore.load.selfcheck import ClientWatch, SelfCheck
from meltcore.load.workload import Workload, load_workload

INTERRUPTED = "interrupted"
SERVER_DIED = "server died"

OnRecords = Callable[[list[Record]], None]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Which share of which level: requests `rank`, `rank + of`, ... of it.

    The level's request 0 is prompt `first` of a workload of `prompts` prompts.
    """

    config: LoadConfig
    target: Target
    model: str
    level: Level
    first: int
    prompts: int
    rank: int = 0
    of: int = 1


class ShareEnd(msgspec.Struct, array_like=True):
    """What a share has to say once all its records are handed over."""

    watch: ClientWatch
    server_died_s: float | None


class Share(Protocol):
    """A share in this process or in another. Records go to the callback it was made with."""

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended, as far as this side knows."""

    @property
    def connected(self) -> int:
        """Connections opened so far."""

    async def open(self) -> None:
        """Open the connections of a closed loop."""

    async def run(self, release_at_s: float) -> ShareEnd:
        """Send at `release_at_s` (monotonic), return when every request has its record."""

    def stop(self) -> None:
        """Fail what is in flight as interrupted, send nothing more, let `run` return."""


class LocalShare:
    """A share in this process and event loop."""

    def __init__(self, setup: Setup, on_records: OnRecords) -> None:
        self._setup = setup
        self._on_records = on_records
        self._records: list[Record] = []
        self._stopping = False
        config = setup.config
        self._flight = Flight(
            setup.target,
            config.timeouts,
            self._records.append,
            stream=config.stream,
            may_be_empty=config.may_be_empty,
        )
        self._loop = self._make_loop(open_workload(config, setup.prompts))

    @property
    def in_flight(self) -> int:
        return self._flight.in_flight

    @property
    def connected(self) -> int:
        return self._loop.connected

    async def open(self) -> None:
        await self._loop.open()
        gc.collect()  # now, because none may run between the release and the last answer

    def stop(self) -> None:
        self._stopping = True

    async def run(self, release_at_s: float) -> ShareEnd:
        with _no_collector():
            wait_s = release_at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if self._stopping:
                self._end_early(INTERRUPTED, None)
            else:
                self._loop.release(release_at_s)
            await asyncio.sleep(0)  # the loop flushes what the release has written
            check = SelfCheck()
            while not self._loop.finished.is_set():
                await self._tend()
            end = ShareEnd(check.finish(), self._flight.server_died_s)
        self._hand_over()
        self._loop.close()
        return end

    async def _tend(self) -> None:
        """Wait a little, then do what comes round a few times a second."""
        try:
            await asyncio.wait_for(self._loop.finished.wait(), SWEEP_S)
        except TimeoutError:
            self._flight.sweep()
        await self._flight.check_server()
        self._hand_over()
        if self._stopping:
            self._end_early(INTERRUPTED, None)
        elif self._flight.server_died_s is not None:
            self._end_early(SERVER_DIED, SERVER_DIED)

    def _end_early(self, reason: str, fail_rest_as: str | None) -> None:
        self._loop.stop(fail_rest_as=fail_rest_as)
        self._flight.abort_all(reason, "still in flight then")
        self._loop.finished.set()

    def _hand_over(self) -> None:
        if self._records:
            records = self._records.copy()
            self._records.clear()
            self._on_records(records)

    def _make_loop(self, workload: Workload) -> ClosedLoop | OpenLoop:
        setup, level, config = self._setup, self._setup.level, self._setup.config
        maker = RequestMaker(config, setup.target, setup.model, workload, setup.first)
        indexes = range(setup.rank, level.requests, setup.of)
        connect_timeout_s = config.timeouts.connect_s
        if level.rate is None:
            width = len(range(setup.rank, level.width, setup.of))
            return ClosedLoop(self._flight, maker, setup.target, indexes, width, connect_timeout_s)
        offsets_s = arrival_offsets(level.rate, level.requests, config.arrivals, config.seed)[setup.rank :: setup.of]
        return OpenLoop(self._flight, maker, setup.target, indexes, offsets_s, connect_timeout_s)


def open_workload(config: LoadConfig, prompts: int) -> Workload:
    return load_workload(config.workload, count=prompts, seed=config.seed, max_tokens=config.max_tokens)


@contextmanager
def _no_collector() -> Iterator[None]:
    """A collection over 10,000 open streams stops the client for tens of ms, in the middle of somebody's gap."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
