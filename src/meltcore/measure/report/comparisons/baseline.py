"""Prints stored sets of server starts: one in full, or several with one line per set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape

from meltcore.measure.documents.comparison import StartSet
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.values.formatting import (
    NOT_MEASURED,
    fingerprint_rows,
    format_counts,
    format_load,
    format_number,
    format_percent,
    format_time,
)
from meltcore.measure.load.tasks.task import task_of
from meltcore.measure.report.comparisons.compare_runs import level_key, metrics_of
from meltcore.measure.report.page.console import print_blocks
from meltcore.measure.report.page.page import Column, Facts, Row, Table, Text, numeric_columns


def print_start_set(start_set: StartSet, console: Console) -> None:
    """Print the machine, the command, and each metric's mean and spread over the starts."""
    rows = []
    for level in start_set.starts[0].levels:
        for metric in metrics_of(level):
            values = [
                value
                for same_level in _levels_with_same_load(start_set, level)
                if (value := metric.value(same_level)) is not None
            ]
            if values:
                rows.append(Row([format_load(level), metric.name, *_metric_cells(values, metric.name)]))
        rows[-1:] = [Row(row.cells, ends_group=True) for row in rows[-1:]]
    columns = [Column("load"), Column("metric", align="left"), *numeric_columns("mean", "spread", "least", "most", "n")]
    title = Text(f"{start_set.name}, {len(start_set.starts)} starts, taken {start_set.taken}")
    facts = Facts(fingerprint_rows(start_set.starts[0].fingerprint), console=True)
    print_blocks([title, Text(start_set.command or "no command kept"), facts, Table(columns, rows)], console)


def print_start_sets(start_sets: Sequence[StartSet], console: Console) -> None:
    """Print each set's name, number of starts, output rate at the highest load, machine, time and command."""
    if not start_sets:
        console.print("no baselines here; meltcore baseline save NAME --run FILE makes one")
    for start_set in start_sets:
        first_start = start_set.starts[0]
        machine = format_counts([gpu.name for gpu in first_start.fingerprint.gpus]) or first_start.fingerprint.cpu
        level = max(first_start.levels, key=lambda level: (level.concurrency, level.rate_per_s or 0.0))
        mean_rate = float(np.mean([same_level.throughput for same_level in _levels_with_same_load(start_set, level)]))
        rate_text = f"{format_number(mean_rate)} {task_of(level).unit.unit} {format_load(level)}"
        line = f"{len(start_set.starts)} starts, {rate_text}, on {machine}, "
        line += format_time(start_set.taken)
        console.print(f"[bold]{escape(start_set.name)}[/]  {escape(line)}", highlight=False, soft_wrap=True)
        console.print(f"  {escape(start_set.command)}", highlight=False, soft_wrap=True)


def _levels_with_same_load(start_set: StartSet, level: LevelResult) -> list[LevelResult]:
    """Return the levels of all starts that have the same load as `level`."""
    return [
        candidate
        for start in start_set.starts
        for candidate in start.levels
        if level_key(candidate) == level_key(level)
    ]


def _metric_cells(values: Sequence[float], metric: str) -> list[str]:
    format_value = format_percent if metric == "accuracy" else format_number
    mean = float(np.mean(values))
    spread = NOT_MEASURED if len(values) < 2 or mean == 0 else f"{100 * float(np.std(values, ddof=1)) / mean:.1f} %"
    return [format_value(mean), spread, format_value(min(values)), format_value(max(values)), str(len(values))]
