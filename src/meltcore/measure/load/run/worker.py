"""Runs the part of a level that one worker sends: opens connections, waits for the release, and collects records."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import msgspec

from meltcore.common.process import without_collection
from meltcore.measure.load.config import Level, LoadConfig
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.client_monitor import ClientMonitor, ClientUsage
from meltcore.measure.load.run.loops import ClosedLoop, OpenLoop, RequestLoop, arrival_offsets
from meltcore.measure.load.tasks.task import open_workload
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.workloads.dispatcher import TIMEOUT_CHECK_S, Dispatcher
from meltcore.measure.load.workloads.workload import Clip, RequestBuilder, Workload

INTERRUPTED = "interrupted"
SERVER_DIED = "server died"
DRAIN_LIMIT = "drain limit"

OnRecords = Callable[[list[RequestRecord]], None]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one worker, which sends the requests `worker_idx`, `worker_idx + num_workers`, ... of a level.

    Request 0 of the level is prompt `first_prompt_idx` of a workload of `num_prompts` prompts.
    """

    config: LoadConfig
    target: Target
    model: str
    level: Level
    first_prompt_idx: int
    num_prompts: int
    clips: tuple[Clip, ...] = ()  # of a run on transcription: made once, for all workers and levels
    worker_idx: int = 0
    num_workers: int = 1


class WorkerResult(msgspec.Struct, array_like=True):
    """Holds the client usage of a worker, and the time at which the server died, or None.

    A worker sends it after its records.
    """

    usage: ClientUsage
    server_died_s: float | None


class LoadWorker(Protocol):
    """Declares the interface of a worker, which runs in this process or in another one.

    A worker passes its records to the callback given at construction.
    """

    @property
    def in_flight(self) -> int:
        """Return the number of requests that were sent and have not ended, as far as this process knows."""

    @property
    def num_connections(self) -> int:
        """Return the number of connections opened so far."""

    async def open(self) -> None:
        """Open the connections of a closed loop."""

    async def run(self, release_at_s: float) -> WorkerResult:
        """Send requests from `release_at_s` (time.monotonic) on. Return the result once all requests have records."""

    def stop(self) -> None:
        """Fail the requests in flight as interrupted and send no more, so that `run` returns."""


class LocalWorker:
    """Implements a worker in this process and event loop."""

    def __init__(self, settings: WorkerSettings, on_records: OnRecords) -> None:
        self._settings = settings
        self._on_records = on_records
        self._records: list[RequestRecord] = []
        self._is_stopping = False
        config = settings.config
        workload = open_workload(config, settings.num_prompts, settings.clips)
        self._dispatcher = Dispatcher(settings.target, config.timeouts, self._records.append, workload.make_response)
        self._request_loop = self._make_request_loop(workload)

    @property
    def in_flight(self) -> int:
        """Return the number of requests that were sent and have not ended."""
        return self._dispatcher.in_flight

    @property
    def num_connections(self) -> int:
        """Return the number of connections opened so far."""
        return self._request_loop.num_connections

    async def open(self) -> None:
        """Open the connections of a closed loop."""
        await self._request_loop.open()
        gc.collect()  # now, because the collector is off between the release and the last answer

    def stop(self) -> None:
        """Fail the requests in flight as interrupted and send no more, so that `run` returns."""
        self._is_stopping = True

    async def run(self, release_at_s: float) -> WorkerResult:
        """Send requests from `release_at_s` (time.monotonic) on. Return the result once all requests have records."""
        level = self._settings.level
        drain_ends_s = release_at_s + level.least_s + level.drain_limit_s
        with without_collection():  # with 10,000 open streams it stops the client for tens of ms
            wait_s = release_at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            # A burst of uploads is gigabytes of the client's own work: it is measured too.
            upload_monitor = ClientMonitor() if self._settings.clips else None
            if self._is_stopping:
                self._end_early(INTERRUPTED, None)
            else:
                self._request_loop.release(release_at_s)
            await asyncio.sleep(0)  # lets the event loop send what the release has written
            monitor = upload_monitor or ClientMonitor()
            while not self._request_loop.finished.is_set():
                await self._poll(drain_ends_s)
            result = WorkerResult(monitor.finish(), self._dispatcher.server_died_s)
        self._deliver_records()
        self._request_loop.close()
        return result

    async def _poll(self, drain_ends_s: float) -> None:
        """Wait a fraction of a second, then enforce time limits and deliver records."""
        try:
            async with asyncio.timeout(TIMEOUT_CHECK_S):
                await self._request_loop.finished.wait()
        except TimeoutError:
            self._dispatcher.fail_overdue()
        await self._dispatcher.check_server()
        self._deliver_records()
        if self._is_stopping:
            self._end_early(INTERRUPTED, None)
        elif self._dispatcher.server_died_s is not None:
            self._end_early(SERVER_DIED, SERVER_DIED)
        elif time.monotonic() > drain_ends_s:
            limit_s = self._settings.level.drain_limit_s
            self._end_early(DRAIN_LIMIT, DRAIN_LIMIT, f"still in flight {limit_s:g} s after the last request")

    def _end_early(self, reason: str, fail_remaining: str | None, detail: str = "was still in flight") -> None:
        self._request_loop.stop(fail_remaining=fail_remaining)
        self._dispatcher.abort_all(reason, detail)
        self._request_loop.finished.set()

    def _deliver_records(self) -> None:
        if self._records:
            records = self._records.copy()
            self._records.clear()
            self._on_records(records)

    def _make_request_loop(self, workload: Workload) -> RequestLoop:
        settings, level, config = self._settings, self._settings.level, self._settings.config
        builder = RequestBuilder(config, settings.target, settings.model, workload, settings.first_prompt_idx)
        indexes = range(settings.worker_idx, level.num_requests, settings.num_workers)
        connect_timeout_s = config.timeouts.connect_s
        if level.rate is None:
            num_connections = len(range(settings.worker_idx, level.num_connections, settings.num_workers))
            return ClosedLoop(
                self._dispatcher,
                builder,
                indexes,
                connect_timeout_s,
                num_connections=num_connections,
                duration_s=level.duration_s,
                retry_refused=level.retry_refused,
            )
        offsets_s = arrival_offsets(level.rate, level.num_requests, config.arrivals, config.seed)
        worker_offsets_s = offsets_s[settings.worker_idx :: settings.num_workers]
        return OpenLoop(
            self._dispatcher,
            builder,
            indexes,
            connect_timeout_s,
            offsets_s=worker_offsets_s,
            retry_refused=level.retry_refused,
        )


class InterruptHandler:
    """Stops the current level after the first Ctrl-C of a run. A second Ctrl-C interrupts the program as usual.

    The context manager is entered in the event loop. Only the main thread receives signals. In other threads the
    handler has no effect.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """Create a handler that calls `stop` in the event loop after the signal, if the loop still runs."""
        # Set by the signal's own handler: the loop may not run again before the run returns its results.
        self.arrived = False
        self._stop = stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._previous: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._loop = asyncio.get_running_loop()
            self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        assert self._loop is not None
        self.arrived = True
        self._loop.call_soon_threadsafe(self._stop)
        self._restore()

    def _restore(self) -> None:
        if self._loop is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._loop = None
