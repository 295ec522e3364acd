"""A comparison for the console and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meltcore.report.compare import CAVEAT, Row
from meltcore.results.wording import NOT_MEASURED, number, percent

Changes = Sequence[tuple[str, str, str]]


def print_comparison(rows: Sequence[Row], doubts: Sequence[str], changes: Changes) -> None:
    """Reasons to doubt first, then what changed around the runs, then the table, then the caveat."""
    console = Console()
    for doubt in doubts:
        console.print(f"[red]does not compare[/]: {escape(doubt)}", highlight=False)
    for name, before, after in changes:
        console.print(f"changed: {escape(name)}: {escape(before)} -> {escape(after)}", highlight=False)
    table = Table(pad_edge=False)
    for name in ("load", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for index, row in enumerate(rows):
        last_of_load = index + 1 == len(rows) or rows[index + 1].load != row.load
        table.add_row(row.load, row.metric, *_cells(row), f"{row.better} is better", end_section=last_of_load)
    console.print(table)
    console.print(CAVEAT)


def as_json(rows: Sequence[Row], doubts: Sequence[str], changes: Changes) -> str:
    return json.dumps(
        {
            "does_not_compare": list(doubts),
            "changes": [{"name": name, "first": before, "second": after} for name, before, after in changes],
            "rows": [
                {
                    "load": row.load,
                    "metric": row.metric,
                    "first": row.first,
                    "second": row.second,
                    "ratio": row.ratio,
                    "better": row.better,
                }
                for row in rows
            ],
            "caveat": CAVEAT,
        },
        indent=2,
    )


def _cells(row: Row) -> list[str]:
    write = percent if row.metric == "accuracy" else number
    ratio = NOT_MEASURED if row.ratio is None else f"{row.ratio:.3f}"
    return [write(row.first), write(row.second), ratio]
