"""Writes the charts of a page into one SVG or PNG file that needs no style sheet of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from meltcore.common.errors import ConfigError
from meltcore.common.files import write_atomic
from meltcore.measure.report.page.charts import colored_names, element, text
from meltcore.measure.report.page.page import Block, Details, Figure, Figures, Page, Section

SUFFIXES = (".svg", ".png")
_WIDTH, _MARGIN, _GAP = 1180.0, 24.0, 24.0
_TITLE_HEIGHT = 34.0  # above each chart: its title and legend
_BAR_CHART_WIDTH = 760.0  # bars are readable without the whole width
_MAX_NARROW_WIDTH = 600.0  # a chart up to this width takes half of the width
_PNG_ZOOM = 2.0
_FONT_FAMILIES = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica")
_NO_RASTERIZER = (
    "--export {path}: a PNG needs the package resvg-py (pip install 'meltcore[png]'). Or export "
    "an .svg and convert it: rsvg-convert --zoom 2 charts.svg --output charts.png, Inkscape, or any browser"
)


def check_export(path: Path) -> None:
    """Raise ConfigError if `export_page` cannot write `path`.

    Reasons are an unknown suffix, a missing folder, or no package or font to draw a PNG.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--export {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--export {path}: there is no folder {path.parent}")
    if path.suffix.lower() == ".png":
        _rasterize(_svg_document([], "", 10.0, 10.0), path)


def export_page(page: Page, path: Path) -> None:
    """Write every chart of a page into `path`, an SVG or PNG file.

    Raises ConfigError for a path that `check_export` rejects, and for a page without charts.
    """
    check_export(path)
    figures = list(_figures(page.sections))
    if not figures:
        raise ConfigError(f"--export {path}: this page has no chart")
    svg = figures_svg(figures, page.title)
    write_atomic(path, svg.encode() if path.suffix.lower() == ".svg" else _rasterize(svg, path))


def figures_svg(figures: Sequence[Figure], title: str) -> str:
    """Return one SVG with the figures one below the other; two narrow figures share a row."""
    parts = [text((_MARGIN, _MARGIN + 14), title, "head", "start")]
    top, left, row_height = _MARGIN + 34, _MARGIN, 0.0
    half_width = (_WIDTH - 2 * _MARGIN - _GAP) / 2
    for figure in figures:
        width, height = _view_box_size(figure)
        is_narrow = width <= _MAX_NARROW_WIDTH
        shown_width = (
            half_width
            if is_narrow
            else min(_WIDTH - 2 * _MARGIN, _BAR_CHART_WIDTH if 'class="bars"' in figure.chart else _WIDTH)
        )
        if left > _MARGIN and not is_narrow:
            top, left, row_height = top + row_height, _MARGIN, 0.0
        parts += _figure_elements(figure, left, top, shown_width, shown_width * height / width)
        row_height = max(row_height, _TITLE_HEIGHT + shown_width * height / width + _GAP)
        if is_narrow and left == _MARGIN:
            left += half_width + _GAP
        else:
            top, left, row_height = top + row_height, _MARGIN, 0.0
    return _svg_document(parts, title, _WIDTH, top + row_height)


def _figures(blocks: Sequence[Block]) -> Iterator[Figure]:
    """Yield all figures of `blocks` and of nested blocks, in the order of the page."""
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Figures):
            yield from block.figures
        elif isinstance(block, Section):
            yield from _figures([*block.blocks, *block.column_sections])
        elif isinstance(block, Details):
            yield from _figures(block.blocks)


def _view_box_size(figure: Figure) -> tuple[float, float]:
    match = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', figure.chart)
    assert match is not None, "charts.svg writes it"
    return float(match[1]), float(match[2])


def _figure_elements(figure: Figure, left: float, top: float, width: float, height: float) -> list[Markup]:
    parts = [text((left, top + 14), figure.title, "title", "start")]
    names = [(name, color) for name, color, _ in figure.legend]
    parts += [colored_names((left + width, top + 14), names)] if names else []
    positioned_tag = f'<svg x="{left:.1f}" y="{top + _TITLE_HEIGHT:.1f}" width="{width:.1f}" height="{height:.1f}" '
    return [*parts, Markup(str(figure.chart).replace("<svg ", positioned_tag, 1))]  # noqa: S704 - a chart of the page


def _svg_document(parts: Sequence[Markup], label: str, width: float, height: float) -> str:
    style = element("style", Markup(_chart_style()))  # noqa: S704 - a file of the package
    background = element("rect", width=width, height=height, fill="#ffffff")
    root_attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}", "role": "img"}
    attributes = root_attributes | {"width": f"{width:g}", "height": f"{height:g}", "aria_label": label}
    return str(element("svg", style, background, *parts, font_family="sans-serif", **attributes)) + "\n"


@cache
def _chart_style() -> str:
    """Return the chart rules of the page's style sheet, with the light theme's colors in place of variables."""
    sheet = (resources.files("meltcore.measure.report.page") / "page.css").read_text(encoding="utf-8")
    css = sheet.partition("@media (max-width")[0]
    colors = dict(re.findall(r"(--[\w-]+): (#\w+)", css.partition("@media")[0]))
    rules = [line for line in css.splitlines() if line.startswith("svg ")]
    chart_rules = "\n".join(re.sub(r"var\((--[\w-]+)\)", lambda match: colors[match[1]], line) for line in rules)
    text_color = colors["--ink"]
    title_rules = (
        f"svg .head {{ font-size: 17px; font-weight: 700; fill: {text_color}; }}",
        f"svg .title {{ font-size: 15px; font-weight: 700; fill: {text_color}; }}",
    )
    return "\n".join((chart_rules, *title_rules))


def _rasterize(svg: str, path: Path) -> bytes:
    try:
        import resvg_py
    except ImportError as error:
        raise ConfigError(_NO_RASTERIZER.format(path=path)) from error

    def draw(svg_text: str, family: str) -> bytes:
        settings = {"zoom": _PNG_ZOOM, "background": "#ffffff", "sans_serif_family": family}
        return bytes(resvg_py.svg_to_bytes(svg_string=svg_text, **settings))

    # resvg does not look up which font is the system's sans-serif. Without it, it leaves text out and reports nothing.
    with_text, without = _svg_document([text((5, 9), "x", "tick")], "", 10, 10), _svg_document([], "", 10, 10)
    for family in _FONT_FAMILIES:
        if draw(with_text, family) != draw(without, family):
            return draw(svg, family)
    raise ConfigError(
        f"--export {path}: none of the fonts {', '.join(_FONT_FAMILIES)} is installed, so a PNG would have no text; "
        "install one or export .svg"
    )
