"""The tables, distributions and definitions of levels of any task."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meltcore.measure.documents.schema import Distribution, LevelResult
from meltcore.measure.documents.values.definitions import DEFINITIONS, Definition
from meltcore.measure.documents.values.formatting import format_load, format_number, format_percent
from meltcore.measure.load.tasks.task import (
    Latency,
    MeasuredTask,
    by_task,
    default_task,
    define_metric,
    distribution_of,
    tasks,
)
from meltcore.measure.report.page.page import Cell, Column, Row, Table, numeric_columns, percentile_cell, verdict_cell

# Definitions of the default task's metrics that hold for other tasks too.
_COMMON_KEYS = ("e2e_ms", "queue_delay_ms", "steady", "goodput_per_s", "peak_in_flight", "accuracy", "succeeded")


def levels_tables(levels: Sequence[LevelResult]) -> list[Table]:
    """Build one table per task, with one row per level."""
    return [_levels_table(task, group) for task, group in by_task(levels).items()]


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
        Column("Load", console="req/s" if is_open else "concur-\nrency"),
        Column("sent", "Requests"),
        Column("answered", "Requests", console=None),
        Column("failed", "Requests"),
        Column("peak in flight", "Requests", console="peak"),
        *([Column("Accuracy", console="accu-\nracy")] if has_accuracy else []),
        Column("whole", throughput_head, console=task.unit.short_unit),
        Column("steady", throughput_head, console=None),
        *([Column(source_head, console=source_head.replace(" ", "\n"))] if sources else []),
        *_latency_columns(task.latencies),
        *([Column("Goodput, req/s", console="good\nreq/s")] if has_slo else []),
        Column("Verdict", console=" "),
    ]
    rows = []
    for level in levels:
        short_load = format_number(level.rate_per_s) if level.load_kind == "open" else f"{level.concurrency:,}"
        workload = (level.workload or "not named") if has_several_workloads else ""
        source_per_s = None if level.task is None else level.task.source_per_s
        cells: list[str | Cell] = [
            Cell(format_load(level), small_print=workload, console_text=short_load),
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
    headers = ("concur-\nrency", "sent", "failed", "total\ntok/s", "output\ntok/s")
    latencies = [each for each in default_task().latencies if each.console[0] is not None]
    columns = [*numeric_columns(*headers), *_latency_columns(latencies), *numeric_columns("spot\nchecks", " ")]
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


def relevant_definitions(found: Collection[MeasuredTask]) -> list[Definition]:
    """Return the definitions of the metrics of some tasks, or without tasks the default task's."""
    own = [definition for task in tasks().values() if task in found for definition in task.definitions]
    has_all = not found or default_task() in found
    return [*own, *(definition for definition in DEFINITIONS if has_all or definition.key in _COMMON_KEYS)]
