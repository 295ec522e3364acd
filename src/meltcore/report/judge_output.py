"""A judgement for the console, for a pull request, and as an exit code."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meltcore.results.judgement import JudgedRow, Judgement, JudgementWord
from meltcore.results.wording import NOT_MEASURED, change, number, percent

# For CI. 2 is every verb's "could not"; UNDERPOWERED is no pass and no failure of the new side.
EXIT_CODES: dict[JudgementWord, int] = {"IMPROVEMENT": 0, "NO EVIDENCE": 0, "REGRESSION": 1, "UNDERPOWERED": 3}
STYLES: dict[JudgementWord, str] = {
    "IMPROVEMENT": "good",
    "NO EVIDENCE": "",
    "REGRESSION": "bad",
    "UNDERPOWERED": "unsure",
}
_COLOURS = {"good": "bold green", "": "bold", "bad": "bold red", "unsure": "bold yellow"}
_HEADS = ("load", "metric", "old", "new", "change", "95 % interval", "p", "n")


def print_judgement(found: Judgement, console: Console) -> None:
    """What differs around the servers first, then the numbers, then the verdict."""
    for doubt in found.doubts:
        console.print(f"[red]does not compare[/]: {escape(doubt)}", highlight=False)
    for each in found.differences:
        console.print(f"unlike: {escape(each.name)}: {escape(each.old)} -> {escape(each.new)}", highlight=False)
    console.print(f"old: {escape(found.old_name)}  {escape(found.old_command)}", highlight=False)
    console.print(f"new: {escape(found.new_name)}  {escape(found.new_command)}", highlight=False)
    console.print(taking(found), highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False, show_edge=False)
    for head in _HEADS:
        table.add_column(head, justify="left" if head in ("load", "metric") else "right", no_wrap=True)
    for index, row in enumerate(found.rows):
        last = index + 1 == len(found.rows) or found.rows[index + 1].load != row.load
        style = "bold" if is_primary(found, row) else None
        table.add_row(row.load, row.metric, *cells(row), end_section=last, style=style)
    console.print(table)
    for caution in found.cautions:
        console.print(caution, highlight=False)
    console.print(f"[{_COLOURS[STYLES[found.verdict]]}]{found.verdict}[/] {headline(found)}", highlight=False)


def as_markdown(found: Judgement) -> str:
    """For a pull request: the verdict, what is unlike, the table folded away below the primary metric."""
    lines = [f"### {found.verdict}: {headline(found)}", ""]
    lines += [f"- **does not compare**: {doubt}" for doubt in found.doubts]
    lines += [f"- unlike: {_cell(each.name)}: {_cell(each.old)} → {_cell(each.new)}" for each in found.differences]
    if found.doubts or found.differences:
        lines.append("")
    lines += [*_markdown_table([found.primary]), ""]
    others = [row for row in found.rows if not is_primary(found, row)]
    if others:
        lines += ["<details><summary>Other metrics, shown and not judged</summary>", ""]
        lines += [*_markdown_table(others), "", "</details>", ""]
    lines += [f"old: {found.old_name} `{found.old_command}`  ", f"new: {found.new_name} `{found.new_command}`", ""]
    lines += [taking(found), "", *(f"- {caution}" for caution in found.cautions)]
    return "\n".join(lines) + "\n"


def headline(found: Judgement) -> str:
    row = found.primary
    return f"{row.name}: {number(row.old)} -> {number(row.new)} ({change(row.change)}). {found.why}"


def taking(found: Judgement) -> str:
    """How the starts were taken, and what A did against itself."""
    sizes = f"{len(found.primary.old_values)} and {len(found.primary.new_values)} fresh starts"
    how = f"{sizes}, in the order {found.order}" if found.interleaved else f"{sizes}, not interleaved"
    if found.control is not None:
        how += f"; A against A: {change(found.control.change)}"
    return f"{how}; A's own noise: {NOT_MEASURED if found.noise is None else f'{100 * found.noise:.1f} %'}."


def cells(row: JudgedRow) -> list[str]:
    """old, new, change, interval, p, n as text."""
    write = percent if row.metric == "accuracy" else number
    interval = NOT_MEASURED if row.low is None or row.high is None else f"{change(row.low)} to {change(row.high)}"
    p = NOT_MEASURED if row.p is None else f"{row.p:.3f}" if row.p >= 0.001 else "<0.001"
    sizes = f"{len(row.old_values)}, {len(row.new_values)}"
    return [write(row.old), write(row.new), change(row.change), interval, p, sizes]


def is_primary(found: Judgement, row: JudgedRow) -> bool:
    return (row.load, row.metric) == (found.primary.load, found.primary.metric)


def _markdown_table(rows: list[JudgedRow]) -> list[str]:
    lines = [f"| {' | '.join(_HEADS)} |", f"|{'---|' * 2}{'---:|' * (len(_HEADS) - 2)}"]
    return lines + [f"| {' | '.join([row.load, row.metric, *cells(row)])} |" for row in rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
