"""Runs the levels of a LoadConfig against a server, and makes the result of `meltcore load`."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import LevelResult, RunResult
from meltcore.measure.documents.served_model import model_notes, public_name
from meltcore.measure.documents.values.progress import progress_bar, stop_progress
from meltcore.measure.documents.verdicts import CUT_SHORT, worst_verdict
from meltcore.measure.load.config import Level, LoadConfig
from meltcore.measure.load.record import RecordFile, RequestRecord
from meltcore.measure.load.run.streams import LevelStream, OnProgress, Progress, StreamRunner
from meltcore.measure.load.run.summary import LevelMeasurement, summarize
from meltcore.measure.load.tasks.generation import COMPLETIONS_PATH, fit_vocabulary
from meltcore.measure.load.tasks.task import open_workload, workload_task
from meltcore.measure.load.token_counter import TokenCounter
from meltcore.measure.load.wire.connection import Target, resolve_target, run_coroutine
from meltcore.measure.load.wire.probe import InFlightProbe, first_model, served_facts

NUM_SPARE_FILES = 64  # standard streams, the event loop, pipes to workers, records, control connections
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

# Called with each level's result and records once the level is over.
OnLevel = Callable[[LevelResult, list[RequestRecord]], None]
NOT_STREAMED = "Answers were not streamed: TTFT, ITL and TPOT are not measured."

_PHASE_NOTES: dict[str, Callable[[Progress], str]] = {
    "warm-up": lambda _: "warming up",
    "connecting": lambda progress: f"{progress.num_connections:,} connected",
    "running": lambda progress: f"{progress.in_flight:,} {'draining' if progress.is_draining else 'in flight'}",
    "done": lambda _: "done",
}


def run_levels(
    config: LoadConfig, on_progress: OnProgress | None = None, on_level: OnLevel | None = None
) -> list[LevelResult]:
    """Run every level and return the results in the order of the levels.

    The call blocks while an event loop of its own runs. After the first Ctrl-C, the current level ends as PARTIAL. If
    the server dies, the current level ends as SERVER_DIED. After such a level, and after one without a complete answer,
    the other levels are skipped. A level whose warm-up had no complete answer is not sent. If the server says that it
    has no chat template, the texts of messages are sent to /v1/completions. Raises ConfigError if the run cannot start
    because of its address, limits, workload or model.
    """
    return run_coroutine(run_levels_async(config, on_progress, on_level), uvloop.new_event_loop)


async def run_levels_async(
    config: LoadConfig, on_progress: OnProgress | None = None, on_level: OnLevel | None = None
) -> list[LevelResult]:
    """Run every level in the running event loop and return the results in the order of the levels.

    Interrupts, a dead server and errors have the same effects as in `run_levels`.
    """
    num_connections = max(level.num_connections for level in config.levels)
    check_limits(num_connections, connections_per_process=-(-num_connections // config.processes))
    target = resolve_target(config.url, config.api_key)
    model = config.model or await first_model(target)
    record_file = RecordFile(config.records_path, with_event_times=config.record_event_times)
    results: list[LevelResult] = []
    try:
        run = _LoadRun(config, target, model, record_file, on_progress)
        with run.interrupt:
            for level_idx, level in enumerate(config.levels):
                result, records = await run.run_level(level_idx, level)
                results.append(result)
                is_last = result.verdict in CUT_SHORT or not result.succeeded
                num_skipped = len(config.levels) - len(results)
                if is_last and result.verdict not in CUT_SHORT and num_skipped:
                    result.reasons.append(f"no request succeeded, so the levels after it ({num_skipped}) were not run")
                if on_level is not None:
                    on_level(result, records)
                if is_last:
                    break
    finally:
        record_file.close()
    if record_file.problem is not None:
        result.reasons.append(record_file.problem)
    if run.interrupt.arrived and result.verdict not in CUT_SHORT:
        result.verdict = "PARTIAL"
        result.reasons.append("interrupted after its last answer")
    return results


def check_limits(num_connections: int, *, connections_per_process: int, port_range: Path = _PORT_RANGE) -> None:
    """Raise the soft limit of open files to the hard limit, and check that files and local ports suffice.

    `num_connections` connections go to one address and port, of which one process opens `connections_per_process`.
    Worker processes inherit the limits. Raises ConfigError, which says what to change.
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
    """Runs the levels of one run. Each level has one stream."""

    def __init__(
        self,
        config: LoadConfig,
        target: Target,
        model: str,
        record_file: RecordFile,
        on_progress: OnProgress | None,
    ) -> None:
        self._config = config
        self._target = target
        self._model = model
        self._token_counter = TokenCounter(config.tokenizer) if config.tokenizer is not None else None
        self._num_prompts = config.num_different_prompts
        self._workload = open_workload(config, self._num_prompts)
        self._runner = StreamRunner(target, record_file, on_progress)
        self.interrupt = self._runner.interrupt

    async def run_level(self, level_idx: int, level: Level) -> tuple[LevelResult, list[RequestRecord]]:
        """Run a level after its warm-up. Return its result and records."""
        num_warmups = self._config.num_warmups_for(level)
        reason = None
        if num_warmups:
            warmup = await self._warm_up(level_idx, level, num_warmups)
            reason = self._switch_to_completions(warmup.records)
            if reason is not None:
                warmup = await self._warm_up(level_idx, level, num_warmups)
            if not self.interrupt.arrived and all(record.failure is not None for record in warmup.records):
                result = summarize(replace(self._runner.measurement(warmup), level=level))
                result.reasons.append("no warm-up request succeeded, so the level was not sent")
                return result, warmup.records
        result, records = await self._send_level(level_idx, level, num_warmups)
        if not num_warmups and (reason := self._switch_to_completions(records)) is not None:
            result, records = await self._send_level(level_idx, level, num_warmups)
        result.reasons += [] if reason is None else [reason]
        return result, records

    async def _warm_up(self, level_idx: int, level: Level, num_warmups: int) -> LevelStream:
        concurrency = min(num_warmups, level.concurrency or num_warmups)
        warmup_level = replace(level, concurrency=concurrency, rate=None, num_requests=num_warmups, duration_s=None)
        warmup = self._stream(warmup_level, "warm-up", num_workers=1)
        await self._runner.run("warm-up", [warmup], level_idx=level_idx, phase="warm-up")
        return warmup

    def _switch_to_completions(self, records: Sequence[RequestRecord]) -> str | None:
        """Send messages as completions from now on if the server refused all chats for want of a template.

        Return a sentence that says so, or None if nothing changes.
        """
        if not records or not all(_lacks_template(record) for record in records):
            return None
        if not self._config.has_chats:
            return None
        self._config = replace(self._config, has_chats=False)
        self._workload = open_workload(self._config, self._num_prompts)
        return f"messages were sent as text to {COMPLETIONS_PATH}: {records[0].detail}"

    async def _send_level(
        self, level_idx: int, level: Level, num_warmups: int
    ) -> tuple[LevelResult, list[RequestRecord]]:
        # A worker of a closed loop without a connection would never send its requests.
        num_workers = min(self._config.processes, level.num_connections or level.num_requests)
        stream = self._stream(level, level.name, num_workers=num_workers)
        probe = InFlightProbe(self._target)
        await self._runner.run(level.name, [stream], level_idx=level_idx, probe=probe)
        measurement = replace(
            self._runner.measurement(stream),
            num_warmups=num_warmups,
            server_peak_in_flight=await probe.finish(stream.released_s, stream.ended_s),
        )
        return self._summarize(stream, measurement), stream.records

    def _stream(self, level: Level, record_label: str, *, num_workers: int) -> LevelStream:
        return LevelStream(
            config=self._config,
            model=self._model,
            level=level,
            workload=self._workload,
            num_prompts=self._num_prompts,
            num_processes=num_workers if num_workers > 1 else 0,
            record_label=record_label,
        )

    def _summarize(self, stream: LevelStream, measurement: LevelMeasurement) -> LevelResult:
        counter = self._token_counter
        if counter is None:
            return summarize(measurement)
        counter.fill_missing_counts(
            stream.records, lambda index: self._workload.make_prompt(stream.first_prompt_idx + index).fields
        )
        result = summarize(replace(measurement, fallback_count_source="tokenizer"))
        num_checked, disagreement = counter.check_counts(stream.records)
        if disagreement is not None:
            result.reasons.append(disagreement)
        elif num_checked:
            result.token_count_source = "confirmed"
        return result


