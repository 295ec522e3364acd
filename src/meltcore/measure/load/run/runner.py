"""Runs the levels of a LoadConfig against a server, one after another."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import uvloop

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.verdicts import CUT_SHORT
from meltcore.measure.load.config import Level, LoadConfig
from meltcore.measure.load.record import RecordFile, RequestRecord
from meltcore.measure.load.run.summary import LevelMeasurement, summarize
from meltcore.measure.load.run.worker import FirstInterrupt, LoadWorker, LocalWorker, OnRecords, WorkerSettings
from meltcore.measure.load.run.worker_process import WorkerProcess
from meltcore.measure.load.tasks.task import open_workload, workload_task
from meltcore.measure.load.token_counter import TokenCounter
from meltcore.measure.load.wire.connection import Target, resolve_target, run_coroutine
from meltcore.measure.load.wire.probe import InFlightProbe, first_model

PROGRESS_INTERVAL_S = 0.25
RELEASE_DELAY_S = 0.2  # all worker processes must have read the release before it is due
NUM_SPARE_FILES = 64  # standard streams, the event loop, pipes to workers, records, control connections
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

Phase = Literal["warm-up", "connecting", "running", "done"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Describes the progress of a level. `level_idx` counts levels from 0."""

    level_idx: int
    level: Level
    phase: Phase
    num_connections: int
    in_flight: int
    num_done: int
    num_failed: int
    output_tokens: int


OnProgress = Callable[[Progress], None]
# Called with each level's result and records once the level is over.
OnLevel = Callable[[LevelResult, list[RequestRecord]], None]


def run_levels(
    config: LoadConfig, on_progress: OnProgress | None = None, on_level: OnLevel | None = None
) -> list[LevelResult]:
    """Run every level and return the results in order. The call blocks, on an event loop of its own.

    The first Ctrl-C ends the current level as PARTIAL and skips the rest. A dead server ends the run in the same way,
    as SERVER_DIED. Raises ConfigError where the run cannot start because of its address, limits, workload or model.
    """
    return run_coroutine(run_levels_async(config, on_progress, on_level), uvloop.new_event_loop)


