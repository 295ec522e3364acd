"""One level of the demo: streaming chat requests of held-out problems, all released together."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TaskID

from meltcore.load import LoadConfig, Progress, run_levels
from meltcore.results.progress import progress_bar
from meltcore.results.schema import LevelResult

FEWEST_REQUESTS = 200  # so that a level's accuracy compares with that of the 200 unloaded problems
SHORT_FROM = 1_000  # from this many at once on, short problems: the level is about requests, not about tokens


def workload_of(concurrency: int) -> str:
    return "problems:short" if concurrency >= SHORT_FROM else "problems:mixed"


def run_level(
    address: str, model: str, concurrency: int, seed: int, records_path: Path, console: Console
) -> LevelResult:
    """Load `address` with `concurrency` requests at once, in 200 requests at least, under a progress bar."""
    requests = max(FEWEST_REQUESTS, concurrency)
    config = LoadConfig(
        url=address,
        model=model,
        concurrency=(concurrency,),
        requests=requests,
        workload=workload_of(concurrency),
        seed=seed + concurrency,  # problems of its own for each level
        records_path=records_path,
    )
    with progress_bar(console) as bars:
        task = bars.add_task(f"{concurrency:,} at once", total=requests, note="")
        [level] = run_levels(config, lambda progress: _show(bars, task, progress))
    return level


def _show(bars: Bars, task: TaskID, progress: Progress) -> None:
    if progress.phase == "warm-up":
        bars.update(task, note="warming up")
        return
    if progress.phase == "connecting":
        bars.update(task, note=f"{progress.connected:,} connected")
        return
    failed = f", [red]{progress.failed:,} failed[/]" if progress.failed else ""
    bars.update(task, completed=progress.done, note=f"{progress.in_flight:,} in flight{failed}")
