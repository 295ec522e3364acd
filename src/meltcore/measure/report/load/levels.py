"""Builds tables and charts of levels of any task: of several levels over the load, and of one level over time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meltcore.measure.documents.schema import Distribution, GpuTimeline, LevelResult
from meltcore.measure.documents.values.definitions import DEFINITIONS, Definition
from meltcore.measure.documents.values.formatting import format_load, format_number, format_percent
from meltcore.measure.documents.values.percentiles import SAMPLES_NEEDED
from meltcore.measure.load.tasks.task import (
    Latency,
    MeasuredTask,
    by_task,
    default_task,
    define_metric,
    distribution_of,
    task_of,
    tasks,
)
from meltcore.measure.report.page.charts import (
    NARROW,
    NUM_COLORS,
    Line,
    Mark,
    Strip,
    has_curve,
    line_chart,
    time_strips,
)
from meltcore.measure.report.page.page import (
    Cell,
    Column,
    Figure,
    Row,
    Table,
    numeric_columns,
    percentile_cell,
    verdict_cell,
)

# Definitions of the default task's metrics that hold for other tasks too.
_COMMON_KEYS = ("e2e_ms", "queue_delay_ms", "steady", "goodput_per_s", "peak_in_flight", "accuracy", "succeeded")
# (key, title, one unit of the axis, the least end of the axis)
_GPU_STRIPS = (
    ("sm_active_percent", "SM active, %", 1.0, 100.0),
    ("dram_bandwidth_percent", "DRAM bandwidth, %", 1.0, 100.0),
    ("power_w", "power, W", 1.0, 0.0),
    ("memory_used_bytes", "memory used, GiB", 2.0**30, 0.0),
)


def levels_tables(levels: Sequence[LevelResult]) -> list[Table]:
    """Build one table per task, with one row per level, by its load."""
    return [_levels_table(task, sorted(group, key=offered_load)) for task, group in by_task(levels).items()]


def _levels_table(task: MeasuredTask, levels: Sequence[LevelResult]) -> Table:
    """Build a table with one row per level of one task: requests, accuracy, throughput, latencies."""
    is_open = any(level.load_kind == "open" for level in levels)
    has_slo = any(level.slo for level in levels)
    has_accuracy = task is default_task() or any(level.accuracy is not None for level in levels)
    has_several_workloads = len({level.workload for level in levels}) > 1
    sources = sorted({level.task.source_unit or "" for level in levels if level.task is not None} - {""})
    source_head = f"source {' or '.join(sources)}s/s"
    throughput_head = task.unit.head or task.unit.unit
    columns = [
        Column("Load", console="req/s" if is_open else "conn."),
        Column("sent", "Requests"),
        Column("answered", "Requests", console=None),
        Column("failed", "Requests"),
        Column("peak in flight", "Requests", console="peak"),
        *([Column("Accuracy", console="right")] if has_accuracy else []),
        Column("whole", throughput_head, console=task.unit.short_unit),
        Column("steady", throughput_head, console=None),
        *([Column(source_head, console=source_head.replace(" ", "\n"))] if sources else []),
        *_latency_columns(task.latencies),
        *([Column("Goodput, req/s", console="good\nreq/s")] if has_slo else []),
        Column("Verdict", console=" "),
    ]
    rows = []
    for level in levels:
        console_load = format_number(level.rate_per_s) if level.load_kind == "open" else f"{level.concurrency:,}"
        workload = (level.workload or "not named") if has_several_workloads else ""
        source_per_s = None if level.task is None else level.task.source_per_s
        cells: list[str | Cell] = [
            Cell(format_load(level), small_print=workload, console_text=console_load),
            f"{level.requests:,}",
            f"{level.succeeded:,}",
            _failed_cell(level),
            f"{level.peak_in_flight:,}",
            *([format_percent(level.accuracy)] if has_accuracy else []),
            format_number(level.throughput if level.requests else None),
            Cell("none", "faint") if level.steady is None else format_number(level.steady.rate),
            *([format_number(source_per_s)] if sources else []),
            *_latency_cells(level, task.latencies),
            *([format_number(level.goodput_per_s)] if has_slo else []),
            verdict_cell(level.verdict),
        ]
        rows.append(Row(cells))
    return Table(columns, rows, is_compact=True)


def throughput_table(levels: Sequence[LevelResult]) -> Table:
    """Build a table of `eval throughput`: token rates, latencies and spot checks of each level."""
    headers = ("sent", "failed", "total\ntok/s", "output\ntok/s")
    latencies = [each for each in default_task().latencies if each.console[0] is not None]
    columns = [
        Column("concurrency", console="conn."),
        *numeric_columns(*headers),
        *_latency_columns(latencies),
        *numeric_columns("spot\nchecks", " "),
    ]
    rows = []
    for level in levels:
        checks = level.checks
        spot_checks = "NOT RUN" if checks is None else f"{checks.spot_checks_correct} of {checks.spot_checks}"
        rates = [format_number(rate) for rate in (level.total_tokens_per_s, level.output_tokens_per_s)]
        first_cells: list[str | Cell] = [f"{level.concurrency:,}", f"{level.requests:,}", _failed_cell(level)]
        last_cells = [*_latency_cells(level, latencies), spot_checks, verdict_cell(level.verdict)]
        rows.append(Row([*first_cells, *rates, *last_cells]))
    return Table(columns, rows)


def _latency_columns(latencies: Sequence[Latency]) -> list[Column]:
    """Return the columns of the median and 99th percentile of each latency."""
    return [
        Column(name, latency.head, console)
        for latency in latencies
        for name, console in zip(("p50", "p99"), latency.console, strict=True)
    ]


def _latency_cells(level: LevelResult, latencies: Sequence[Latency]) -> list[str | Cell]:
    return [
        percentile_cell(distribution_of(level, latency.key), name) for latency in latencies for name in ("p50", "p99")
    ]


def _failed_cell(level: LevelResult) -> Cell:
    return Cell(f"{level.failed:,}", "warning" if level.failed else "")


def named_distributions(task: MeasuredTask, level: LevelResult) -> list[tuple[str, Distribution]]:
    """Return the distributions of a level by name. Distributions of times are in milliseconds."""
    definitions = map(define_metric, task.distributions)
    return [(each.name + " (ratio)" * (each.unit == "ratio"), distribution_of(level, each.key)) for each in definitions]


def relevant_definitions(shown_tasks: Collection[MeasuredTask]) -> list[Definition]:
    """Return the definitions of the metrics of `shown_tasks`, or of the default task if there are none."""
    task_definitions = [
        definition for task in tasks().values() if task in shown_tasks for definition in task.definitions
    ]
    includes_common = not shown_tasks or default_task() in shown_tasks
    return [
        *task_definitions,
        *(definition for definition in DEFINITIONS if includes_common or definition.key in _COMMON_KEYS),
    ]


def load_charts(levels: Sequence[LevelResult]) -> list[Figure]:
    """Draw throughput and latencies over load, for each task and kind of loop (closed, open) with several levels."""
    same_loops = [
        [level for level in same_task if level.load_kind == kind]
        for kind in ("closed", "open")
        for same_task in by_task(levels).values()
    ]
    return [figure for same_loop in same_loops if len(same_loop) > 1 for figure in _charts(same_loop)]


def timeline_figure(level: LevelResult) -> Figure | None:
    """Draw tokens, requests, latencies and GPU metrics of a level over time.

    Returns None if nothing was recorded.
    """
    if len(level.timeline) < 2:
        return None
    points = level.timeline
    rates = [(point.t_s, point.rate) for point in points]
    strips = [
        Strip("output tokens/s" if level.task is None else task_of(level).unit.unit, [("", 1, rates)], is_filled=True),
        Strip("in flight", [("", 2, [(point.t_s, float(point.in_flight)) for point in points])], is_filled=True),
    ]
    # Latencies are drawn where GPUs stand below them to be read against; the tables hold them anyway.
    for title, name in (("mean TTFT, ms", "ttft_ms"), ("mean ITL, ms", "itl_ms")):
        latencies = [(point.t_s, getattr(point, name)) for point in points]
        if level.gpus and any(value is not None for _, value in latencies):
            strips.append(Strip(title, [("", 3, latencies)]))
    strips += _gpu_strips(level.gpus)
    legend = [(gpu.gpu, index % NUM_COLORS + 1, False) for index, gpu in enumerate(level.gpus)]
    steady = level.steady
    return Figure(
        format_load(level),
        time_strips(
            strips,
            duration_s=points[-1].t_s,
            label=f"{format_load(level)}: {', '.join(strip.title for strip in strips)}",
            x_title="seconds since release",
            frame=NARROW,
            spans=[] if steady is None else [(steady.start_s, steady.end_s, "steady window", "")],
        ),
        legend=legend if len(legend) > 1 else [],
        caption=f"{level.gpus[0].gpu}, {level.gpus[0].name}" if len(legend) == 1 else "",
        note="; ".join(f"{gpu.gpu}, {key}: {reason}" for gpu in level.gpus for key, reason in gpu.absent.items()),
    )


def _charts(levels: Sequence[LevelResult]) -> list[Figure]:
    note = f"p95 needs {SAMPLES_NEEDED['p95']} samples, p99 {SAMPLES_NEEDED['p99']}."
    x_title = "Requests per second offered" if levels[0].load_kind == "open" else "Concurrent requests"
    steady = [None if level.steady is None else level.steady.rate for level in levels]
    rates = [level.throughput if level.requests else None for level in levels]  # an interruption sends none
    unit_words = task_of(levels[0]).unit
    panels = [
        (
            unit_words.title,
            unit_words.short_unit,
            "",
            [
                _level_line("whole level", 1, levels, rates, unit_words.short_unit),
                _level_line("steady window", 3, levels, steady, unit_words.short_unit),
            ],
        )
    ]
    for latency in task_of(levels[0]).latencies:
        distributions = [distribution_of(level, latency.key) for level in levels]
        lines = [
            _level_line(name, color, levels, [getattr(each, name) for each in distributions], latency.unit)
            for name, color in (("p50", 1), ("p95", 3), ("p99", 2))
        ]
        panels.append((latency.title, latency.unit, note, lines))
    figures = []
    for title, unit, note_text, lines in panels:
        label = f"{title} against load"
        chart = line_chart(lines, label=label, x_title=x_title, unit=unit, log_y=unit == "ms")
        if chart is not None and has_curve(lines):
            legend = [
                (line.name, line.color, line.dashed) for line in lines if any(mark.y is not None for mark in line.marks)
            ]
            figures.append(Figure(title, chart, legend, note_text))
    return figures


def _level_line(
    name: str, color: int, levels: Sequence[LevelResult], values: Sequence[float | None], unit: str
) -> Line:
    """Return the chart line of `values` over the offered load of levels.

    The line has a gap between different workloads.
    """
    marks: list[Mark] = []
    workload = None
    for level, value in sorted(
        zip(levels, values, strict=True), key=lambda level_and_value: offered_load(level_and_value[0])
    ):
        tooltip = f"{format_load(level)}: {name} {format_number(value)} {unit}"
        if level.workload != workload:
            marks.append(Mark(offered_load(level), None))
            workload = level.workload
        marks.append(Mark(offered_load(level), value, tooltip))
    return Line(name, color, marks, dashed=name == "steady window")


def offered_load(level: LevelResult) -> float:
    """Return what tables and charts are sorted by: requests per second of an open loop, else concurrent requests."""
    return level.rate_per_s or 0.0 if level.load_kind == "open" else float(level.concurrency)


def _gpu_strips(gpus: Sequence[GpuTimeline]) -> list[Strip]:
    """Return one strip per metric that any GPU has, with one line per GPU."""
    strips = []
    for key, title, unit, min_axis_top in _GPU_STRIPS:
        lines = [
            (
                "",
                gpu_index % NUM_COLORS + 1,
                [
                    (bucket * gpu.bucket_s, None if value is None else value / unit)
                    for bucket, value in enumerate(gpu.values[key])
                ],
            )
            for gpu_index, gpu in enumerate(gpus)
            if key in gpu.values
        ]
        if lines:
            strips.append(Strip(title, lines, min_axis_top, is_filled=len(gpus) == 1))
    return strips
