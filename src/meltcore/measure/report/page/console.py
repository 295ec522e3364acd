"""Prints a page, or some of its blocks, on a terminal of at least 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text as RichText

from meltcore.measure.documents.verdicts import STYLE_COLORS
from meltcore.measure.report.page.page import (
    TOO_FEW_TEXT,
    Block,
    Box,
    Cell,
    Checks,
    Details,
    Facts,
    Figures,
    Page,
    Section,
    Table,
    Text,
    Tiles,
)

_MAX_SPACED_COLUMNS = 7  # columns; more fit into 80 characters without gaps


def print_document(content: msgspec.Struct) -> None:
    """Print a document on standard output as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


def print_page(page: Page, console: Console) -> None:
    """Print all blocks of a page that a terminal can show, then its badge and conclusion."""
    print_blocks(page.sections, console)
    print_conclusion(page, console)


def print_conclusion(page: Page, console: Console) -> None:
    """Print the badge and the conclusion of a page."""
    badge = f"[{STYLE_COLORS[page.style]}]{page.badge}[/] " if page.badge else ""
    if badge or page.conclusion:
        console.print(f"{badge}{escape(page.conclusion)}", highlight=False, soft_wrap=True)


def print_blocks(blocks: Sequence[Block], console: Console) -> None:
    """Print all blocks that a terminal can show, in order."""
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
    """Print a table's console columns, a note on omitted percentiles, and the table's note.

    On a narrow console, cells are folded at spaces. If the longest words still do not fit, each row is printed as a
    block of its own. No word is broken.
    """
    if not table.rows:
        return
    column_indices = [i for i, column in enumerate(table.columns) if column.console is not None]
    gap = 0 if len(column_indices) > _MAX_SPACED_COLUMNS else 1
    heads = [escape(table.columns[i].console or table.columns[i].head) for i in column_indices]
    lines = [
        [_cell_markup(row.cells[i], column_is_text=table.columns[i].align == "text") for i in column_indices]
        for row in table.rows
    ]
    widths = _column_widths([heads, *lines], console.width - (len(heads) - 1) * (1 + gap))
    if widths is None:
        _print_records(heads, lines, console)
    else:
        _print_columns(table, column_indices, heads, lines, widths, gap, console)
    if table.has_too_few:
        console.print(TOO_FEW_TEXT, style="dim")
    if table.note:
        console.print(table.note, style="dim", markup=False, highlight=False)


def _print_columns(
    table: Table,
    column_indices: Sequence[int],
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    widths: Sequence[int],
    gap: int,
    console: Console,
) -> None:
    """Print the rows in columns. `heads` and `lines` are markup; `widths` are the columns' widths without gaps."""
    has_text = any(column.align == "text" for column in table.columns)
    rich_table = RichTable(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False)
    for i, head, width in zip(column_indices, heads, widths, strict=True):
        rich_table.add_column(
            head,
            justify="right" if table.columns[i].align == "right" and i else "left",
            vertical="top" if has_text else "bottom",
            overflow="fold",
            width=width,
        )
    for row, cells in zip(table.rows, lines, strict=True):
        rich_table.add_row(*cells, style="bold" if row.is_emphasized else None, end_section=row.ends_group)
    console.print(rich_table)


def _print_records(heads: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> None:
    """Print one block per row: its first cell, then `head: cell` of the other cells, folded between cells."""
    for cells in lines:
        console.print(cells[0], style="bold", highlight=False)
        filled = ""
        for head, cell in zip(heads[1:], cells[1:], strict=True):
            part = f"{head}: {'; '.join(cell.splitlines())}"
            if filled and _width(f"  {filled}, {part}") > console.width:
                console.print(f"  {filled},", highlight=False)
                filled = part
            else:
                filled = f"{filled}, {part}" if filled else part
        console.print(f"  {filled}", highlight=False)


def _column_widths(rows: Sequence[Sequence[str]], max_width: int) -> list[int] | None:
    """Return column widths that sum to at most `max_width` and break no word, or None if the words need more."""
    columns = list(zip(*rows, strict=True))
    natural_widths = [max(map(_width, column)) for column in columns]
    widths = [max((_width(word) for cell in column for word in _plain(cell).split()), default=0) for column in columns]
    spare_width = max_width - sum(widths)
    if spare_width < 0:
        return None
    # Columns that need least are made whole first: the others fold anyway.
    for index in sorted(range(len(widths)), key=lambda index: natural_widths[index] - widths[index]):
        added_width = min(spare_width, natural_widths[index] - widths[index])
        widths[index] += added_width
        spare_width -= added_width
    return widths


def _width(markup: str) -> int:
    return max((cell_len(line) for line in _plain(markup).splitlines()), default=0)


def _plain(markup: str) -> str:
    return RichText.from_markup(markup).plain


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