def _lacks_template(record: RequestRecord) -> bool:
    """Return whether the server refused a chat because the model has no chat template."""
    return record.status == HTTPStatus.BAD_REQUEST and "chat template" in (record.detail or "")


def measure(config: LoadConfig, arguments: Sequence[str], on_progress: OnProgress | None = None) -> RunResult:
    """Run the levels of `config` and return the result. Raises ConfigError if the run cannot start.

    Random token ids stay below the vocabulary that the server reports. `arguments` is the command line, which the
    fingerprint stores.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    start_s = time.monotonic()
    served_model_facts = run_coroutine(_served_facts(config), uvloop.new_event_loop)
    config = replace(config, workload=fit_vocabulary(config.workload, served_model_facts.get("vocab_size")))
    levels = run_levels(config, on_progress)
    verdict = worst_verdict((level.verdict for level in levels), "PARTIAL")
    monitoring_start = (
        "a level's release" if workload_task(config.workload).uploads else "after a level's release burst"
    )
    return RunResult(
        command="load",
        status="partial" if verdict in CUT_SHORT or len(levels) < len(config.levels) else "complete",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments, config.seed),
        settings=config.settings | served_model_facts,
        levels=levels,
        verdict=verdict,
        notes=[
            *model_notes(served_model_facts),
            *([] if config.stream else [NOT_STREAMED]),
            f"The client's event-loop lag and CPU utilization are measured from {monitoring_start} to its end.",
            *(reason for level in levels if level.verdict == "OK" for reason in level.reasons),
        ],
    )


async def _served_facts(config: LoadConfig) -> dict[str, Any]:
    target = resolve_target(config.url, config.api_key)
    name = config.model or await first_model(target)
    return {"model": public_name(name)} | await served_facts(target, name)


@contextmanager
def level_bars(levels: Sequence[Level], console: Console, name: str = "") -> Iterator[OnProgress]:
    """Show one progress bar per level, and yield the `on_progress` callback for `run_levels`.

    `name` is shown before each bar instead of the level's own name. The bar of a level that sends for a time shows the
    seconds.
    """
    progress_bars = progress_bar(console)
    totals = [level.num_requests if level.duration_s is None else level.duration_s for level in levels]
    tasks = [
        progress_bars.add_task(name or level.name, total=total, note="", start=False)
        for level, total in zip(levels, totals, strict=True)
    ]

    def on_progress(progress: Progress) -> None:
        progress_bars.start()
        level_idx = progress.level_idx
        task = tasks[level_idx]
        is_measured = progress.phase in ("running", "done")
        if is_measured and not progress_bars.tasks[task].started:
            progress_bars.start_task(task)
        failed_text = f", [red]{progress.num_failed:,} failed[/]" if is_measured and progress.num_failed else ""
        note = _PHASE_NOTES[progress.phase](progress) + failed_text
        done = progress.num_done
        if levels[level_idx].duration_s is not None:
            done = int(min(progress.elapsed_s, totals[level_idx]))
        progress_bars.update(task, completed=done if is_measured else 0, note=note)
        if progress.phase == "done":
            progress_bars.stop_task(task)

    with stop_progress(progress_bars):
        yield on_progress
