"""Progress bars of a load run, one a level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from meltcore.load.config import Level
from meltcore.load.runner import OnProgress, Progress
from meltcore.results.progress import progress_bar, stopped_at_the_end

_NOTES: dict[str, Callable[[Progress], str]] = {
    "warm-up": lambda progress: "warming up",
    "connecting": lambda progress: f"{progress.connected:,} connected",
    "running": lambda progress: f"{progress.in_flight:,} in flight",
    "done": lambda progress: "done",
}


@contextmanager
def level_bars(levels: Sequence[Level], console: Console) -> Iterator[OnProgress]:
    """Bars for `levels`, there from the first progress on; yields what `run_levels` takes as `on_progress`."""
    bars = progress_bar(console)
    tasks = [bars.add_task(level.name, total=level.requests, note="", start=False) for level in levels]

    def show(progress: Progress) -> None:
        bars.start()
        task = tasks[progress.position]
        measured = progress.phase in ("running", "done")
        if measured and not bars.tasks[task].started:
            bars.start_task(task)
        failed = f", [red]{progress.failed:,} failed[/]" if measured and progress.failed else ""
        note = _NOTES[progress.phase](progress) + failed
        bars.update(task, completed=progress.done if measured else 0, note=note)
        if progress.phase == "done":
            bars.stop_task(task)

    with stopped_at_the_end(bars):
        yield show
