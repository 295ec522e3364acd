"""Builds the page of a profile and its lines on the console, which show the use of each GPU's time."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup

from meltcore.measure.documents.gaps import CAUSES, NOT_COMPUTING, BudgetRow, GapReport, GapTotal, GpuProfile
from meltcore.measure.documents.values.formatting import NOT_MEASURED, format_percent, format_time
from meltcore.measure.report.page.charts import stacked_bar
from meltcore.measure.report.page.page import (
    Box,
    Cell,
    Column,
    Figure,
    Page,
    Row,
    Section,
    Table,
    Text,
    numeric_columns,
)

_MAX_NAME_CHARS = 44  # characters kept of a kernel's name on the console
_ARGUMENTS = re.compile(r"(?<=\w)[<(].*", re.DOTALL)


def profile_page(profile: GpuProfile) -> Page:
    """Build the page: for each GPU the warnings, result, causes, step budget, gap sizes and kernel pairs."""
    is_untrusted = any(report.untrusted for report in profile.reports)
    return Page(
        title="meltcore profile",
        name="profile",
        subtitle=f"{profile.source} · read {format_time(profile.taken)}",
        badge="UNTRUSTED" if is_untrusted else "TRUSTED",
        style="bad" if is_untrusted else "good",
        sections=[section for report in profile.reports for section in _sections(report)],
        footer="meltcore profile · recoverable time is an upper bound: all time not computing, less that without work",
        conclusion="\n".join(profile_headline(report) for report in profile.reports),
    )


def profile_headline(report: GapReport) -> str:
    """Return the recoverable time and its largest cause, or the reason why there is no result."""
    if report.untrusted:
        return "The trace holds less than the GPU did: it does not say how idle the GPU was."
    recoverable = [gap_total for gap_total in report.by_cause if gap_total.name != "no work"]
    if not recoverable:
        return "The GPU computed whenever there was work."
    largest = recoverable[0]
    return (
        f"The GPU computed {format_percent(report.computing_us / report.window_us)} of the time; at most "
        f"{format_percent(report.recoverable_share)} is idle time to recover. Most of it: {largest.name} "
        f"({format_percent(largest.total_us / report.window_us)}): {CAUSES[largest.name]}. "  # type: ignore[index]
        "How fast the kernels are is not judged."
    )


def window_bar(report: GapReport) -> Markup:
    """Draw the window as a bar: computing time by groups of kernels, then idle time by cause."""
    groups, causes = _window_parts(report)
    segments = [
        (name, total, f"bar c{index % 2 * 2 + 1}" if index < len(groups) else f"area c{index % 2 * 2 + 2} bar pale")
        for index, (name, total) in enumerate([*groups, *causes])
    ]
    return stacked_bar(segments, report.window_us, f"GPU {report.device}: where the time went")


def window_legend(report: GapReport) -> list[tuple[str, int, bool]]:
    """Return the legend of the bar: all parts in order, with their shares. In the bar, narrow parts have no name."""
    groups, causes = _window_parts(report)
    colors = [index % 2 * 2 + 1 + (index >= len(groups)) for index in range(len(groups) + len(causes))]
    return [
        (f"{name} {format_percent(total / report.window_us)}", color, False)
        for (name, total), color in zip([*groups, *causes], colors, strict=True)
    ]


def _window_parts(report: GapReport) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Return the groups of computing kernels and the causes of idle time, each as (name, microseconds)."""
    groups = [(row.name, row.ran_us) for row in report.budget if row.name not in NOT_COMPUTING and row.ran_us]
    return groups, [(gap_total.name, gap_total.total_us) for gap_total in report.by_cause]


def budget_title(report: GapReport) -> str:
    """Return the title of the time budget of an average step or of the whole window."""
    if report.steps is None:
        return "the whole window (nothing in the trace marks a step: --step NAME says what does)"
    return f"an average step of {report.steps:,}, counted by {report.step_marker}"


