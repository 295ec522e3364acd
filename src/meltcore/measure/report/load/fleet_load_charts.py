"""The charts of a load on a fleet: throughput and latency of each model, and GPUs, against connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meltcore.measure.documents.schema import FleetLevel, LevelResult, Part, StreamLoad
from meltcore.measure.documents.values.formatting import format_number
from meltcore.measure.documents.values.throughput import throughput
from meltcore.measure.load.tasks.task import MeasuredTask, percentile, task_of
from meltcore.measure.report.page.charts import NUM_COLORS, Line, Mark, line_chart
from meltcore.measure.report.page.page import Figure

_GPU_LINES = (("sm_active_percent", "SM active"), ("dram_bandwidth_percent", "DRAM bandwidth"))


def fleet_charts(levels: Sequence[FleetLevel], part: Part) -> list[Figure]:
    """Draw a part with several levels: per task the throughput, p95 of the first token or audio, and end to end."""
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
        figures.append(_figure(f"{name}: {unit.title}", loads, throughput, unit.short_unit, log_y=False))
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
    label = f"{title} against connections"
    if not any(mark.y is not None for line in lines for mark in line.marks):
        return None
    chart = line_chart(lines, label=label, x_title="Connections", unit=unit, log_y=log_y)
    legend = [(line.name, line.color, line.dashed) for line in lines]
    return None if chart is None else Figure(title, chart, legend)
