"""Sets of starts for the console: one in full, or several a line each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meltcore.report.compare import METRICS, level_key
from meltcore.results.starts import StartSet
from meltcore.results.wording import NOT_MEASURED, counted, fingerprint_rows, load_of, moment, number, percent


def print_set(found: StartSet, console: Console) -> None:
    """What it ran on and with, and of every metric the mean over starts and the spread between them."""
    console.print(f"{escape(found.name)}, {len(found.starts)} starts, taken {found.taken}", highlight=False)
    console.print(escape(found.command or "no command kept"), highlight=False)
    for name, fact in fingerprint_rows(found.starts[0].fingerprint):
        console.print(f"  {name}: {escape(fact)}", highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for head in ("load", "metric"):
        table.add_column(head, no_wrap=True)
    for head in ("mean", "spread", "least", "most", "n"):
        table.add_column(head, justify="right", no_wrap=True)
    for level in found.starts[0].levels:
        for metric in METRICS:
            values = [
                value
                for start in found.starts
                for other in start.levels
                if level_key(other) == level_key(level) and (value := metric.value(other)) is not None
            ]
            if values:
                table.add_row(load_of(level), metric.name, *_figures(values, metric.name))
        table.add_section()
    console.print(table)


def print_list(sets: Sequence[StartSet], console: Console) -> None:
    """Of each its name, how many starts, the output rate at its highest load, on what and when; then its command."""
    if not sets:
        console.print("no baselines here; meltcore baseline save NAME --run FILE makes one")
        return
    for found in sets:
        first = found.starts[0]
        machine = counted([gpu.name for gpu in first.fingerprint.gpus]) or first.fingerprint.cpu
        told = f"{len(found.starts)} starts, {_top_rate(found)}, on {machine}, {moment(found.taken)}"
        console.print(f"[bold]{escape(found.name)}[/]  {escape(told)}", highlight=False, soft_wrap=True)
        console.print(f"  {escape(found.command)}", highlight=False, soft_wrap=True)


def _top_rate(found: StartSet) -> str:
    level = max(found.starts[0].levels, key=lambda level: (level.concurrency, level.rate_per_s or 0.0))
    rates = [
        other.output_tokens_per_s
        for start in found.starts
        for other in start.levels
        if level_key(other) == level_key(level)
    ]
    return f"{number(float(np.mean(rates)))} output tok/s {load_of(level)}"


def _figures(values: Sequence[float], metric: str) -> list[str]:
    write = percent if metric == "accuracy" else number
    mean = float(np.mean(values))
    spread = NOT_MEASURED if len(values) < 2 or mean == 0 else f"{100 * float(np.std(values, ddof=1)) / mean:.1f} %"
    return [write(mean), spread, write(min(values)), write(max(values)), str(len(values))]
