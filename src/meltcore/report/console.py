"""Prints a page, or some of its blocks, on a terminal of at least 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from meltcore.report.page import (
    TOO_FEW_MARK,
    Block,
    Box,
    Cell,
    Checks,
    Details,
    Facts,
    Figures,
    Page,
    Section,
    Style,
    Table,
    Text,
    Tiles,
)

STYLE_COLORS: dict[Style, str] = {
    "good": "green",
    "bad": "bold red",
    "unsure": "bold yellow",
    "plain": "dim",
    "faint": "dim",
    "warning": "red",
    "": "bold",
}
_MAX_SPACED_COLUMNS = 7  # columns; more fit into 80 characters without gaps


def print_page(page: Page, console: Console) -> None:
    """Prints all blocks of a page that a terminal can show, then its badge and conclusion."""
    print_blocks(page.sections, console)
    badge = f"[{STYLE_COLORS[page.style]}]{page.badge}[/] " if page.badge else ""
    if badge or page.conclusion:
        console.print(f"{badge}{escape(page.conclusion)}", highlight=False, soft_wrap=True)


def print_blocks(blocks: Sequence[Block], console: Console) -> None:
    """Prints all blocks in order, except those that only HTML shows."""
    for block in blocks:
        if not block.console:
            continue
        if isinstance(block, Section):
            if block.tag:
                console.print(f"{escape(block.title)}: [{STYLE_COLORS[block.style]}]{block.tag}[/]", highlight=False)
            print_blocks([*block.blocks, *block.column_sections], console)
        elif isinstance(block, Table):
            print_table(block, console)
        elif isinstance(block, Text):
            console.print(block.text, markup=False, highlight=False)
        elif isinstance(block, Box):
            _print_box(block, console)
        elif isinstance(block, Facts):
            for name, value in block.facts:
                console.print(f"{name}: {value}", markup=False, highlight=False)
        elif isinstance(block, Checks):
            for style, status, name, detail in block.checks:
                console.print(f"[{STYLE_COLORS[style]}]{status}[/]  {escape(name)}: {escape(detail)}", highlight=False)
        elif isinstance(block, Tiles):
            for label, value, small_print in block.tiles:
                console.print(f"{label}: {value} ({small_print})", markup=False, highlight=False)
        elif isinstance(block, Details):
            print_blocks(block.blocks, console)
        else:
            assert isinstance(block, Figures), block


def print_table(table: Table, console: Console) -> None:
    """Prints a table's console columns, a note on omitted percentiles, and the table's note."""
    if not table.rows:
        return
    column_indices = [i for i, column in enumerate(table.columns) if column.console is not None]
    has_text = any(column.align == "text" for column in table.columns)
    gap = 0 if len(column_indices) > _MAX_SPACED_COLUMNS else 1
    rich_table = RichTable(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False)
    for i in column_indices:
        column = table.columns[i]
        rich_table.add_column(
            escape(column.console or column.head),
            justify="right" if column.align == "right" and i else "left",
            vertical="top" if has_text else "bottom",
            overflow="fold",
            no_wrap=column.align != "text",
        )
    for row in table.rows:
        cells = [_cell_markup(row.cells[i], column_is_text=table.columns[i].align == "text") for i in column_indices]
        rich_table.add_row(*cells, style="bold" if row.is_emphasized else None, end_section=row.ends_group)
    console.print(rich_table)
    if any(isinstance(cell, Cell) and cell.console_text == TOO_FEW_MARK for row in table.rows for cell in row.cells):
        console.print(f"{TOO_FEW_MARK}: too few requests for that percentile", style="dim")
    if table.note:
        console.print(table.note, style="dim", markup=False, highlight=False)


def _cell_markup(cell: str | Cell, *, column_is_text: bool) -> str:
    if isinstance(cell, str):
        return escape(cell)
    text = escape(cell.console_text or cell.text)
    if cell.style:
        text = f"[{STYLE_COLORS[cell.style]}]{text}[/]"
    lines = [text, *(f"- {escape(item)}" for item in cell.items)]
    if cell.small_print and column_is_text:
        lines.append(f"[dim]{escape(cell.small_print)}[/]")
    return "\n".join(lines)


def _print_box(box: Box, console: Console) -> None:
    color = STYLE_COLORS[box.style]
    title = " ".join(part for part in (box.tag, box.title, box.aside) if part)
    if title:
        console.print(f"[{color}]{escape(title)}[/]", highlight=False)
    text = f"{box.lead} {box.text}".strip()
    if text:
        console.print(text, markup=False, highlight=False)
    for item in box.items:
        console.print(f"  {item}", markup=False, highlight=False)
    if box.small_print:
        console.print(f"  {box.small_print}", markup=False, highlight=False)