async def run_levels_async(
    config: LoadConfig, on_progress: OnProgress | None = None, on_level: OnLevel | None = None
) -> list[LevelResult]:
    """Run every level within a running event loop and return the results in order.

    Interrupts, a dead server and errors have the same effects as in `run_levels`.
    """
    num_connections = max(level.num_connections for level in config.levels)
    check_limits(num_connections, connections_per_process=-(-num_connections // config.processes))
    target = resolve_target(config.url, config.api_key)
    model = config.model or await first_model(target)
    token_counter = TokenCounter(config.tokenizer) if config.tokenizer is not None else None
    record_file = RecordFile(config.records_path, with_event_times=config.record_event_times)
    run = _LoadRun(config, target, model, token_counter, record_file, on_progress, on_level)
    try:
        with run.interrupt:
            results = await run.run_levels()
    finally:
        record_file.close()
    last = results[-1]
    if run.interrupt.arrived and last.verdict not in CUT_SHORT:
        last.verdict = "PARTIAL"
        last.reasons.append("interrupted after its last answer")
    return results


def check_limits(num_connections: int, *, connections_per_process: int, port_range: Path = _PORT_RANGE) -> None:
    """Raise this process's soft limit of open files to the hard one, and check that files and local ports suffice.

    `num_connections` go to one address and port, `connections_per_process` of them from one process (worker processes
    inherit the limits). Raises ConfigError, which says what to change.
    """
    num_files = connections_per_process + NUM_SPARE_FILES
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != hard_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    if hard_limit != resource.RLIM_INFINITY and hard_limit < num_files:
        raise ConfigError(
            f"{num_files} open files are needed and the hard limit is {hard_limit}: raise it (ulimit -Hn {num_files}, "
            f"LimitNOFILE= of a service, --ulimit nofile={num_files} of a container) or distribute the load with "
            f"--processes"
        )
    try:
        low_port, high_port = map(int, port_range.read_text().split())
    except OSError:
        return  # not Linux: there is no such limit to read, and connect errors will name it
    num_ports = high_port - low_port + 1
    if num_connections > num_ports:
        raise ConfigError(
            f"{num_connections} connections to one address need as many local ports and there are {num_ports} "
            f"({low_port}-{high_port}): sysctl -w net.ipv4.ip_local_port_range='1024 65535'"
        )


class _LoadRun:
    def __init__(
        self,
        config: LoadConfig,
        target: Target,
        model: str,
        token_counter: TokenCounter | None,
        record_file: RecordFile,
        on_progress: OnProgress | None,
        on_level: OnLevel | None,
    ) -> None:
        self._config = config
        self._target = target
        self._model = model
        self._token_counter = token_counter
        self._record_file = record_file
        self._on_progress = on_progress
        self._on_level = on_level
        # Every request of the run, warm-ups too, has a prompt of its own: a repeated one would hit a prefix cache.
        self._num_prompts = sum(level.num_requests + config.num_warmups_for(level) for level in config.levels)
        self._workload = open_workload(config, self._num_prompts)
        self._next_prompt_idx = 0
        self._workers: list[LoadWorker] = []
        self.interrupt = FirstInterrupt(self._stop_workers)

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.stop()

    async def run_levels(self) -> list[LevelResult]:
        results: list[LevelResult] = []
        for level_idx, level in enumerate(self._config.levels):
            result = await self._run_level(level_idx, level)
            results.append(result)
            if result.verdict in CUT_SHORT:
                break
        if self._record_file.problem is not None:
            results[-1].reasons.append(self._record_file.problem)
        return results

    async def _run_level(self, level_idx: int, level: Level) -> LevelResult:
        num_warmups = self._config.num_warmups_for(level)
        if num_warmups:
            warmup_level = replace(
                level,
                concurrency=min(num_warmups, level.concurrency or num_warmups),
                rate=None,
                num_requests=num_warmups,
            )
            await self._measure_level(level_idx, warmup_level, "warm-up", num_workers=1)
        first_prompt_idx, token_counter = self._next_prompt_idx, self._token_counter
        # A worker of a closed loop without a connection would never send its requests.
        num_workers = min(self._config.processes, level.num_connections or level.num_requests)
        measurement = await self._measure_level(level_idx, level, "running", num_workers=num_workers)
        if token_counter is not None:
            token_counter.fill_missing_counts(
                measurement.records, lambda index: self._workload.make_prompt(first_prompt_idx + index).fields
            )
        fallback_source: Literal["tokenizer", "events"] = "events" if token_counter is None else "tokenizer"
        result = summarize(replace(measurement, num_warmups=num_warmups, fallback_count_source=fallback_source))
        if token_counter is not None:
            num_checked, disagreement = token_counter.check_counts(measurement.records)
            if disagreement is not None:
                result.reasons.append(disagreement)
            elif num_checked:
                result.token_count_source = "confirmed"
        if self._on_level is not None:
            self._on_level(result, measurement.records)
        return result

    async def _measure_level(self, level_idx: int, level: Level, phase: Phase, *, num_workers: int) -> LevelMeasurement:
        """Run one level, or its warm-up, over `num_workers` workers and return the measurements."""
        records = _LevelRecords(level_idx, level)
        label = "warm-up" if phase == "warm-up" else level.name
        self._workers = self._make_workers(level, num_workers, records, label)
        progress_task = asyncio.ensure_future(self._report_periodically(records, phase))
        probe = InFlightProbe(self._target)
        try:
            await asyncio.gather(*(worker.open() for worker in self._workers))
            await probe.start()
            if self.interrupt.arrived:
                self._stop_workers()
            records.released_s = time.monotonic() + (RELEASE_DELAY_S if num_workers > 1 else 0.0)
            worker_results = await asyncio.gather(*(worker.run(records.released_s) for worker in self._workers))
        finally:
            progress_task.cancel()
        ended_s = max((record.ended_s for record in records.records), default=records.released_s)
        server_peak = await probe.finish(records.released_s, ended_s)
        self._report_progress(records, "done" if phase == "running" else phase)
        died_at_s = [
            worker_result.server_died_s for worker_result in worker_results if worker_result.server_died_s is not None
        ]
        return LevelMeasurement(
            level=level,
            records=records.records,
            released_s=records.released_s,
            client_usages=[worker_result.usage for worker_result in worker_results],
            server_died_s=min(died_at_s, default=None),
            interrupted=self.interrupt.arrived,
            server_peak_in_flight=server_peak,
            workload_name=self._workload.name,
            is_graded=self._workload.is_graded,
            task=workload_task(self._config.workload),
            is_streamed=self._config.stream,
            slo_ms=self._config.slo_ms,
        )

    def _make_workers(self, level: Level, num_workers: int, records: _LevelRecords, label: str) -> list[LoadWorker]:
        def on_records(batch: list[RequestRecord]) -> None:
            records.add(batch)
            self._record_file.write(label, records.released_s, batch)

        settings = WorkerSettings(
            config=self._config,
            target=self._target,
            model=self._model,
            level=level,
            first_prompt_idx=self._next_prompt_idx,
            num_prompts=self._num_prompts,
            clips=self._workload.clips,
            num_workers=num_workers,
        )
        self._next_prompt_idx += level.num_requests
        make_worker: Callable[[WorkerSettings, OnRecords], LoadWorker] = (
            LocalWorker if num_workers == 1 else WorkerProcess
        )
        return [
            make_worker(msgspec.structs.replace(settings, worker_idx=worker_idx), on_records)
            for worker_idx in range(num_workers)
        ]

    async def _report_periodically(self, records: _LevelRecords, phase: Phase) -> None:
        while True:
            self._report_progress(records, phase if records.released_s or phase == "warm-up" else "connecting")
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    def _report_progress(self, records: _LevelRecords, phase: Phase) -> None:
        if self._on_progress is None:
            return
        self._on_progress(
            Progress(
                level_idx=records.level_idx,
                level=records.level,
                phase=phase,
                num_connections=sum(worker.num_connections for worker in self._workers),
                in_flight=sum(worker.in_flight for worker in self._workers),
                num_done=len(records.records),
                num_failed=records.num_failed,
                output_tokens=records.output_tokens,
            )
        )


class _LevelRecords:
    """Holds the records of a level so far, and the counts that progress shows."""

    def __init__(self, level_idx: int, level: Level) -> None:
        self.level_idx = level_idx
        self.level = level
        self.records: list[RequestRecord] = []
        self.num_failed = 0
        self.output_tokens = 0
        self.released_s = 0.0

    def add(self, records: list[RequestRecord]) -> None:
        self.records += records
        self.num_failed += sum(record.failure is not None for record in records)
        self.output_tokens += sum(record.output_tokens for record in records)
