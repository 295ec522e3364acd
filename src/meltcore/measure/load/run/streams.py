"""Runs one level of a load: streams of requests to one or several models, which are released together."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from meltcore.common.process import without_collection
from meltcore.measure.load.config import Level, LoadConfig
from meltcore.measure.load.record import RecordFile, RequestRecord
from meltcore.measure.load.run.client_monitor import ClientUsage
from meltcore.measure.load.run.summary import LevelMeasurement
from meltcore.measure.load.run.surroundings import Surroundings, SurroundingsMonitor
from meltcore.measure.load.run.worker import InterruptHandler, LoadWorker, LocalWorker, WorkerResult, WorkerSettings
from meltcore.measure.load.run.worker_process import WorkerProcess
from meltcore.measure.load.tasks.task import workload_task
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.wire.probe import InFlightProbe
from meltcore.measure.load.workloads.workload import Workload

PROGRESS_INTERVAL_S = 0.25
RELEASE_DELAY_S = 0.2  # all worker processes must have read the release before it is due

Phase = Literal["warm-up", "connecting", "running", "done"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Describes the progress of a level over all its streams. `level_idx` counts levels from 0.

    `elapsed_s` counts from the release, or before it from the start of connecting. A level that is draining sends no
    more requests, and waits for the answers in flight.
    """

    label: str
    level_idx: int
    phase: Phase
    num_connections: int
    in_flight: int
    num_done: int
    num_failed: int
    elapsed_s: float
    is_draining: bool = False


OnProgress = Callable[[Progress], None]


@dataclass(kw_only=True)
class LevelStream:
    """Describes the requests that a level sends to one model, and holds the records of their answers.

    `workload` has `num_prompts` prompts. Without `num_processes`, this process sends the requests. Without a
    `record_label`, the records are not written to the file.
    """

    config: LoadConfig
    model: str
    level: Level
    workload: Workload
    num_prompts: int
    num_processes: int = 0
    record_label: str | None
    first_prompt_idx: int = 0
    released_s: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)
    client_usages: list[ClientUsage] = field(default_factory=list)
    server_died_s: float | None = None
    surroundings: Surroundings | None = None

    @property
    def ended_s(self) -> float:
        """The time of the last answer, or the time of the release if there was no answer."""
        return max((record.ended_s for record in self.records), default=self.released_s)

    @property
    def num_prompts_used(self) -> int:
        """The number of prompts from the first one to the last one that was sent."""
        return max((record.index for record in self.records), default=-1) + 1

    def add_result(self, result: WorkerResult) -> None:
        """Add the result that a worker has sent at its end."""
        self.client_usages.append(result.usage)
        died_at_s = [each for each in (self.server_died_s, result.server_died_s) if each is not None]
        self.server_died_s = min(died_at_s, default=None)


