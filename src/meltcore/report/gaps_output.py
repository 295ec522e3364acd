"""Gap reports for the console."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meltcore.results.gaps import CAUSES, BudgetRow, GapReport, Part
from meltcore.results.wording import NOT_MEASURED, percent

_NAME = 44  # characters kept of a kernel's name
_ARGUMENTS = re.compile(r"(?<=\w)[<(].*", re.DOTALL)


def print_gaps(reports: Sequence[GapReport], console: Console) -> None:
    """Reasons for distrust first, then where the time went, the step's budget, the pairs, and the sentence."""
    for report in reports:
        for reason in report.untrusted:
            console.print(f"[red]untrusted[/]: {escape(reason)}", highlight=False)
        console.print(f"GPU {report.device}: {summary(report)}", highlight=False)
        _print_parts("not computing, by cause", report.by_cause, report, console)
        _print_parts("by size", [part for part in report.by_size if part.count], report, console)
        _print_budget(report, console)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for head in ("before", "after"):
            table.add_column(head, overflow="fold")
        for head in ("count", "median us", "total ms", "cause"):
            table.add_column(head, justify="right", no_wrap=True)
        for pair in report.pairs:
            figures = (f"{pair.count:,}", f"{pair.median_us:,.1f}", f"{pair.total_us / 1000:,.2f}", pair.cause)
            table.add_row(escape(short(pair.before)), escape(short(pair.after)), *figures)
        console.print(table)
        console.print(f"[bold]{escape(headline(report))}[/]", highlight=False)


def summary(report: GapReport) -> str:
    return (
        f"{report.window_us / 1000:,.2f} ms, computing {percent(report.computing_us / report.window_us)}, "
        f"busy with anything {percent(report.busy_us / report.window_us)}; {_count(report.kernels, 'kernel')} on "
        f"{_count(report.streams, 'stream')}, {report.graph_kernels:,} of them from "
        f"{_count(report.graph_launches, 'graph launch', 'es')}"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def headline(report: GapReport) -> str:
    """The answer to the one question, or why there is none."""
    if report.untrusted:
        return "The trace holds less than the GPU did: no share of it says how idle the GPU was."
    lost = [part for part in report.by_cause if part.name != "no work"]
    if not lost:
        return "The GPU computed whenever there was work."
    worst = lost[0]
    return (
        f"At most {percent(report.recoverable_share)} of the time could be won. Most of it: {worst.name} "
        f"({percent(worst.total_us / report.window_us)}): {CAUSES[worst.name]}."  # type: ignore[index]
    )


def budget_title(report: GapReport) -> str:
    if report.steps is None:
        return "the whole window (nothing in the trace marks a step: --step NAME says what does)"
    return f"an average step of {report.steps:,}, counted by {report.steps_by}"


def budget_unit(report: GapReport) -> str:
    return "ms" if report.steps is None else "us a step"


def budget_rows(report: GapReport) -> list[tuple[str, list[str]]]:
    """Each group with its count, time, share of the whole, idle time in front of it, and that one's share of all idle.

    Of an average step in microseconds; of the whole window in milliseconds where nothing marks steps.
    """
    steps, scale = (1, 1e-3) if report.steps is None else (report.steps, 1.0)
    idle_us = sum(row.before_us for row in report.budget)
    rows = [_budget_cells(row, steps, scale, report.window_us, idle_us) for row in report.budget]
    whole = BudgetRow(
        name="all",
        count=sum(row.count for row in report.budget),
        ran_us=sum(row.ran_us for row in report.budget),
        before_us=idle_us,
    )
    return [*rows, _budget_cells(whole, steps, scale, report.window_us, idle_us)]


def plain_name(kernel: str) -> str:
    """Without the return type, template arguments and parameters of C++, which fill screens."""
    return _ARGUMENTS.sub("", kernel.removeprefix("void "))


def short(kernel: str) -> str:
    name = plain_name(kernel)
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def _budget_cells(row: BudgetRow, steps: int, scale: float, window_us: float, idle_us: float) -> tuple[str, list[str]]:
    count = f"{row.count / steps:,.1f}" if steps > 1 else f"{row.count:,}"
    idle = percent(row.before_us / idle_us) if idle_us else NOT_MEASURED
    times = [f"{value / steps * scale:,.1f}" for value in (row.ran_us, row.before_us)]
    return row.name, [count, times[0], percent(row.ran_us / window_us), times[1], idle]


def _print_budget(report: GapReport, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(budget_title(report), overflow="fold")
    unit = budget_unit(report)
    for head in ("count", unit, "of the time", f"idle before,\n{unit}", "of all idle"):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    rows = budget_rows(report)
    for place, (name, figures) in enumerate(rows):
        table.add_row(name, *figures, end_section=place + 2 == len(rows), style="bold" if name == "all" else None)
    console.print(table)


def _print_parts(title: str, parts: Sequence[Part], report: GapReport, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(title, no_wrap=True)
    for head in ("stretches", "total ms", "of the time"):
        table.add_column(head, justify="right", no_wrap=True)
    for part in parts:
        share = percent(part.total_us / report.window_us)
        table.add_row(part.name, f"{part.count:,}", f"{part.total_us / 1000:,.3f}", share)
    console.print(table)
