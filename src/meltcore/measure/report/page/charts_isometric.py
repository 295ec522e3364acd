"""Draws bars on a grid of two axes in isometric projection, as SVG without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup

from meltcore.measure.documents.values.formatting import format_number
from meltcore.measure.report.page.charts import (
    DIGIT_WIDTH,
    Point,
    element,
    format_tick,
    line_between,
    linear_ticks,
    points_text,
    svg,
    text,
)

_WIDTH, _WALL_HEIGHT = 520.0, 150.0  # of the chart; of the highest tick
_LEFT, _TOP = 62.0, 26.0
_SLOPE = 0.42  # rise over run of both axes on the ground
_GROUND_WIDTH = 430.0  # the width of the ground, both axes together
_BAR_INSET = 0.14  # of a cell, on each side of its bar


class _Projection:
    """Maps (column, row, value) to a point: columns go right and forward, rows go right and backward."""

    def __init__(self, columns: int, rows: int, highest: float) -> None:
        self.step = _GROUND_WIDTH / (columns + rows)
        self.columns, self.rows, self.highest = columns, rows, highest
        self._origin: Point = (_LEFT, _TOP + _WALL_HEIGHT + rows * self.step * _SLOPE)

    def __call__(self, column: float, row: float, value: float = 0.0) -> Point:
        x, y = self._origin
        ground = y + (column - row) * self.step * _SLOPE
        return x + (column + row) * self.step, ground - _WALL_HEIGHT * value / self.highest

    @property
    def height(self) -> float:
        """The height of the whole chart, with the names of the axes below."""
        return self(self.columns, 0)[1] + 46


def isometric_bars(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[int, int], float],
    *,
    label: str,
    row_title: str,
    column_title: str,
    unit: str,
    color: int,
    highest: float,
) -> Markup:
    """Draw one bar per (row, column) of `values`.

    `highest` is the end of the value scale. Charts that are compared need the same `highest`. The last row is at the
    back and the first column on the left: few bars are hidden if values grow with the row and fall with the column. A
    cell without a value stays empty.
    """
    ticks = linear_ticks(highest, 4)
    projection = _Projection(len(columns), len(rows), ticks[-1])
    elements = _walls(projection, ticks, unit)
    for row in reversed(range(len(rows))):
        for column in range(len(columns)):
            if (row, column) in values:
                tooltip_start = f"{row_title} {rows[row]}, {column_title} {columns[column]}: "
                elements += _bar(projection, column, row, values[row, column], color, tooltip_start, unit)
    elements += _axis_labels(projection, rows, columns, row_title, column_title)
    return svg(_WIDTH, projection.height, label, elements)


def _walls(projection: _Projection, ticks: Sequence[float], unit: str) -> list[Markup]:
    """Draw the two back walls with a line per tick, and the grid of the ground."""
    elements = []
    for tick in ticks:
        left, corner, right = (
            projection(0, 0, tick),
            projection(0, projection.rows, tick),
            projection(projection.columns, projection.rows, tick),
        )
        elements += [line_between(left, corner, "grid"), line_between(corner, right, "grid")]
        elements.append(text((left[0] - 8, left[1] + 4), format_tick(tick, unit), "tick", "end"))
    elements += [
        line_between(projection(column, 0), projection(column, projection.rows), "grid")
        for column in range(1, projection.columns)
    ]
    elements += [
        line_between(projection(0, row), projection(projection.columns, row), "grid")
        for row in range(1, projection.rows)
    ]
    outline = [projection(0, 0), projection(projection.columns, 0), projection(projection.columns, projection.rows)]
    return elements + [line_between(*ends, "frame") for ends in pairwise(outline)]


def _bar(
    projection: _Projection, column: int, row: int, value: float, color: int, tooltip_start: str, unit: str
) -> list[Markup]:
    """Draw the three visible faces of a bar, and its value on top if the text fits.

    The near face and the side face are darkened by a translucent shade.
    """
    near_edge, far_edge = _BAR_INSET, 1 - _BAR_INSET
    x0, x1, y0, y1 = column + near_edge, column + far_edge, row + near_edge, row + far_edge
    top = [projection(x0, y0, value), projection(x1, y0, value), projection(x1, y1, value), projection(x0, y1, value)]
    near_face = [projection(x0, y0), projection(x1, y0), projection(x1, y0, value), projection(x0, y0, value)]
    side = [projection(x1, y0), projection(x1, y1), projection(x1, y1, value), projection(x1, y0, value)]
    faces = [_face(points, f"bar c{color}") for points in (near_face, side, top)]
    shades = [_face(near_face, "shade"), _face(side, "shade dark")]
    formatted = format_number(value)
    x, y = projection(column + 0.5, row + 0.5, value)
    label_fits = len(formatted) * DIGIT_WIDTH < 2 * projection.step * (far_edge - near_edge)
    value_label = [text((x, y + 4), formatted, "bar-value")] if label_fits else []
    tooltip = element("title", f"{tooltip_start}{formatted} {unit}")
    return [element("g", tooltip, *faces, *shades), *value_label]


def _face(points: Sequence[Point], cls: str) -> Markup:
    return element("polygon", points=points_text(points), cls=cls)


def _axis_labels(
    projection: _Projection, rows: Sequence[str], columns: Sequence[str], row_title: str, column_title: str
) -> list[Markup]:
    elements = []
    for column, name in enumerate(columns):
        x, y = projection(column + 0.5, 0)
        elements.append(text((x - 6, y + 18), name, "tick", "end"))
    for row, name in enumerate(rows):
        x, y = projection(projection.columns, row + 0.5)
        elements.append(text((x + 6, y + 18), name, "tick", "start"))
    bottom = projection.height - 10
    elements.append(text((_LEFT - 40, bottom), column_title, "axis", "start"))
    elements.append(text((_WIDTH - 6, bottom), row_title, "axis", "end"))
    return elements
