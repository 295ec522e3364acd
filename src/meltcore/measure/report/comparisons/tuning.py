"""Builds the page of a tuning: the finding, a chart with the knee, and every start."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from meltcore.measure.documents.tuning import TUNING_FILE, Tuning, TuningPoint, gain, repeats_default
from meltcore.measure.documents.values.formatting import (
    NOT_MEASURED,
    format_change,
    format_number,
    format_percent,
    format_setting,
    format_time,
)
from meltcore.measure.documents.verdicts import Style
from meltcore.measure.report.load.run import machine_section, notes_box
from meltcore.measure.report.page.charts import WIDE, Bar, Line, Mark, bar_chart, line_chart
from meltcore.measure.report.page.page import Box, Cell, Column, Facts, Figure, Page, Row, Section, Table

_NUM_COLORS = 3  # the fourth color is that of the default settings
_Column = tuple[str, Callable[[TuningPoint], object | None], Callable[[TuningPoint], str]]
_COLUMNS: tuple[_Column, ...] = (
    ("TTFT\np50 ms", lambda p: p.ttft_ms, lambda p: format_number(p.ttft_ms)),
    ("ITL\np50 ms", lambda p: p.itl_ms, lambda p: format_number(p.itl_ms)),
    ("within\nlimits", lambda p: p.slo_attainment, lambda p: format_percent(p.slo_attainment)),
    ("peak\nrunning", lambda p: p.peak_running, lambda p: _format_or_dash(p.peak_running, ",")),
    ("preempted", lambda p: p.preemptions, lambda p: _format_or_dash(p.preemptions, ",")),
    ("correct", lambda p: p.answers, lambda p: f"{p.answers.correct}/{p.answers.asked}" if p.answers else NOT_MEASURED),
    ("identical\ntext", lambda p: p.answers, lambda p: str(p.answers.identical) if p.answers else NOT_MEASURED),
    (
        "logprobs\napart,\nmean",
        lambda p: p.answers and p.answers.logprob_diff_mean,
        lambda p: _format_or_dash(p.answers.logprob_diff_mean if p.answers else None, ".2g"),
    ),
    (
        "logprobs\napart,\nmost",
        lambda p: p.answers and p.answers.logprob_diff_max,
        lambda p: _format_or_dash(p.answers.logprob_diff_max if p.answers else None, ".2g"),
    ),
    ("ready\ns", lambda p: p.ready_s, lambda p: format_number(p.ready_s)),
)


def tuning_page(tuning: Tuning) -> Page:
    """Build the page: the finding, the chart, the calculated facts, and every start."""
    figure = tuning_figure(tuning)
    style: Style = "good" if tuning.has_result else "bad"
    columns = [Column(""), Column("value", align="text"), Column("source", align="text")]
    facts = Table(columns, [Row([fact.name, fact.value, fact.source]) for fact in tuning.facts])
    load = [(name, format_setting(value)) for name, value in tuning.load.items()]
    failures = Box("unsure", items=[f"{point.label}: {point.reason}" for point in tuning.points if point.reason])
    sections = [
        Section(blocks=[Box(style, lead=tuning.finding, console=False)]),
        Section("Output tokens per second", [figure] if figure is not None else []),
        Section("Every start", [points_table(tuning), *([failures] if failures.items else [])]),
        Section("Found and computed", [facts] if facts.rows else []),
        Section(blocks=notes_box(tuning.notes)),
        Section(
            column_sections=[machine_section(tuning.fingerprint), *([Section("Load", [Facts(load)])] if load else [])]
        ),
    ]
    return Page(
        title=f"meltcore tune {tuning.kind}",
        name=f"tune {tuning.kind}",
        subtitle=f"{format_time(tuning.taken)} · {tuning.command}",
        sections=[section for section in sections if section.blocks or section.column_sections],
        footer=f"meltcore tune · the same numbers stand in {TUNING_FILE}",
        conclusion=tuning.finding,
    )


def points_table(tuning: Tuning) -> Table:
    """Build a table with one row per start; a mark shows the knee, the best setting, and failures.

    Only columns for which some start has a value are shown.
    """
    default_point = tuning.default
    columns: list[_Column] = [
        ("output\ntok/s", lambda p: p.output_tokens_per_s, lambda p: format_number(p.output_tokens_per_s)),
        ("gain", lambda p: gain(p, default_point), lambda p: format_change(gain(p, default_point))),
        *_COLUMNS,
    ]
    columns = [column for column in columns if any(column[1](point) is not None for point in tuning.points)]
    rows = []
    for index, point in enumerate(tuning.points):
        failure = "" if point.ok else "did not run" if point.ready_s is None else "failed"
        mark = "knee" if index == tuning.knee else "best" if index == tuning.best else failure
        style: Style = "good" if mark in ("knee", "best") else "bad" if mark else ""
        label = point.label + " (the default again)" * repeats_default(tuning, point)
        cells: list[str | Cell] = [label, *(format_value(point) for _, _, format_value in columns)]
        rows.append(Row([*cells, Cell(mark, style, tag=bool(mark))], is_emphasized=mark == "knee"))
    all_columns = [
        Column("setting"),
        *(Column(name.replace("\n", " "), console=name) for name, _, _ in columns),
        Column(" "),
    ]
    return Table(all_columns, rows, is_compact=True)


def tuning_figure(tuning: Tuning) -> Figure | None:
    """Draw the output rates of a tuning. Returns None if no start worked, and for a search of context limits.

    Batching has one line per token budget, over concurrent sequences; precision has one bar per precision.
    """
    if tuning.kind == "batching":
        lines = _batching_lines(tuning)
        chart = _batching_chart(tuning, lines)
        legend = [(line.name, line.color, False) for line in lines]
        title, caption = "against concurrent sequences", "the ring marks the knee; hollow dots missed the limits"
    else:
        chart, legend = (_precision_chart(tuning) if tuning.kind == "precision" else None), []
        title, caption = "of each precision", "one start each; a gain needs a comparison"
    return None if chart is None else Figure(f"Output tokens per second {title}", chart, legend, caption=caption)


def _batching_lines(tuning: Tuning) -> list[Line]:
    budgets = dict.fromkeys(point.settings.get("max_num_batched_tokens") for point in tuning.points if point.settings)
    return [
        Line(
            "the server's own budget" if budget is None else f"{budget:,} tokens per step",
            index % _NUM_COLORS + 1,
            [
                _point_mark(tuning, point_index)
                for point_index, point in enumerate(tuning.points)
                if point.settings
                and point.output_tokens_per_s
                and point.settings.get("max_num_batched_tokens") == budget
            ],
        )
        for index, budget in enumerate(budgets)
    ]


def _point_mark(tuning: Tuning, point_index: int) -> Mark:
    point = tuning.points[point_index]
    missed_limits = not point.ok or (point.slo_attainment is not None and point.slo_attainment < 0.95)
    tooltip = f"{format_number(point.output_tokens_per_s)} tok/s" + ", limits missed" * missed_limits
    return Mark(
        int(point.settings["max_num_seqs"]),
        point.output_tokens_per_s,
        tooltip,
        missed_limits,
        point_index == tuning.knee,
    )


def _batching_chart(tuning: Tuning, lines: list[Line]) -> Markup | None:
    rate = None if tuning.default is None else tuning.default.output_tokens_per_s
    return line_chart(
        lines,
        label="Output tokens per second against concurrent sequences",
        x_title="concurrent sequences",
        frame=WIDE,
        reference=None if rate is None else (rate, f"default settings: {format_number(rate)}"),
    )


def _precision_chart(tuning: Tuning) -> Markup | None:
    bars = [
        Bar(
            point.label,
            point.output_tokens_per_s,
            note=format_change(relative_gain)
            if point.settings and (relative_gain := gain(point, tuning.default)) is not None
            else "",
            is_faded=not point.settings,
        )
        for point in tuning.points
        if point.ok and point.output_tokens_per_s
    ]
    failed_labels = ", ".join(point.label for point in tuning.points if not point.ok)
    footnote = f"{NOT_MEASURED} did not run: {failed_labels}" if failed_labels else ""
    return bar_chart(bars, label="Output tokens per second of each precision", footnote=footnote) if bars else None


def _format_or_dash(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else format(value, form)
