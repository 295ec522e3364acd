"""A tuning for the console."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meltcore.report.tune_rows import table_of
from meltcore.results.tuning import Tuning

_MOST_WITH_GAPS = 8  # columns; more fit into 80 characters without


def print_tuning(found: Tuning, console: Console) -> None:
    """Every start in a row, what was reckoned, and the finding last."""
    heads, rows = table_of(found)
    marked = any(mark for _, mark, _ in rows)
    gap = 0 if len(heads) > _MOST_WITH_GAPS else 1
    table = Table(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False)
    for head in heads if marked else heads[:-1]:
        left = head in ("setting", "")
        table.add_column(head, justify="left" if left else "right", vertical="bottom", no_wrap=True)
    for cells, mark, _ in rows:
        table.add_row(*map(escape, cells), *([mark] if marked else []), style="bold" if mark == "knee" else None)
    console.print(table)
    for cells, _, why in rows:
        if why:
            console.print(f"{escape(cells[0])}: {escape(why)}", style="yellow", highlight=False)
    for fact in found.facts:
        console.print(f"{escape(fact.name)}: {escape(fact.value)} ({fact.source})", highlight=False)
    for note in found.notes:
        console.print(escape(note), highlight=False)
    console.print(f"[bold]{escape(found.finding)}[/]", highlight=False)
