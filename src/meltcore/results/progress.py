"""What people see while something is measured: progress bars and one line a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meltcore.results.schema import CheckResult


def progress_bar(console: Console) -> Progress:
    """One bar a task: description, bar, done of total, time. `fields[note]` is free text at the end."""
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


@contextmanager
def answers_bar(console: Console, shown: bool = True) -> Iterator[Callable[[int, int, int], None] | None]:
    """A bar over the held-out problems; yields `on_answer(done, right, asked)`, or None where it is not to be shown."""
    if not shown:
        yield None
        return
    with progress_bar(console) as progress:
        task = progress.add_task("held-out problems", total=None, note="")
        yield lambda done, right, asked: progress.update(task, completed=done, total=asked, note=f"{right} right")


def print_check(console: Console, check: CheckResult) -> None:
    style = "green" if check.status == "PASS" else "bold red"
    detail = f" [dim]{escape(check.detail)}[/]" if check.detail else ""
    console.print(f"[{style}]{check.status}[/]  {escape(check.name)}{detail}", highlight=False)