def budget_rows(report: GapReport) -> list[tuple[str, list[str]]]:
    """Return a row (group, cells) per group of kernels, and a last row with the sums.

    The cells are count, time and its fraction of the window, idle time before, and its fraction of all idle time. Times
    are in microseconds of an average step, or in milliseconds of the whole window if the trace has no step markers.
    """
    idle_us = sum(row.idle_before_us for row in report.budget)
    count, ran_us = sum(row.count for row in report.budget), sum(row.ran_us for row in report.budget)
    total = BudgetRow(name="all", count=count, ran_us=ran_us, idle_before_us=idle_us)
    steps, scale = (1, 1e-3) if report.steps is None else (report.steps, 1.0)
    return [
        (
            row.name,
            [
                f"{row.count / steps:,.1f}" if steps > 1 else f"{row.count:,}",
                f"{row.ran_us / steps * scale:,.1f}",
                format_percent(row.ran_us / report.window_us),
                f"{row.idle_before_us / steps * scale:,.1f}",
                format_percent(row.idle_before_us / idle_us) if idle_us else NOT_MEASURED,
            ],
        )
        for row in [*report.budget, total]
    ]


def _sections(report: GapReport) -> list[Section]:
    gpu = f"GPU {report.device}"
    unit = "ms" if report.steps is None else "us per step"
    columns = [
        Column("Group"),
        *numeric_columns("count", unit, "of the time"),
        Column(f"idle before, {unit}", console=f"idle before,\n{unit}"),
        Column("of all idle"),
    ]
    rows = budget_rows(report)
    last = len(rows) - 1
    note = (
        "Where kernels overlap, a moment is that of the one which began first. Collectives and copies have what they "
        'ran alone. "Idle before" is the time in which nothing ran until one of the group began.'
    )
    box = Box(
        "bad" if report.untrusted else "good",
        gpu,
        lead=profile_headline(report),
        items=report.untrusted,
        console=bool(report.untrusted),
    )
    pair_rows = [
        Row([
            _kernel_cell(pair.before),
            _kernel_cell(pair.after),
            f"{pair.count:,}",
            f"{pair.median_us:,.1f}",
            f"{pair.total_us / 1000:,.3f}",
            pair.cause,
        ])
        for pair in report.pairs
    ]  # fmt: skip
    return [
        Section(blocks=[box]),
        Section(
            f"Where the time went, {gpu}",
            [
                Figure("", window_bar(report), window_legend(report)),
                Text(_summary_line(report), "small"),
                _gap_table("Cause", report.by_cause, report),
            ],
        ),
        Section(
            f"Where a step's time goes, {gpu}",
            [
                Text(f"Of {budget_title(report)}:", "small"),
                Table(
                    columns,
                    [Row([name, *cells], name == "all", index + 1 == last) for index, (name, cells) in enumerate(rows)],
                ),
                Text(note, "small", console=False),
            ],
        ),
        Section("By size", [_gap_table("Size", [part for part in report.by_size if part.count], report)]),
        Section(
            "Kernels around the largest repeated gaps",
            [
                Table(
                    [
                        Column("Before", align="text"),
                        Column("After", align="text"),
                        *numeric_columns("Count", "Median us", "Total ms", "Cause"),
                    ],
                    pair_rows,
                )
            ],
        ),
    ]


def _summary_line(report: GapReport) -> str:
    def format_count(count: int, noun: str, plural: str = "s") -> str:
        return f"{count:,} {noun}{plural if count != 1 else ''}"

    return (
        f"GPU {report.device}: {report.window_us / 1000:,.2f} ms, computing "
        f"{format_percent(report.computing_us / report.window_us)}, busy with anything "
        f"{format_percent(report.busy_us / report.window_us)}; {format_count(report.kernels, 'kernel')} on "
        f"{format_count(report.streams, 'stream')}, {report.graph_kernels:,} of them from "
        f"{format_count(report.graph_launches, 'graph launch', 'es')}"
    )


def _gap_table(title: str, gap_totals: Sequence[GapTotal], report: GapReport) -> Table:
    rows = [
        Row([
            Cell(gap_total.name, small_print=CAUSES.get(gap_total.name, "")),  # type: ignore[call-overload]
            f"{gap_total.count:,}",
            f"{gap_total.total_us / 1000:,.3f}",
            format_percent(gap_total.total_us / report.window_us),
        ])
        for gap_total in gap_totals
    ]  # fmt: skip
    return Table(numeric_columns(title, "Gaps", "Total ms", "Of the time"), rows)


def _kernel_cell(name: str) -> Cell:
    """Return a cell with a kernel's C++ name without its return type, template arguments and parameters."""
    short_name = _ARGUMENTS.sub("", name.removeprefix("void "))
    return Cell(
        short_name,
        console_text=short_name if len(short_name) <= _MAX_NAME_CHARS else f"{short_name[: _MAX_NAME_CHARS - 1]}…",
        title=name,
    )
