"""The charts of a load: throughput and latencies over its levels, and one level over time."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.schema import GpuTimeline, LevelResult
from meltcore.measure.documents.values.formatting import format_load, format_number
from meltcore.measure.documents.values.percentiles import SAMPLES_NEEDED
from meltcore.measure.load.tasks.task import by_task, distribution_of, task_of
from meltcore.measure.report.page.charts import NARROW, NUM_COLORS, Line, Mark, Strip, line_chart, time_strips
from meltcore.measure.report.page.page import Figure

# (key, title, one unit of the axis, the least end of the axis)
_GPU_STRIPS = (
    ("sm_active_percent", "SM active, %", 1.0, 100.0),
    ("dram_bandwidth_percent", "DRAM bandwidth, %", 1.0, 100.0),
    ("power_w", "power, W", 1.0, 0.0),
    ("memory_used_bytes", "memory used, GiB", 2.0**30, 0.0),
)


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

    Returns None where nothing was recorded.
    """
    if len(level.timeline) < 2:
        return None
    points = level.timeline
    rates = [(point.t_s, point.rate) for point in points]
    strips = [
        Strip("output tokens/s" if level.task is None else task_of(level).unit.unit, [("", 1, rates)], filled=True),
        Strip("in flight", [("", 2, [(point.t_s, float(point.in_flight)) for point in points])], filled=True),
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
        if chart is not None:
            legend = [
                (line.name, line.color, line.dashed) for line in lines if any(mark.y is not None for mark in line.marks)
            ]
            figures.append(Figure(title, chart, legend, note_text))
    return figures


def _level_line(
    name: str, color: int, levels: Sequence[LevelResult], values: Sequence[float | None], unit: str
) -> Line:
    """Return the chart line of `values` over the offered load of levels, with a gap where the workload changes."""
    marks: list[Mark] = []
    workload = None
    for level, value in sorted(
        zip(levels, values, strict=True), key=lambda level_and_value: _offered_load(level_and_value[0])
    ):
        tooltip = f"{format_load(level)}: {name} {format_number(value)} {unit}"
        if level.workload != workload:
            marks.append(Mark(_offered_load(level), None))
            workload = level.workload
        marks.append(Mark(_offered_load(level), value, tooltip))
    return Line(name, color, marks, dashed=name == "steady window")


def _offered_load(level: LevelResult) -> float:
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
            strips.append(Strip(title, lines, min_axis_top, filled=len(gpus) == 1))
    return strips
