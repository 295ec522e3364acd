"""Runs the levels of a load on a fleet, as streams of requests to its models, and formats one line per level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from meltcore.measure.documents.schema import FleetLevel, Part, StreamLoad
from meltcore.measure.load.config import MAX_REQUESTS, NUM_PROBLEMS, Level, LoadConfig, Timeouts
from meltcore.measure.load.fleet.bound import jobs_of
from meltcore.measure.load.fleet.simulation import Job
from meltcore.measure.load.record import RecordFile, RequestRecord
from meltcore.measure.load.run.streams import LevelStream, OnProgress, Progress, StreamRunner
from meltcore.measure.load.run.summary import summarize
from meltcore.measure.load.run.timeline import InFlight
from meltcore.measure.load.tasks.task import open_workload
from meltcore.measure.load.wire.connection import Target
from meltcore.measure.load.workloads.workload import Workload

NUM_WARMUPS = 4  # requests to each model before the first level


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The load on one model: a closed loop of `connections`, or an open loop of `rate` arrivals per second."""

    name: str
    model: str
    workload: str
    connections: int = 0
    rate: float | None = None

    def level(self, send_s: float, drain_limit_s: float) -> Level:
        """Return the level for this stream, which sends for `send_s` seconds and then drains."""
        if self.rate is None:
            return Level(
                concurrency=self.connections,
                rate=None,
                num_requests=MAX_REQUESTS,
                duration_s=send_s,
                drain_limit_s=drain_limit_s,
                retry_refused=True,
            )
        return Level(
            concurrency=0,
            rate=self.rate,
            num_requests=max(1, round(self.rate * send_s)),
            drain_limit_s=drain_limit_s,
            retry_refused=True,
        )


@contextmanager
def level_status(console: Console) -> Iterator[OnProgress]:
    """Show a status line during the block, and yield the callback that updates it.

    Without a terminal nothing is shown.
    """
    with console.status("") as status:

        def show(progress: Progress) -> None:
            failed = f", {progress.num_failed:,} failed" if progress.num_failed else ""
            in_flight = "draining" if progress.is_draining else "in flight"
            status.update(
                f"{progress.label}: {progress.num_done:,} answered, {progress.in_flight:,} {in_flight}{failed}, "
                f"{progress.elapsed_s:.0f} s"
            )

        yield show


def level_line(level: FleetLevel) -> str:
    """Return a sentence that sums up a completed level."""
    requests, lost, refused = (
        sum(getattr(stream.level if name == "requests" else stream, name) for stream in level.streams)
        for name in ("requests", "lost", "refused")
    )
    return (
        f"{level.label}: {requests:,} requests in {level.duration_s:.1f} s, {lost:,} lost, {refused:,} refused "
        f"at first, {level.peak_in_flight:,} in flight"
    )


class FleetLevels:
    """Runs the levels of a load on a fleet."""

    def __init__(
        self,
        target: Target,
        record_file: RecordFile,
        *,
        processes: int,
        seed: int,
        timeouts: Timeouts,
        drain_limit_s: float,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._runner = StreamRunner(target, record_file, on_progress)
        self._processes = processes
        self._drain_limit_s = drain_limit_s
        self._config = LoadConfig(url=target.url, concurrency=(1,), num_prompts=(1,), seed=seed, timeouts=timeouts)
        self._workloads: dict[str, Workload] = {}
        self.jobs: list[list[Job]] = []  # of the last level, by stream
        self._has_server_died = False
        self.interrupt = self._runner.interrupt

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended early, because it was interrupted or the server has died."""
        return self.interrupt.arrived or self._has_server_died

    async def warm_up(self, streams: Sequence[Stream]) -> None:
        """Send a few requests to each model, and discard their records."""
        level = Level(concurrency=NUM_WARMUPS, rate=None, num_requests=NUM_WARMUPS, retry_refused=True)
        await self._run("warm-up", [self._level_stream(stream, level, streams, None) for stream in streams])

    async def run(self, part: Part, label: str, streams: Sequence[Stream], send_s: float) -> FleetLevel:
        """Release all streams together, wait until each request has an answer or a failure, and return the level."""
        level_streams = [
            self._level_stream(stream, stream.level(send_s, self._drain_limit_s), streams, f"{label}, {stream.name}")
            for stream in streams
        ]
        await self._run(label, level_streams)
        released_s = level_streams[0].released_s
        self.jobs = [jobs_of(each.records, released_s) for each in level_streams]
        records = [record for each in level_streams for record in each.records if record.sent_s]
        ended_s = max((record.ended_s for record in records), default=released_s)
        return FleetLevel(
            part=part,
            label=label,
            connections=sum(stream.connections for stream in streams),
            send_s=send_s,
            duration_s=ended_s - released_s,
            peak_in_flight=_peak(records),
            streams=[self._summarize(stream, each) for stream, each in zip(streams, level_streams, strict=True)],
            released_s=released_s,
        )

    async def _run(self, label: str, streams: Sequence[LevelStream]) -> None:
        await self._runner.run(label, streams)
        self._has_server_died = any(stream.server_died_s is not None for stream in streams)

    def _level_stream(
        self, stream: Stream, level: Level, streams: Sequence[Stream], record_label: str | None
    ) -> LevelStream:
        config = replace(self._config, workload=stream.workload, model=stream.model)
        if stream.workload not in self._workloads:
            self._workloads[stream.workload] = open_workload(config, NUM_PROBLEMS)
        return LevelStream(
            config=config,
            model=stream.model,
            level=level,
            workload=self._workloads[stream.workload],
            num_prompts=NUM_PROBLEMS,
            num_processes=min(self._num_processes(stream, streams), level.num_connections or level.num_requests),
            record_label=record_label,
        )

    def _num_processes(self, stream: Stream, streams: Sequence[Stream]) -> int:
        """Return the number of worker processes of a stream, in proportion to its connections.

        With 0, this process sends the requests.
        """
        total = sum(each.connections for each in streams)
        if self._processes == 1 or not total:
            return 0
        return min(round(self._processes * stream.connections / total), stream.connections)

    def _summarize(self, stream: Stream, sent: LevelStream) -> StreamLoad:
        level = replace(sent.level, num_requests=max(len(sent.records), stream.connections))
        return StreamLoad(
            name=stream.name,
            model=stream.model,
            level=summarize(replace(self._runner.measurement(sent), level=level)),
            refused=sum(record.refusals > 0 for record in sent.records),
            refusals=sum(record.refusals for record in sent.records),
        )


def _peak(records: Sequence[RequestRecord]) -> int:
    sent_s, ended_s = (
        np.array([getattr(record, name) for record in records], dtype=np.float64) for name in ("sent_s", "ended_s")
    )
    return InFlight(sent_s, ended_s).peak
