"""The document model of reports, which `html.py` and `console.py` render.

A page is a header, sections of blocks, and a footer. A block that a terminal cannot show has `console` False.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from meltcore.measure.documents.schema import Distribution
from meltcore.measure.documents.values.formatting import format_number, format_percentile
from meltcore.measure.documents.values.percentiles import TOO_SMALL
from meltcore.measure.documents.verdicts import Style, style_of

TOO_FEW_TEXT = "n<: too few requests for that percentile"
TOO_FEW_MARK = "n<"  # a percentile that its sample is too small for, where a table is narrow


@dataclass(frozen=True)
class Cell:
    """One cell of a table. `tag` shows the text as a tag; `items` and the faint `small_print` are below the text.

    `console_text` replaces the text on the console; `title` is the tooltip.
    """

    text: str
    style: Style = ""
    tag: bool = False
    items: Sequence[str] = ()
    small_print: str = ""
    console_text: str = ""
    title: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `console` is the head on the console. If it is empty, the console shows `head`. None hides the column on the
    console. `group` is a second head that spans all neighboring columns of the same group. `align` "text" means
    left-aligned and wrapped.
    """

    head: str
    group: str = ""
    console: str | None = ""
    align: Literal["right", "left", "text"] = "right"


@dataclass(frozen=True)
class Row:
    """A row of a table, with its cells in the order of the columns.

    Emphasized rows are shaded and bold; `ends_group` draws a line below the row on the console.
    """

    cells: Sequence[str | Cell]
    is_emphasized: bool = False
    ends_group: bool = False


@dataclass(frozen=True, kw_only=True)
class Block:
    """The base class of all parts of a section; `console` says whether a terminal shows the block."""

    console: bool = True


@dataclass(frozen=True)
class Table(Block):
    """A table of cells with a `note` below. A compact table has a small font, for many columns.

    On a narrow screen, a stacked table shows the text below the row's other cells.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    is_compact: bool = False
    is_stacked: bool = False

    @property
    def has_too_few(self) -> bool:
        """Whether a cell is a percentile of too few requests."""
        cells = (cell for row in self.rows for cell in row.cells)
        return any(isinstance(cell, Cell) and cell.console_text == TOO_FEW_MARK for cell in cells)


@dataclass(frozen=True)
class Tiles(Block):
    """The most important numbers as a row of tiles, each with (label, value, small print)."""

    tiles: Sequence[tuple[str, str, str]]
    console: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Text(Block):
    """A paragraph of text in small, normal or large ("lead") print."""

    text: str
    size: Literal["small", "lead", ""] = ""


@dataclass(frozen=True)
class Box(Block):
    """A framed note with a title, a text, a list of `items` and small print.

    `lead` is the bold start of the text. `tag` precedes the title, and the faint `aside` follows the title.
    """

    style: Style = ""
    title: str = ""
    lead: str = ""
    text: str = ""
    items: Sequence[str] = ()
    small_print: str = ""
    tag: str = ""
    aside: str = ""


@dataclass(frozen=True)
class Figure(Block):
    """A chart with a title, a legend, a caption beside the title and a note below.

    The legend has (name, color, dashed) per line of the chart.
    """

    title: str
    chart: Markup
    legend: Sequence[tuple[str, int, bool]] = ()
    note: str = ""
    caption: str = ""
    console: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Audio(Block):
    """A player of a WAV file that is part of the page, with a title above, a text below and a faint note."""

    title: str
    wav: bytes
    text: str = ""
    note: str = ""
    console: bool = field(default=False, kw_only=True)

    @property
    def data_uri(self) -> str:
        """The file as a data URI."""
        return f"data:audio/wav;base64,{b64encode(self.wav).decode()}"


@dataclass(frozen=True)
class Figures(Block):
    """Several figures in a grid. `is_full_width` gives each figure the whole width."""

    figures: Sequence[Figure]
    is_full_width: bool = False
    console: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Facts(Block):
    """A list of facts as (name, value) pairs."""

    facts: Sequence[tuple[str, str]]
    console: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Checks(Block):
    """A list of checks, each with (style, status, name, detail)."""

    checks: Sequence[tuple[Style, str, str, str]]
    console: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Details(Block):
    """Blocks that unfold below a summary line. With `is_open` the blocks are unfolded at first.

    `tag` precedes the summary, and the faint `aside` follows the summary.
    """

    summary: str
    blocks: Sequence[Block]
    tag: str = ""
    style: Style = ""
    aside: str = ""
    is_open: bool = False
    console: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Section(Block):
    """A title, optionally with a tag, and the blocks below.

    `column_sections` are shown in two columns if the page is wide enough.
    """

    title: str = ""
    blocks: Sequence[Block] = ()
    tag: str = ""
    style: Style = ""
    column_sections: Sequence[Section] = ()

    @property
    def has_too_few(self) -> bool:
        """Whether a compact table of the section has percentiles of too few requests."""
        return any(isinstance(block, Table) and block.is_compact and block.has_too_few for block in self.blocks)


@dataclass(frozen=True)
class Page:
    """A whole document. `conclusion` is the last line on the console, after the badge.

    `device`, `score` with `unit`, and `details` form a large headline. Documents without a headline leave these fields
    empty.
    """

    title: str
    name: str
    subtitle: str
    sections: Sequence[Section]
    footer: str
    badge: str = ""
    style: Style = ""
    conclusion: str = ""
    device: str = ""
    score: str = ""
    unit: str = ""
    details: str = ""


def numeric_columns(*heads: str, group: str = "", console: str | None = "") -> list[Column]:
    """Return one column of numbers per head, all with the same group and console head."""
    return [Column(head, group, console) for head in heads]


def verdict_cell(word: str) -> Cell:
    """Return the cell with a verdict as a tag in its color."""
    return Cell(word, style_of(word), tag=True)


def percentile_cell(distribution: Distribution, name: str) -> Cell:
    """Return the cell of a percentile. If there are too few samples, it shows a faint "n too small"."""
    formatted = format_percentile(distribution, name)
    return Cell(
        formatted, "faint" if formatted == TOO_SMALL else "", console_text=TOO_FEW_MARK * (formatted == TOO_SMALL)
    )


def format_reading(value: float | None) -> str:
    """Format a sensor reading: whole numbers without decimals, others to three digits, None as a dash."""
    return f"{value:,.0f}" if value is not None and value == int(value) else format_number(value)
