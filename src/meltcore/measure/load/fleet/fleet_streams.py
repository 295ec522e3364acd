"""Runs streams of requests to several models of one server, released together: one level of a load on a fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from rich.console import Console

from meltcore.common.process import without_collection
from meltcore.measure.documents.schema import FleetLevel, Part, StreamLoad
from meltcore.measure.load.config import Level, LoadConfig, Timeouts
from meltcore.measure.load.record import RecordFile, RequestRecord
from meltcore.measure.load.run.runner import PROGRESS_INTERVAL_S, RELEASE_DELAY_S
from meltcore.measure.load.run.summary import LevelMeasurement, summarize
from meltcore.measure.load.run.timeline import InFlight
from meltcore.measure.load.run.worker import FirstInterrupt, LoadWorker, LocalWorker, WorkerResult, WorkerSettings
from meltcore.measure.load.run.worker_process import WorkerProcess
from meltcore.measure.load.tasks.task import open_workload, workload_task
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.workloads.workload import Clip, Workload

MAX_REQUESTS = 10_000_000  # of one stream of a level; its time ends it long before
NUM_PROBLEMS = 2_000  # different ones of a graded workload; others make each prompt by its index
NUM_WARMUPS = 4  # requests to each model before the first level


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The load on one model: closed loop of `connections`, or `rate` arrivals per second."""

    name: str
    model: str
    workload: str
    connections: int = 0
    rate: float | None = None

    def level(self, send_s: float) -> Level:
        """Return the level that sends for `send_s`."""
        if self.rate is None:
            return Level(
                concurrency=self.connections,
                rate=None,
                num_requests=MAX_REQUESTS,
                duration_s=send_s,
                retry_refused=True,
            )
        return Level(concurrency=0, rate=self.rate, num_requests=max(1, round(self.rate * send_s)), retry_refused=True)


@dataclass(frozen=True, kw_only=True)
class FleetProgress:
    """The progress of a level: requests that wait for an answer, have one, or got none."""

    label: str
    in_flight: int
    done: int
    failed: int
    elapsed_s: float


OnFleetProgress = Callable[[FleetProgress], None]


@contextmanager
def level_status(console: Console) -> Iterator[OnFleetProgress]:
    """Show a line that is replaced while a level runs; nothing where the output is no terminal."""
    with console.status("") as status:

        def show(progress: FleetProgress) -> None:
            failed = f", {progress.failed:,} failed" if progress.failed else ""
            status.update(
                f"{progress.label}: {progress.done:,} answered, {progress.in_flight:,} in flight{failed}, "
                f"{progress.elapsed_s:.0f} s"
            )

        yield show


def level_line(level: FleetLevel) -> str:
    """Return a sentence on a level once it is over."""
    requests, lost, refused = (
        sum(getattr(stream.level if name == "requests" else stream, name) for stream in level.streams)
        for name in ("requests", "lost", "refused")
    )
    return (
        f"{level.label}: {requests:,} requests in {level.duration_s:.1f} s, {lost:,} lost, {refused:,} refused "
        f"at first, {level.peak_in_flight:,} in flight"
    )


