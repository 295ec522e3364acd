"""What people see while something is measured: progress bars and one line a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meltcore.results.schema import CheckResult, Gate


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
def answers_bar(
    console: Console, shown: bool = True, what: str = "held-out problems"
) -> Iterator[Callable[[int, int, int], None] | None]:
    """A bar over problems; yields `on_answer(done, right, asked)`, or None where it is not to be shown.

    The bar appears when that is first called: what cannot begin leaves none behind.
    """
    if not shown:
        yield None
        return
    progress = progress_bar(console)
    task = progress.add_task(what, total=None, note="")

    def show(done: int, right: int, asked: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=asked, note=f"{right} right")

    with stopped_at_the_end(progress):
        yield show


@contextmanager
def stopped_at_the_end(progress: Progress) -> Iterator[None]:
    """Bars that may never have been started, which Rich ends with an empty line where there is no terminal."""
    try:
        yield
    finally:
        if progress.live.is_started:
            progress.stop()


def quietly(console: Console) -> Callable[[str], None]:
    """Prints what people should know while they wait, and need not read."""
    return lambda text: console.print(text, style="dim", markup=False, highlight=False)


_STYLES = {"PASS": "green", "FAIL": "bold red", "NOT RUN": "yellow"}


def print_check(console: Console, check: CheckResult | Gate) -> None:
    style = _STYLES[check.status]
    detail = f"[dim]: {escape(check.detail)}[/]" if check.detail else ""
    console.print(f"[{style}]{check.status}[/]  {escape(check.name)}{detail}", highlight=False)
