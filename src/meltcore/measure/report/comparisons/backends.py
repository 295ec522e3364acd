"""Builds the page of a comparison of backends and its tables for the console."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from meltcore.measure.documents.backends import START_KIND_BY_SET_UP, BackendComparison, BackendRun, SetUp
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.values.formatting import NOT_MEASURED, format_load_settings, format_number
from meltcore.measure.report.load.levels import levels_tables
from meltcore.measure.report.load.run import machine_section, notes_box
from meltcore.measure.report.page.charts import NUM_COLORS, Line, Mark, line_figure
from meltcore.measure.report.page.page import (
    Block,
    Box,
    Cell,
    Column,
    Details,
    Facts,
    Figure,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
)

TITLES: dict[SetUp, str] = {
    "sessions": "Several sessions on one server",
    "quantized": "Quantized model",
    "batching": "Batching",
    "data-parallel": "Data parallel",
    "split": "Split model",
    "load-balanced": "Load balanced",
}
_GPU_VALUES = {"sm_active_percent": "SM active, %", "dram_bandwidth_percent": "DRAM, %", "power_w": "W"}


def backends_page(comparison: BackendComparison) -> Page:
    """Build the page: the best backends, rates by set-up, the nine aspects, commands, settings and machine."""
    settings = [(name, str(value)) for name, value in comparison.settings.items()]
    settings += [("load", format_load_settings(comparison.load)), ("seed", str(comparison.load.get("seed")))]
    sections = [
        Section("The best", [best_table(comparison), *notes_box(comparison.notes)]),
        *(_set_up_section(comparison, set_up) for set_up in comparison.set_ups),
        Section("Nine aspects", [_aspect_table(comparison)]),
        Section("Equal settings", [Facts(settings)]),
        Section("Backends", [_run_details(run) for run in comparison.runs], console=False),
        machine_section(comparison.fingerprint),
    ]
    return Page(
        title=f"meltcore compare-backends – {comparison.model}",
        name="compare-backends",
        subtitle=f"{comparison.model} on {', '.join(comparison.backends)}",
        sections=sections,
        footer="meltcore compare-backends · the same numbers stand in result.json",
        conclusion="; ".join(
            f"{best.model} at {best.levels[0]}: {best.backend or best.reason}"
            for best in comparison.best
            if not best.set_up
        ),
    )


def best_table(comparison: BackendComparison) -> Table:
    """Build the table of the best backend of each set-up and of each model."""
    columns = [
        Column("Model", align="left", console=None),
        Column("Set-up", align="left"),
        Column("Concurrency", align="left", console="at"),
        Column("Best", align="left"),
        Column("Output tok/s", console="tok/s"),
        Column("Lead", align="text"),
    ]
    rows = [
        Row(
            [
                best.model,
                best.set_up or ("any, quantized" if best.model.endswith("quantized") else "any"),
                ", ".join(map(str, best.levels)),
                best.backend or Cell("none", "faint"),
                format_number(best.output_tokens_per_s),
                best.reason,
            ],
            is_emphasized=not best.set_up,
        )
        for best in comparison.best
    ]
    return Table(columns, rows, note="Over several levels the rate is their geometric mean. One run per level.")


def _set_up_section(comparison: BackendComparison, set_up: SetUp) -> Section:
    runs = [run for run in comparison.runs if run.start == START_KIND_BY_SET_UP[set_up]]
    levels = comparison.levels_of(set_up)
    measured = [run for run in runs if any(run.level(level) or run.failure(level) for level in levels)]
    blocks: list[Block] = [_rate_table(measured, levels)] if measured and levels else []
    first = next(each for each in comparison.set_ups if START_KIND_BY_SET_UP[each] == START_KIND_BY_SET_UP[set_up])
    missing = [f"{run.backend}: {run.reason or 'it was not loaded so far'}" for run in runs if run not in measured]
    missing += [f"{run.backend}, in part: {run.reason}" for run in measured if run.reason]
    if missing and set_up == first:
        blocks.append(Box("unsure", f"{TITLES[set_up]}: not measured", items=missing))
    elif missing:
        blocks.append(Text(f"What was not measured stands at {TITLES[first]}: it is the same start.", "small"))
    figure = _rate_chart(measured, levels, TITLES[set_up])
    blocks += [Figures([figure])] if figure is not None else []
    return Section(TITLES[set_up], blocks)


def _rate_table(runs: Sequence[BackendRun], levels: Sequence[int]) -> Table:
    """Build a table with one row per level and backend. The console shows fewer columns.

    A level whose requests failed shows the share and the most frequent reason in place of its rate.
    """
    columns = [
        Column("Concurrency", console="at"),
        Column("Backend", align="left"),
        Column("requests"),
        Column("failed"),
        Column("Output tok/s", console="tok/s"),
        Column("TTFT p50, ms", console="TTFT\np50"),
        Column("TTFT p95, ms", console="TTFT\np95"),
        Column("ITL p50, ms", console="ITL\np50"),
        *(Column(title, console=None) for title in _GPU_VALUES.values()),
    ]
    any_failed = any(run.failure(level) for run in runs for level in levels)
    num_cells = len(columns) - 2
    columns += [Column("Why it does not count", align="text", console="does not count")] if any_failed else []
    rows = []
    for level in levels:
        levels_of_runs = [(run, run.level(level)) for run in runs]
        best = max((each.output_tokens_per_s for _, each in levels_of_runs if each is not None), default=0.0)
        for run, each in levels_of_runs:
            cells = [NOT_MEASURED] * num_cells if each is None else _level_cells(each)
            cells += [run.failure(level)] if any_failed else []
            is_best = each is not None and each.output_tokens_per_s == best
            rows.append(Row([f"{level:,}", run.backend, *cells], is_best, run is runs[-1]))
    return Table(columns, rows, note="Shaded: the highest rate of the level.", is_compact=True)


def _level_cells(level: LevelResult) -> list[str]:
    numbers = (level.output_tokens_per_s, level.ttft_ms.p50, level.ttft_ms.p95, level.itl_ms.p50)
    gpu_means = (_gpu_mean(level, key) for key in _GPU_VALUES)
    return [f"{level.requests:,}", f"{level.failed:,}", *map(format_number, (*numbers, *gpu_means))]


def _gpu_mean(level: LevelResult, key: str) -> float | None:
    """Return the mean of a GPU metric over the level and its GPUs, or None if the metric was never read."""
    values = [value for gpu in level.gpus for value in gpu.values.get(key, []) if value is not None]
    return fmean(values) if values else None


def _rate_chart(runs: Sequence[BackendRun], levels: Sequence[int], title: str) -> Figure | None:
    """Draw output tok/s over concurrency, with one line per backend. Returns None for fewer than two levels."""
    if len(levels) < 2:
        return None
    lines = []
    for number, run in enumerate(runs):
        rates = [(level, run.level(level)) for level in levels]
        marks = [
            Mark(level, None if level_result is None else level_result.output_tokens_per_s, run.backend)
            for level, level_result in rates
        ]
        lines.append(Line(run.backend, number % NUM_COLORS + 1, marks))
    title = f"{title}: output tok/s"
    return line_figure(title, lines, label=f"{title} by concurrency", x_title="concurrency")


def _aspect_table(comparison: BackendComparison) -> Table:
    columns = [Column("Aspect", align="text"), Column("Measured as", align="text", console=None)]
    columns += [Column(name, align="text") for name in comparison.backends]
    rows = [
        Row([aspect.name, aspect.measured_as, *(aspect.findings[name] for name in comparison.backends)])
        for aspect in comparison.aspects
    ]
    return Table(columns, rows, is_compact=True)


def _run_details(run: BackendRun) -> Details:
    """Build the details of one start: its command, version, missing settings and levels."""
    facts = [
        ("Command", run.command or NOT_MEASURED),
        ("Replicas", str(run.replicas)),
        ("Version", run.version or "not reported"),
        ("Model", run.model),
        ("Lacks", ", ".join(run.lacks) or "no setting"),
        ("Start to first answer", NOT_MEASURED if run.ready_s is None else f"{run.ready_s:.1f} s"),
    ]
    notes = [*([run.reason] if run.reason else []), *run.notes]
    blocks: list[Block] = [Facts(facts), *notes_box(notes)]
    blocks += levels_tables(run.levels)
    return Details(f"{run.backend}, {run.start}", blocks, aside="not measured" if not run.levels else "")