class StreamRunner:
    """Runs levels one after another. Prompts do not repeat within a run, but for clips and problems."""

    def __init__(
        self,
        target: Target,
        record_file: RecordFile,
        *,
        processes: int,
        seed: int,
        timeouts: Timeouts,
        on_progress: OnFleetProgress | None = None,
    ) -> None:
        self._target = target
        self._record_file = record_file
        self._processes = processes
        self._seed = seed
        self._timeouts = timeouts
        self._on_progress = on_progress
        self._workloads: dict[str, Workload] = {}
        self._next_prompt_idx: dict[str, int] = {}
        self._workers: list[LoadWorker] = []
        self.interrupt = FirstInterrupt(self._stop_workers)
        self.server_died = False

    @property
    def has_ended(self) -> bool:
        """Whether no further level makes sense."""
        return self.interrupt.arrived or self.server_died

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.stop()

    async def warm_up(self, streams: Sequence[Stream]) -> None:
        """Send a few requests to each model; their records are dropped."""
        levels = [
            Level(concurrency=NUM_WARMUPS, rate=None, num_requests=NUM_WARMUPS, retry_refused=True) for _ in streams
        ]
        await self._run("warm-up", streams, levels, None)

    async def run(self, part: Part, label: str, streams: Sequence[Stream], send_s: float) -> FleetLevel:
        """Release all streams together, and return when each request has an answer or a failure."""
        levels = [stream.level(send_s) for stream in streams]
        records, results, released_s = await self._run(label, streams, levels, self._record_file)
        loads = [
            self._summarize(stream, level, own_records, own_results, released_s)
            for stream, level, own_records, own_results in zip(streams, levels, records, results, strict=True)
        ]
        everything = [record for own_records in records for record in own_records if record.sent_s]
        ended_s = max((record.ended_s for record in everything), default=released_s)
        return FleetLevel(
            part=part,
            label=label,
            connections=sum(stream.connections for stream in streams),
            send_s=send_s,
            duration_s=ended_s - released_s,
            peak_in_flight=_peak(everything),
            streams=loads,
            released_s=released_s,
        )

    async def _run(
        self, label: str, streams: Sequence[Stream], levels: Sequence[Level], record_file: RecordFile | None
    ) -> tuple[list[list[RequestRecord]], list[list[WorkerResult]], float]:
        records: list[list[RequestRecord]] = [[] for _ in streams]
        owners: list[int] = []
        self._workers, released_s = [], 0.0

        def receiver(position: int) -> Callable[[list[RequestRecord]], None]:
            def on_records(batch: list[RequestRecord]) -> None:
                records[position] += batch
                if record_file is not None:
                    record_file.write(f"{label}, {streams[position].name}", released_s, batch)

            return on_records

        for position, (stream, level) in enumerate(zip(streams, levels, strict=True)):
            num_processes = min(self._num_processes(stream, streams), level.num_connections or level.num_requests)
            workers = self._make_workers(stream, level, num_processes, receiver(position))
            self._workers += workers
            owners += [position] * len(workers)
        progress = asyncio.ensure_future(self._report(label, records))
        try:
            await asyncio.gather(*(worker.open() for worker in self._workers))
            if self.interrupt.arrived:
                self._stop_workers()
            released_s = time.monotonic() + (RELEASE_DELAY_S if self._processes > 1 else 0.0)
            # For all: the first worker of this process that ends would turn it on for the others.
            with without_collection():
                worker_results = await asyncio.gather(*(worker.run(released_s) for worker in self._workers))
        finally:
            progress.cancel()
        results: list[list[WorkerResult]] = [[] for _ in streams]
        for position, result in zip(owners, worker_results, strict=True):
            results[position].append(result)
            self.server_died = self.server_died or result.server_died_s is not None
        for stream, own_records in zip(streams, records, strict=True):
            used = max((record.index for record in own_records), default=-1) + 1
            self._next_prompt_idx[stream.workload] = self._next_prompt_idx.get(stream.workload, 0) + used
        return records, results, released_s

    def _num_processes(self, stream: Stream, streams: Sequence[Stream]) -> int:
        """Return the worker processes of a stream, its part of them by connections. With 0 this process sends."""
        total = sum(each.connections for each in streams)
        if self._processes == 1 or not total:
            return 0
        return min(round(self._processes * stream.connections / total), stream.connections)

    def _make_workers(
        self, stream: Stream, level: Level, num_processes: int, on_records: Callable[[list[RequestRecord]], None]
    ) -> list[LoadWorker]:
        config = LoadConfig(
            url=self._target.url,
            workload=stream.workload,
            model=stream.model,
            concurrency=(1,),
            num_prompts=(1,),
            seed=self._seed,
            timeouts=self._timeouts,
        )
        settings = WorkerSettings(
            config=config,
            target=self._target,
            model=stream.model,
            level=level,
            first_prompt_idx=self._next_prompt_idx.get(stream.workload, 0),
            num_prompts=NUM_PROBLEMS,
            clips=self._clips(config),
            num_workers=max(1, num_processes),
        )
        if not num_processes:
            return [LocalWorker(settings, on_records)]
        return [
            WorkerProcess(msgspec.structs.replace(settings, worker_idx=index), on_records)
            for index in range(num_processes)
        ]

    def _clips(self, config: LoadConfig) -> tuple[Clip, ...]:
        return self._workload(config).clips

    def _workload(self, config: LoadConfig) -> Workload:
        if config.workload not in self._workloads:
            self._workloads[config.workload] = open_workload(config, NUM_PROBLEMS)
        return self._workloads[config.workload]

    def _summarize(
        self,
        stream: Stream,
        level: Level,
        records: list[RequestRecord],
        results: Sequence[WorkerResult],
        released_s: float,
    ) -> StreamLoad:
        workload = self._workloads[stream.workload]
        died_at_s = [result.server_died_s for result in results if result.server_died_s is not None]
        result = summarize(
            LevelMeasurement(
                level=replace(level, num_requests=max(len(records), stream.connections)),
                records=records,
                released_s=released_s,
                client_usages=[result.usage for result in results],
                server_died_s=min(died_at_s, default=None),
                interrupted=self.interrupt.arrived,
                workload_name=workload.name,
                is_graded=workload.is_graded,
                task=workload_task(stream.workload),
                slo_ms={},
            )
        )
        return StreamLoad(
            name=stream.name,
            model=stream.model,
            level=result,
            refused=sum(record.refusals > 0 for record in records),
            refusals=sum(record.refusals for record in records),
        )

    async def _report(self, label: str, records: Sequence[list[RequestRecord]]) -> None:
        started_s = time.monotonic()
        counted, failed = [0] * len(records), 0
        while self._on_progress is not None:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            for position, own_records in enumerate(records):
                failed += sum(record.failure is not None for record in own_records[counted[position] :])
                counted[position] = len(own_records)
            in_flight = sum(worker.in_flight for worker in self._workers)
            self._on_progress(
                FleetProgress(
                    label=label,
                    in_flight=in_flight,
                    done=sum(counted),
                    failed=failed,
                    elapsed_s=time.monotonic() - started_s,
                )
            )


def _peak(records: Sequence[RequestRecord]) -> int:
    sent_s, ended_s = (
        np.array([getattr(record, name) for record in records], dtype=np.float64) for name in ("sent_s", "ended_s")
    )
    return InFlight(sent_s, ended_s).peak
