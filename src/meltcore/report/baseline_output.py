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
from meltcore.results.wording import NOT_MEASURED, fingerprint_rows, load_of, number, percent


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
    """A line each: its name, when, how many starts, on what, and the output rate at its highest load."""
    if not sets:
        console.print("no baselines here; meltcore baseline save NAME --run FILE makes one")
        return
    table = Table(pad_edge=False)
    for head in ("name", "taken", "starts", "machine", "output tok/s", "command"):
        table.add_column(head, overflow="fold")
    for found in sets:
        first = found.starts[0]
        gpus = ", ".join(gpu.name for gpu in first.fingerprint.gpus)
        level = max(first.levels, key=lambda level: (level.concurrency, level.rate_per_s or 0.0))
        rates = [
            other.output_tokens_per_s
            for start in found.starts
            for other in start.levels
            if level_key(other) == level_key(level)
        ]
        rate = f"{number(float(np.mean(rates)))} {load_of(level)}"
        machine = gpus or first.fingerprint.cpu
        table.add_row(found.name, found.taken, str(len(found.starts)), machine, rate, escape(found.command))
    console.print(table)


def _figures(values: Sequence[float], metric: str) -> list[str]:
    write = percent if metric == "accuracy" else number
    mean = float(np.mean(values))
    spread = NOT_MEASURED if len(values) < 2 or mean == 0 else f"{100 * float(np.std(values, ddof=1)) / mean:.1f} %"
    return [write(mean), spread, write(min(values)), write(max(values)), str(len(values))]
