"""Prints progress bars and one line per check during a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meltcore.measure.documents.schema import CheckResult
from meltcore.measure.documents.verdicts import STYLE_COLORS, style_of


def progress_bar(console: Console) -> Progress:
    """Return a progress display with one bar per task: description, bar, count, time and the field `note`."""
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


@contextmanager
def answer_progress(
    console: Console, is_shown: bool = True, description: str = "held-out problems"
) -> Iterator[Callable[[int, int, int], None] | None]:
    """Show a progress bar over problems. Yields the callback `on_answer(done, correct, total)` that advances the bar.

    Yields None if `is_shown` is False. The bar appears with the first call, so a run that fails before shows none.
    """
    if not is_shown:
        yield None
        return
    progress = progress_bar(console)
    task = progress.add_task(description, total=None, note="")

    def show(done: int, correct: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total, note=f"{correct} correct")

    with stop_progress(progress):
        yield show


@contextmanager
def stop_progress(progress: Progress) -> Iterator[None]:
    """Run the block, and then stop the progress display if it was started.

    Without a terminal, Rich prints an empty line when an unstarted display is stopped.
    """
    try:
        yield
    finally:
        if progress.live.is_started:
            progress.stop()


def dim_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints progress messages in dim text."""
    return lambda text: console.print(text, style="dim", markup=False, highlight=False)


def warning_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints messages of a server's start and end in yellow."""
    return lambda text: console.print(text, style="yellow", markup=False, highlight=False)


def print_check(console: Console, check: CheckResult) -> None:
    """Print one check or gate with its status in color."""
    style = STYLE_COLORS[style_of(check.status)]
    detail = f"[dim]: {escape(check.detail)}[/]" if check.detail else ""
    console.print(f"[{style}]{check.status}[/]  {escape(check.name)}{detail}", highlight=False)
