"""Runs the levels of a LoadConfig against a server, one after another."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import uvloop

from meltcore.load.config import Level, LoadConfig
from meltcore.load.connection import Target, resolve_target
from meltcore.load.preflight import check_limits
from meltcore.load.probe import InFlightProbe, first_model
from meltcore.load.record import Record, RecordFile
from meltcore.load.recount import Recounter
from meltcore.load.share import LocalShare, OnRecords, Setup, Share, open_workload
from meltcore.load.summary import LevelRun, summarise
from meltcore.load.worker import RemoteShare
from meltcore.results.schema import LevelResult

PROGRESS_S = 0.25
# Workers must all have read the release before it is due.
RELEASE_LEAD_S = 0.2

Phase = Literal["warm-up", "connecting", "running", "done"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a level is. `position` counts levels from 0."""

    position: int
    level: Level
    phase: Phase
    connected: int
    in_flight: int
    done: int
    failed: int
    output_tokens: int


OnProgress = Callable[[Progress], None]
# Is given each level's result and records once the level is over.
OnLevel = Callable[[LevelResult, list[Record]], None]


def run_levels(
    config: LoadConfig, on_progress: OnProgress | None = None, on_level: OnLevel | None = None
) -> list[LevelResult]:
    """Run every level and return their results in order; blocks, on an event loop of its own.

    Ctrl-C ends the level in hand as PARTIAL and leaves the rest out; a dead server ends the run the same way as
    SERVER_DIED. Raises ConfigError where the run cannot start: address, limits, workload, model.
    """
    return uvloop.run(run_levels_async(config, on_progress, on_level))


async def run_levels_async(
    config: LoadConfig, on_progress: OnProgress | None = None, on_level: OnLevel | None = None
) -> list[LevelResult]:
    """As `run_levels`, within a running event loop."""
    widest = max(level.width for level in config.levels)
    check_limits(widest, per_process=-(-widest // config.processes))
    target = resolve_target(config.url, config.api_key)
    model = config.model or await first_model(target)
    recounter = Recounter(config.tokenizer) if config.tokenizer is not None else None
    file = RecordFile(config.records_path, with_chunks=config.record_chunks)
    run = _Run(config, target, model, recounter, file, on_progress, on_level)
    try:
        with run.stops_on_interrupt():
            return await run.all_levels()
    finally:
        file.close()


class _Run:
    def __init__(
        self,
        config: LoadConfig,
        target: Target,
        model: str,
        recounter: Recounter | None,
        file: RecordFile,
        on_progress: OnProgress | None,
        on_level: OnLevel | None,
    ) -> None:
        self._config = config
        self._target = target
        self._model = model
        self._recounter = recounter
        self._file = file
        self._on_progress = on_progress
        self._on_level = on_level
        # Every request of the run, warm-ups too, has a prompt of its own: a repeated one would hit a prefix cache.
        self._prompts = sum(level.requests + config.warmup_of(level) for level in config.levels)
        workload = open_workload(config, self._prompts)
        self._judged = workload.judged
        self._workload_name = workload.name
        self._first = 0
        self._shares: list[Share] = []
        self._interrupted = False

    @contextmanager
    def stops_on_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C ends the level in order; a second one is Python's own KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the main thread, and so does whoever handles them
            return
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self._interrupted = True
            loop.remove_signal_handler(signal.SIGINT)
            for share in self._shares:
                share.stop()

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def all_levels(self) -> list[LevelResult]:
        results: list[LevelResult] = []
        for position, level in enumerate(self._config.levels):
            result = await self._level(position, level)
            results.append(result)
            if result.verdict in ("PARTIAL", "SERVER_DIED"):
                break
        return results

    async def _level(self, position: int, level: Level) -> LevelResult:
        warmups = self._config.warmup_of(level)
        if warmups:
            warm = replace(level, concurrency=min(warmups, level.concurrency or warmups), rate=None, requests=warmups)
            await self._drive(position, warm, "warm-up", processes=1)
        run = await self._drive(position, level, "running", processes=min(self._config.processes, level.requests))
        result = summarise(replace(run, warmup_requests=warmups))
        if self._recounter is not None:
            counted, problem = self._recounter.check(run.records)
            if problem is not None:
                result.reasons.append(problem)
            elif counted:
                result.token_count_source = "confirmed"
        if self._on_level is not None:
            self._on_level(result, run.records)
        return result

    async def _drive(self, position: int, level: Level, phase: Phase, *, processes: int) -> LevelRun:
        """Open, release, and see through one level (or warm-up) over `processes` shares."""
        tally = _Tally(position, level)
        label = "warm-up" if phase == "warm-up" else level.name
        self._shares = self._make_shares(level, processes, tally, label)
        ticker = asyncio.ensure_future(self._tick(tally, phase))
        probe = InFlightProbe(self._target)
        try:
            await asyncio.gather(*(share.open() for share in self._shares))
            await probe.start()
            if self._interrupted:
                for share in self._shares:
                    share.stop()
            tally.released_s = time.monotonic() + (RELEASE_LEAD_S if processes > 1 else 0.0)
            ends = await asyncio.gather(*(share.run(tally.released_s) for share in self._shares))
        finally:
            ticker.cancel()
        server_peak = await probe.finish()
        self._report(tally, "done" if phase == "running" else phase)
        died = [end.server_died_s for end in ends if end.server_died_s is not None]
        return LevelRun(
            level=level,
            records=tally.records,
            released_s=tally.released_s,
            watches=[end.watch for end in ends],
            server_died_s=min(died, default=None),
            interrupted=self._interrupted,
            server_peak_in_flight=server_peak,
            workload=self._workload_name,
            judged=self._judged,
            streamed=self._config.stream,
            slo_ms=self._config.slo_ms,
        )

    def _make_shares(self, level: Level, processes: int, tally: _Tally, label: str) -> list[Share]:
        def keep(records: list[Record]) -> None:
            tally.add(records)
            self._file.write(label, tally.released_s, records)

        setup = Setup(
            config=self._config,
            target=self._target,
            model=self._model,
            level=level,
            first=self._first,
            prompts=self._prompts,
            of=processes,
        )
        self._first += level.requests
        kind: Callable[[Setup, OnRecords], Share] = LocalShare if processes == 1 else RemoteShare
        return [kind(msgspec.structs.replace(setup, rank=rank), keep) for rank in range(processes)]

    async def _tick(self, tally: _Tally, phase: Phase) -> None:
        while True:
            self._report(tally, phase if tally.released_s or phase == "warm-up" else "connecting")
            await asyncio.sleep(PROGRESS_S)

    def _report(self, tally: _Tally, phase: Phase) -> None:
        if self._on_progress is None:
            return
        self._on_progress(
            Progress(
                position=tally.position,
                level=tally.level,
                phase=phase,
                connected=sum(share.connected for share in self._shares),
                in_flight=sum(share.in_flight for share in self._shares),
                done=len(tally.records),
                failed=tally.failed,
                output_tokens=tally.output_tokens,
            )
        )


class _Tally:
    """The records of a level so far, and what progress needs of them."""

    def __init__(self, position: int, level: Level) -> None:
        self.position = position
        self.level = level
        self.records: list[Record] = []
        self.failed = 0
        self.output_tokens = 0
        self.released_s = 0.0

    def add(self, records: list[Record]) -> None:
        self.records += records
        self.failed += sum(record.failure is not None for record in records)
        self.output_tokens += sum(record.output_tokens for record in records)
