"""Runs `meltcore load` once: the levels, their progress bars and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import uvloop
from rich.console import Console

from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.served_model import model_notes, public_name
from meltcore.measure.documents.values.progress import progress_bar, stop_progress
from meltcore.measure.documents.verdicts import CUT_SHORT, worst_verdict
from meltcore.measure.load.config import Level, LoadConfig
from meltcore.measure.load.run.runner import run_levels
from meltcore.measure.load.run.streams import OnProgress, Progress
from meltcore.measure.load.tasks.task import workload_task
from meltcore.measure.load.wire.connection import resolve_target, run_coroutine
from meltcore.measure.load.wire.probe import first_model, served_facts

NOT_STREAMED = "Answers were not streamed: TTFT, ITL and TPOT are not measured."

_PHASE_NOTES: dict[str, Callable[[Progress], str]] = {
    "warm-up": lambda _: "warming up",
    "connecting": lambda progress: f"{progress.num_connections:,} connected",
    "running": lambda progress: f"{progress.in_flight:,} in flight",
    "done": lambda _: "done",
}


def measure(config: LoadConfig, arguments: Sequence[str], on_progress: OnProgress | None = None) -> RunResult:
    """Run the levels of `config` and return the result. Raises ConfigError if the run cannot start.

    `arguments` is the command line, which the fingerprint stores.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    start_s = time.monotonic()
    served_model_facts = run_coroutine(_served_facts(config), uvloop.new_event_loop)
    levels = run_levels(config, on_progress)
    verdict = worst_verdict((level.verdict for level in levels), "PARTIAL")
    return RunResult(
        command="load",
        status="partial" if verdict in CUT_SHORT else "complete",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments, config.seed),
        settings=config.settings | served_model_facts,
        levels=levels,
        verdict=verdict,
        notes=[
            *model_notes(served_model_facts),
            *([] if config.stream else [NOT_STREAMED]),
            f"The client's event-loop lag and CPU utilization are measured from {_monitored_from(config)} to its end.",
            *(reason for level in levels if level.verdict == "OK" for reason in level.reasons),
        ],
    )


def _monitored_from(config: LoadConfig) -> str:
    return "a level's release" if workload_task(config.workload).uploads else "after a level's release burst"


async def _served_facts(config: LoadConfig) -> dict[str, Any]:
    target = resolve_target(config.url, config.api_key)
    name = config.model or await first_model(target)
    return {"model": public_name(name)} | await served_facts(target, name)


@contextmanager
def level_bars(levels: Sequence[Level], console: Console, name: str = "") -> Iterator[OnProgress]:
    """Show one progress bar per level, and yield the `on_progress` callback for `run_levels`.

    `name` is shown before each bar instead of the level's own name.
    """
    progress_bars = progress_bar(console)
    tasks = [
        progress_bars.add_task(name or level.name, total=level.num_requests, note="", start=False) for level in levels
    ]

    def on_progress(progress: Progress) -> None:
        progress_bars.start()
        task = tasks[progress.level_idx]
        is_measured = progress.phase in ("running", "done")
        if is_measured and not progress_bars.tasks[task].started:
            progress_bars.start_task(task)
        failed_text = f", [red]{progress.num_failed:,} failed[/]" if is_measured and progress.num_failed else ""
        note = _PHASE_NOTES[progress.phase](progress) + failed_text
        progress_bars.update(task, completed=progress.num_done if is_measured else 0, note=note)
        if progress.phase == "done":
            progress_bars.stop_task(task)

    with stop_progress(progress_bars):
        yield on_progress
