"""Renders a page as one HTML file that contains its style and charts, without scripts or external resources."""

from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from meltcore.common.files import write_atomic
from meltcore.measure.report.page.page import TOO_FEW_TEXT, Cell, Column, Page


def render_html(page: Page) -> str:
    """Return the whole page as HTML text."""
    css = (resources.files("meltcore.measure.report.page") / "page.css").read_text(encoding="utf-8")
    style = Markup(css)  # noqa: S704 - a file of the package
    html = _environment().get_template("page.html").render(page=page, style=style)
    return "\n".join(line for line in html.splitlines() if line.strip())


def write_page(path: Path, page: Page) -> Path:
    """Write the rendered page to `path` atomically, and return the path.

    Raises ConfigError if `path` cannot be written, or is a file that is neither empty nor such a page.
    """
    html = render_html(page).encode()
    write_atomic(path, html, start=html.partition(b"<title>")[0], hint="only a page of meltcore is replaced")
    return path


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("meltcore.measure.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda cell: Cell(cell) if isinstance(cell, str) else cell
    environment.filters["spans"] = _group_spans
    environment.globals["too_few_text"] = TOO_FEW_TEXT
    environment.tests["of_type"] = lambda block, name: type(block).__name__ == name
    return environment


def _group_spans(columns: list[Column]) -> list[tuple[str, int]]:
    """Return the upper header row as (group, number of columns) per cell, or an empty list if no column has a group."""
    spans = [(name, len(list(group))) for name, group in groupby(columns, key=lambda column: column.group)]
    return spans if any(name for name, _ in spans) else []