class StreamRunner:
    """Runs levels one after another. Prompts do not repeat within a run, except clips and problems."""

    def __init__(self, target: Target, record_file: RecordFile, on_progress: OnProgress | None = None) -> None:
        self._target = target
        self._record_file = record_file
        self._on_progress = on_progress
        self._workers: list[LoadWorker] = []
        self._num_failed = 0
        self._surroundings_monitor = SurroundingsMonitor(target)
        # Every request of the run, warm-ups too, has a prompt of its own: a repeated one would hit a prefix cache.
        self._num_prompts_used: Counter[str] = Counter()  # by workload
        self.interrupt = InterruptHandler(self._stop_workers)

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.stop()

    async def run(
        self,
        label: str,
        streams: Sequence[LevelStream],
        *,
        level_idx: int = 0,
        phase: Phase = "running",
        probe: InFlightProbe | None = None,
    ) -> None:
        """Release all streams together. Return when each request has an answer or a failure.

        `probe` is started before the release. The caller finishes it.
        """
        self._num_failed, started_s = 0, time.monotonic()
        senders = [(stream, worker) for stream in streams for worker in self._make_workers(stream)]
        self._workers = [worker for _, worker in senders]

        def report(phase: Phase) -> None:
            if self._on_progress is not None:
                since_s = streams[0].released_s or started_s
                self._on_progress(self._progress(label, streams, level_idx, phase, time.monotonic() - since_s))

        async def report_periodically() -> None:
            while True:
                report(phase if streams[0].released_s or phase == "warm-up" else "connecting")
                await asyncio.sleep(PROGRESS_INTERVAL_S)

        progress_task = asyncio.ensure_future(report_periodically())
        try:
            await asyncio.gather(*(worker.open() for worker in self._workers))
            if probe is not None:
                await probe.start()
            if self.interrupt.arrived:
                self._stop_workers()
            uses_processes = any(stream.num_processes for stream in streams)
            self._surroundings_monitor.start()
            released_s = time.monotonic() + (RELEASE_DELAY_S if uses_processes else 0.0)
            for stream in streams:
                stream.released_s = released_s
            # For all: the first worker of this process that ends would turn it on for the others.
            with without_collection():
                results = await asyncio.gather(*(worker.run(released_s) for worker in self._workers))
        finally:
            progress_task.cancel()
        for (stream, _), result in zip(senders, results, strict=True):
            stream.add_result(result)
        surroundings = self._surroundings_monitor.finish()
        for stream in streams:
            stream.surroundings = surroundings
            self._num_prompts_used[stream.config.workload] += stream.num_prompts_used
        report("done" if phase == "running" else phase)

    def measurement(self, stream: LevelStream) -> LevelMeasurement:
        """Return the measurements of a stream that has been run."""
        return LevelMeasurement(
            level=stream.level,
            records=stream.records,
            released_s=stream.released_s,
            client_usages=stream.client_usages,
            server_died_s=stream.server_died_s,
            surroundings=stream.surroundings,
            interrupted=self.interrupt.arrived,
            workload_name=stream.workload.name,
            is_graded=stream.workload.is_graded,
            task=workload_task(stream.config.workload),
            is_streamed=stream.config.stream,
            slo_ms=stream.config.slo_ms,
        )

    def _make_workers(self, stream: LevelStream) -> list[LoadWorker]:
        def on_records(batch: list[RequestRecord]) -> None:
            stream.records += batch
            self._num_failed += sum(record.failure is not None for record in batch)
            if stream.record_label is not None:
                self._record_file.write(stream.record_label, stream.released_s, batch)

        stream.first_prompt_idx = self._num_prompts_used[stream.config.workload]
        settings = WorkerSettings(
            config=stream.config,
            target=self._target,
            model=stream.model,
            level=stream.level,
            first_prompt_idx=stream.first_prompt_idx,
            num_prompts=stream.num_prompts,
            clips=stream.workload.clips,
            num_workers=max(1, stream.num_processes),
        )
        if not stream.num_processes:
            return [LocalWorker(settings, on_records)]
        return [
            WorkerProcess(msgspec.structs.replace(settings, worker_idx=index), on_records)
            for index in range(stream.num_processes)
        ]

    def _progress(
        self, label: str, streams: Sequence[LevelStream], level_idx: int, phase: Phase, elapsed_s: float
    ) -> Progress:
        return Progress(
            label=label,
            level_idx=level_idx,
            phase=phase,
            num_connections=sum(worker.num_connections for worker in self._workers),
            in_flight=sum(worker.in_flight for worker in self._workers),
            num_done=sum(len(stream.records) for stream in streams),
            num_failed=self._num_failed,
            elapsed_s=elapsed_s,
            is_draining=phase == "running" and elapsed_s > max(_send_s(stream.level) for stream in streams),
        )


def _send_s(level: Level) -> float:
    """Return the seconds for which a level sends, which are unknown of a closed loop with a number of requests."""
    return level.least_s or math.inf
