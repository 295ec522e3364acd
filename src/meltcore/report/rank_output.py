"""The ranking on the console and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meltcore.report.rank import Entry
from meltcore.report.rank_page import FORCED
from meltcore.results.wording import number

_BAR, _NAME = 20, 30  # columns


def print_rank(entries: Sequence[Entry], reasons: Sequence[str], notes: Sequence[str], console: Console) -> None:
    """Doubts first, then a row a result, best first."""
    if reasons:
        console.print(f"[bold red]{FORCED}[/]")
    for reason in reasons:
        console.print(f"  {reason}", style="red", markup=False)
    for note in notes:
        console.print(note, style="yellow", markup=False)
    highest = entries[0].score.output_tokens_per_s or 1.0
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, collapse_padding=True)
    table.add_column("", max_width=_NAME, overflow="fold")
    for head in ("output tok/s", "", "tok/J", "health"):
        table.add_column(head, justify="right" if head.startswith(("output", "tok")) else "left", no_wrap=True)
    for entry in entries:
        rate = entry.score.output_tokens_per_s or 0.0
        table.add_row(
            f"[bold]{escape(entry.hardware)}[/]\n[dim]{escape(entry.name)}[/]",
            number(rate),
            "█" * max(1, round(_BAR * rate / highest)),
            number(entry.score.tokens_per_joule),
            entry.score.health,
        )
    console.print(table)


def as_json(entries: Sequence[Entry], reasons: Sequence[str], notes: Sequence[str]) -> str:
    rows = [
        {
            "name": entry.name,
            "hardware": entry.hardware,
            "output_tokens_per_s": entry.score.output_tokens_per_s,
            "tokens_per_joule": entry.score.tokens_per_joule,
            "health": entry.score.health,
            "workload": entry.score.workload,
            "engine": entry.score.engine,
            "dtype": entry.score.dtype,
            "weights": entry.score.weights,
        }
        for entry in entries
    ]
    return json.dumps({"does_not_rank": list(reasons), "notes": list(notes), "rows": rows}, indent=2)
