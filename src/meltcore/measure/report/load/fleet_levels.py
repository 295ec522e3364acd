"""Builds the charts and tables of the levels of a load on a fleet, mixed or each model alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meltcore.measure.documents.schema import Distribution, FleetLevel, LevelResult, Part, StreamLoad
from meltcore.measure.documents.values.formatting import NOT_MEASURED, format_number
from meltcore.measure.load.tasks.task import MeasuredTask, first_latency, percentile, task_of
from meltcore.measure.report.page.charts import NUM_COLORS, Line, Mark, has_curve, line_figure
from meltcore.measure.report.page.page import (
    Block,
    Cell,
    Column,
    Figure,
    Figures,
    Row,
    Section,
    Table,
    Text,
    percentile_cell,
    verdict_cell,
)

_PART_TITLES: dict[Part, str] = {
    "mixed": "All models, mixed",
    "per-model": "Each model alone",
    "interference": "Interference, incomplete",
}
LOSS_TEXT = (
    "Lost: requests without a whole answer. Refused at first: a 429 or 503 whose Retry-After was obeyed, and the "
    "request sent again; its latency counts from the first try."
)
_GPU_METRICS = (
    ("sm_active_percent", "SM active, %", 1.0),
    ("dram_bandwidth_percent", "DRAM, %", 1.0),
    ("power_w", "power, W", 1.0),
    ("memory_used_bytes", "memory, GiB", 2.0**30),
)
_GPU_LINES = (("sm_active_percent", "SM active"), ("dram_bandwidth_percent", "DRAM bandwidth"))


def mixed_tables(levels: Sequence[FleetLevel]) -> list[Block]:
    """Return the label and the table of each mixed level."""
    tables = [[Text(f"{level.label}:"), _level_table([level], level.part, _gpu_text(level))] for level in levels]
    return [block for blocks in tables for block in blocks]


def part_section(levels: Sequence[FleetLevel], part: Part) -> Section:
    """Return the section with the charts and tables of the levels of a part."""
    levels = [level for level in levels if level.part == part]
    if not levels:
        return Section()
    tables: list[Block] = []
    groups: dict[str, list[FleetLevel]] = {}
    for level in levels:  # a table per model alone, and per level of several models
        groups.setdefault(level.streams[0].name if part == "per-model" else level.label, []).append(level)
    for title, group in groups.items():
        note = "; ".join(filter(None, (_gpu_text(level) for level in group))) if part != "per-model" else ""
        tables += [Text(title), _level_table(group, part, note)]
    figures = [] if part == "interference" else fleet_charts(levels, part)
    return Section(_PART_TITLES[part], [*([Figures(figures)] if figures else []), *tables])


def _level_table(levels: Sequence[FleetLevel], part: Part, note: str) -> Table:
    is_mixed = part != "per-model"
    columns = [
        Column("Model" if is_mixed else "Connections", align="text", console="model" if is_mixed else "conn."),
        *([Column("connections", console="conn.")] if is_mixed else []),
        Column("sent", "Requests"),
        Column("lost", "Requests"),
        Column("refused", "Requests", console="ref."),
        Column("whole", "Throughput", console="rate"),
        Column("steady", "Throughput", console=None),
        *_latency_columns("First token or audio, ms", "first"),
        *_latency_columns("End to end, ms", "end"),
        *([] if is_mixed else [Column("GPU", align="text", console=None)]),
        Column("Verdict", console=" "),
    ]
    rows = [_load_row(level, load, is_mixed=is_mixed) for level in levels for load in level.streams]
    return Table(columns, rows, note=note, is_compact=True)


def _latency_columns(group: str, word: str) -> list[Column]:
    console_heads = {"p50": f"{word}\np50", "p95": "ms\np95", "p99": None}
    return [Column(name, group, console=console) for name, console in console_heads.items()]


def _load_row(level: FleetLevel, load: StreamLoad, *, is_mixed: bool) -> Row:
    result, unit = load.level, task_of(load.level).unit.short_unit
    steady = Cell("none", "faint") if result.steady is None else format_number(result.steady.rate)
    cells: list[str | Cell] = [
        Cell(load.name) if is_mixed else Cell(f"{result.concurrency:,}"),
        *([f"{result.concurrency:,}"] if is_mixed else []),
        f"{result.requests:,}",
        Cell(f"{load.lost:,}", "warning" if load.lost else ""),
        f"{load.refused:,}",
        f"{format_number(result.throughput)} {unit}",
        steady,
        *latency_cells(first_latency(result)),
        *latency_cells(result.e2e_ms),
        *([] if is_mixed else [_gpu_text(level) or NOT_MEASURED]),
        verdict_cell(result.verdict),
    ]
    return Row(cells)


def latency_cells(distribution: Distribution | None) -> list[str | Cell]:
    """Return the table cells of p50, p95 and p99 of a latency."""
    if distribution is None or not distribution.n:
        return [Cell(NOT_MEASURED, "faint")] * 3
    return [percentile_cell(distribution, name) for name in ("p50", "p95", "p99")]


def _gpu_text(level: FleetLevel) -> str:
    """Return the means of each GPU over the level, or "" without a measurement."""
    texts = []
    for gpu in level.gpus:
        metric_texts = [f"{title.replace(',', ' ' + format_number(gpu.means[key] / unit))}"
                 for key, title, unit in _GPU_METRICS if key in gpu.means]  # fmt: skip
        texts.append(f"{gpu.gpu}: {', '.join(metric_texts)}" if metric_texts else "")
    return "; ".join(filter(None, texts))


def fleet_charts(levels: Sequence[FleetLevel], part: Part) -> list[Figure]:
    """Draw the throughput, the p95 of the first token or audio, and the p95 end to end, with one chart per task.

    Returns an empty list for a part with fewer than two levels.
    """
    counts = {_connections(level) for level in levels}
    if len(counts) < 2:
        return []
    figures: list[Figure | None] = []
    by_task: dict[MeasuredTask, dict[str, list[tuple[FleetLevel, StreamLoad]]]] = {}
    for level in levels:
        for load in level.streams:
            by_task.setdefault(task_of(load.level), {}).setdefault(load.name, []).append((level, load))
    for task, loads in by_task.items():
        name, unit = task.name, task.unit
        figures.append(
            _figure(f"{name}: {unit.title}", loads, lambda level: level.throughput, unit.short_unit, log_y=False)
        )
        if task.first_key is not None:
            p95 = percentile(task.first_key, "p95")
            figures.append(_figure(f"{name}: {task.first_word}, p95", loads, p95, "ms", log_y=True))
        figures.append(_figure(f"{name}: end to end, p95", loads, percentile("e2e_ms", "p95"), "ms", log_y=True))
    if part == "mixed":
        figures.append(_gpu_figure(levels))
    return [figure for figure in figures if figure is not None]


def _connections(level: FleetLevel) -> int:
    return sum(load.level.concurrency for load in level.streams)


def _figure(
    title: str,
    loads: dict[str, list[tuple[FleetLevel, StreamLoad]]],
    value_of: Callable[[LevelResult], float | None],
    unit: str,
    *,
    log_y: bool,
) -> Figure | None:
    lines = []
    for index, (name, own_loads) in enumerate(loads.items()):
        marks = []
        for level, load in own_loads:
            value = value_of(load.level)
            tip = f"{name}, {level.label}: {format_number(value)} {unit}"
            marks.append(Mark(float(_connections(level)), value, tip))
        lines.append(Line(name, index % NUM_COLORS + 1, marks, dashed=index >= NUM_COLORS))
    return _chart(title, lines, unit, log_y=log_y)


def _gpu_figure(levels: Sequence[FleetLevel]) -> Figure | None:
    lines: list[Line] = []
    for key, title in _GPU_LINES:
        for position in range(max(len(level.gpus) for level in levels)):
            marks = [
                Mark(float(_connections(level)), level.gpus[position].means.get(key))
                for level in levels
                if position < len(level.gpus)
            ]
            color = len(lines) % NUM_COLORS + 1
            gpu = next(level.gpus[position].gpu for level in levels if position < len(level.gpus))
            lines.append(Line(f"{gpu}: {title}", color, marks))
    return _chart("GPU utilization", lines, "%", log_y=False)


def _chart(title: str, lines: Sequence[Line], unit: str, *, log_y: bool) -> Figure | None:
    if not has_curve(lines):
        return None
    return line_figure(
        title, lines, label=f"{title} against connections", x_title="Connections", unit=unit, log_y=log_y
    )
