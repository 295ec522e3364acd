"""Draws all charts as SVG: lines over load, strips over time, bars, grids of cells, rows of dots.

Colors come from the style sheet by class name, "c1" to "c4". Text is escaped. Positions are in SVG units; a chart
scales with the column of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

from meltcore.measure.documents.values.formatting import format_number, format_percent
from meltcore.measure.report.page.page import Figure

Point = tuple[float, float]
NUM_COLORS = 4
_FULL_WIDTH = 1120.0
DIGIT_WIDTH = 7.5  # the width of a digit, for labels that must not touch
_MIN_TICK_GAP = 52.0  # the least distance between the labels of an axis


@dataclass(frozen=True)
class Frame:
    """The size of a chart (`width`, `height`) and the edges of the rectangle that its axes enclose."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


NARROW = Frame(520, 300, 76, 504, 16, 250)
WIDE = Frame(_FULL_WIDTH, 384, 90, 1080, 20, 330)


@dataclass(frozen=True)
class Mark:
    """One point of a line. A `y` of None breaks the line.

    `is_outlined` draws a hollow dot, and `has_ring` a circle around the dot.
    """

    x: float
    y: float | None
    tip: str = ""
    is_outlined: bool = False
    has_ring: bool = False


@dataclass(frozen=True)
class Line:
    """A named line of a chart; `color` is the number (1 to 4) of a color in the style sheet."""

    name: str
    color: int
    marks: Sequence[Mark]
    dashed: bool = False


@dataclass(frozen=True)
class Strip:
    """One quantity over time, as (name, color, points) per line; a point is (seconds, value).

    The value axis starts at 0 and ends at `top` or higher.
    """

    title: str
    lines: Sequence[tuple[str, int, Sequence[tuple[float, float | None]]]]
    top: float = 0.0
    is_filled: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar, with its name, detail and warning above and a note at its end.

    A `value` of None means "not measured".
    """

    name: str
    value: float | None
    detail: str = ""
    note: str = ""
    warning: str = ""
    is_faded: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to positions in [start, end] in SVG units, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of `value`: the middle of the range if `low` equals `high`."""
        low, high, coordinate = (
            map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + ((coordinate - low) / (high - low) if high > low else 0.5) * (self.end - self.start)


def has_curve(lines: Sequence[Line]) -> bool:
    """Return whether lines have values at two loads or more. Of one dot a table says more."""
    return len({mark.x for line in lines for mark in line.marks if mark.y is not None}) > 1


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_title: str,
    unit: str = "",
    log_y: bool = False,
    frame: Frame = NARROW,
    format_x: Callable[[float], str] = "{:,g}".format,
    reference: tuple[float, str] | None = None,
) -> Markup | None:
    """Draw lines over a logarithmic x axis with one tick per x. Returns None if there is nothing to draw.

    `reference` is (value, name) of a dashed horizontal line. `format_x` formats the label of a tick.
    """
    xs = sorted({mark.x for line in lines for mark in line.marks})
    y_values = [mark.y for line in lines for mark in line.marks if mark.y is not None and (mark.y > 0 or not log_y)]
    if not y_values or xs[0] <= 0:
        return None
    x_scale = Scale(xs[0], xs[-1], frame.left + 14, frame.right - 14, log=True)
    max_value = max([*y_values, *([] if reference is None else [reference[0]])])
    ticks = log_ticks(min(y_values), max_value) if log_y else linear_ticks(max_value)
    y_scale = Scale(ticks[0], ticks[-1], frame.bottom, frame.top, log=log_y)
    elements = _y_axis(y_scale, ticks, frame.left, frame.right, unit)
    elements.append(line_between((frame.left, frame.bottom), (frame.right, frame.bottom), "frame"))
    elements += [
        line_between((x_scale(tick_x), frame.bottom), (x_scale(tick_x), frame.bottom + 5), "frame") for tick_x in xs
    ]
    labeled_indices = spaced_indices([x_scale(tick_x) for tick_x in xs], _MIN_TICK_GAP)
    elements += [
        text((x_scale(xs[index]), frame.bottom + 20), format_x(xs[index]), "tick") for index in labeled_indices
    ]
    elements.append(text(((frame.left + frame.right) / 2, frame.bottom + 42), x_title, "axis"))
    if reference is not None:
        value, name = reference
        elements.append(
            line_between((frame.left, y_scale(value)), (frame.right, y_scale(value)), "line thin dashed c4")
        )
        elements.append(text((frame.left + 8, y_scale(value) - 7), name, "name c4", "start"))
    for line in lines:
        elements += _line_elements(line, x_scale, y_scale)
    return svg(frame.width, frame.height, label, elements)


def line_figure(
    title: str,
    lines: Sequence[Line],
    *,
    label: str,
    x_title: str,
    unit: str = "",
    log_y: bool = False,
    frame: Frame = NARROW,
    format_x: Callable[[float], str] = "{:,g}".format,
    note: str = "",
) -> Figure | None:
    """Draw lines as `line_chart` does, with a legend. Returns None if there is nothing to draw."""
    chart = line_chart(lines, label=label, x_title=x_title, unit=unit, log_y=log_y, frame=frame, format_x=format_x)
    return (
        None if chart is None else Figure(title, chart, [(line.name, line.color, line.dashed) for line in lines], note)
    )


def time_strips(
    strips: Sequence[Strip],
    *,
    duration_s: float,
    label: str,
    x_title: str,
    frame: Frame = NARROW,
    spans: Sequence[tuple[float, float, str, str]] = (),
) -> Markup:
    """Draw strips one below the other on a common time axis.

    `spans` has (start, end, tooltip, name) of each shaded period, in seconds.
    """
    height, gap = 74.0, 38.0
    top = 62.0 if any(name for *_, name in spans) else 24.0
    x_scale = Scale(0.0, duration_s, frame.left, frame.right)
    bottom = top + len(strips) * (height + gap) - gap
    elements = []
    last_label_end = -math.inf
    for start, end, tooltip, name in spans:
        left, width = x_scale(start), x_scale(min(end, duration_s)) - x_scale(start)
        shade_start = 28.0 if name else top
        rectangle = {"x": left, "y": shade_start, "width": width, "height": bottom - shade_start}
        elements.append(element("rect", element("title", tooltip), cls="span", **rectangle))
        center, half_width = left + width / 2, len(name) * DIGIT_WIDTH / 2
        if name and center - half_width > last_label_end + DIGIT_WIDTH:
            elements.append(text((center, 20), name, "tick"))
            last_label_end = center + half_width
    for index, strip in enumerate(strips):
        elements += _strip_elements(strip, x_scale, top + index * (height + gap), height)
    ticks = linear_ticks(duration_s, 10 if frame.width == _FULL_WIDTH else 6)
    elements += [
        text((x_scale(tick), bottom + 17), f"{tick:g}", "tick") for tick in ticks if tick <= duration_s * 1.001
    ]
    elements.append(text(((frame.left + frame.right) / 2, bottom + 35), x_title, "axis"))
    return svg(frame.width, bottom + 44, label, elements)


def bar_chart(
    bars: Sequence[Bar], *, label: str, color: int = 1, footnote: str = "", is_forced: bool = False
) -> Markup:
    """Draw one bar per row. The names are above the bars, so that the chart fits on a phone.

    The longest bar has the full length. `is_forced` shows the footnote as a warning.
    """
    width, max_length, row_height, thickness, name_height = 640.0, 470.0, 56.0, 22.0, 20.0
    max_value = max((bar.value or 0.0 for bar in bars), default=0.0) or 1.0
    elements: list[Markup] = []
    for index, bar in enumerate(bars):
        top = index * row_height
        center_y = top + name_height + thickness / 2
        title_spans = [element("tspan", bar.name, cls="name"), element("tspan", bar.detail, dx=9.0, cls="axis")]
        title_spans += [element("tspan", bar.warning, dx=9.0, cls="forced")] if bar.warning else []
        elements.append(element("text", *title_spans, x=0.0, y=top + name_height - 6))
        if bar.value is None:
            elements.append(text((0.0, center_y + 4), "not measured", "axis", "start"))
            continue
        length = max_length * bar.value / max_value
        rectangle = {"x": 0.0, "y": top + name_height, "width": length, "height": thickness, "rx": 3.0}
        tooltip = element("title", f"{bar.name}: {format_number(bar.value)}")
        elements.append(element("rect", tooltip, cls=f"bar c{color}" + " pale" * bar.is_faded, **rectangle))
        note = element("tspan", bar.note, dx=8.0, cls="axis")
        elements.append(element("text", format_number(bar.value), note, x=length + 9, y=center_y + 5, cls="value"))
    height = len(bars) * row_height + 16 * bool(footnote)
    if footnote:
        elements.append(text((0.0, height - 6), footnote, "forced" if is_forced else "axis", "start"))
    return svg(width, height, label, elements, cls="bars")


def stacked_bar(parts: Sequence[tuple[str, float, str]], total: float, label: str) -> Markup:
    """Draw one bar of (name, size, CSS class) parts in proportion to `total`, with names below wide parts."""
    left, right, top, thickness, label_width = 10.0, 1110.0, 8.0, 34.0, 150.0
    elements: list[Markup] = []
    x = left
    for name, size, cls in parts:
        width, label_text = (right - left) * size / total, f"{name} {format_percent(size / total)}"
        tooltip = element("title", f"{name}: {format_percent(size / total)}")
        elements.append(element("rect", tooltip, x=x, y=top, width=width, height=thickness, cls=cls))
        if width >= label_width:
            elements.append(text((x + width / 2, top + thickness + 18), label_text, "axis"))
        x += width
    return svg(_FULL_WIDTH, top + thickness + 28, label, elements)


def cell_grid(
    rows: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[int, int], tuple[str, str, str]], label: str
) -> Markup:
    """Draw a grid of cells with the names of rows and columns.

    `cells` maps (row, column) to (CSS class, text, tooltip).
    """
    left, top, height, gap = 210.0, 34.0, 30.0, 4.0
    width = min(108.0, (_FULL_WIDTH - left) / max(1, len(columns)))
    elements = [text((left + width * (index + 0.5), top - 12), name, "axis") for index, name in enumerate(columns)]
    for row, name in enumerate(rows):
        elements.append(text((left - 14, top + row * (height + gap) + height / 2 + 5), name, "name", "end"))
    for (row, column), (cls, content, tooltip) in cells.items():
        x, y = left + column * width, top + row * (height + gap)
        rectangle = {"x": x, "y": y, "width": width - gap, "height": height, "rx": 4.0}
        elements.append(element("rect", element("title", tooltip), cls=cls, **rectangle))
        elements.append(text((x + width / 2, y + height / 2 + 5), content, "mark"))
    return svg(_FULL_WIDTH, top + len(rows) * (height + gap), label, elements)


def dot_rows(rows: Sequence[tuple[str, int, Sequence[float]]], label: str) -> Markup:
    """Draw one row per (name, color, values), with a dot per value and a bar at the mean.

    The axis covers only the range of the values, so that small differences are visible.
    """
    left, right, height, top = 210.0, 1080.0, 46.0, 18.0
    values = [value for *_, row_values in rows for value in row_values]
    margin = 0.05 * (max(values) - min(values)) or 0.01 * abs(values[0]) or 1.0
    x_scale = Scale(min(values) - margin, max(values) + margin, left, right)
    bottom = top + len(rows) * height
    ticks = inner_ticks(x_scale.low, x_scale.high)
    elements = [line_between((left, bottom), (right, bottom), "frame")]
    for index in spaced_indices([x_scale(tick) for tick in ticks], 84.0):
        elements.append(line_between((x_scale(ticks[index]), top), (x_scale(ticks[index]), bottom), "grid"))
        elements.append(text((x_scale(ticks[index]), bottom + 20), f"{ticks[index]:,.10g}", "tick"))
    for row, (name, color, row_values) in enumerate(rows):
        y, mean = top + (row + 0.5) * height, sum(row_values) / len(row_values)
        elements.append(text((left - 14, y + 5), name, f"name c{color}", "end"))
        elements.append(line_between((x_scale(mean), y - 15), (x_scale(mean), y + 15), f"line c{color}"))
        # Equal values lie on top of each other; a step up and down keeps them apart.
        elements += [
            dot(
                (x_scale(value), y + (index % 3 - 1) * 5), f"dot c{color}", f"start {index + 1}: {format_number(value)}"
            )
            for index, value in enumerate(row_values)
        ]
    return svg(_FULL_WIDTH, bottom + 44, label, elements)


def _y_axis(y_scale: Scale, ticks: Sequence[float], left: float, right: float, unit: str = "") -> list[Markup]:
    """Draw the grid lines over the width of a chart, and their labels."""
    elements = [
        line_between((left, y_scale(tick)), (right, y_scale(tick)), "grid" if tick else "frame") for tick in ticks
    ]
    return elements + [text((left - 8, y_scale(tick) + 4), format_tick(tick, unit), "tick", "end") for tick in ticks]


def _line_elements(line: Line, x_scale: Scale, y_scale: Scale) -> list[Markup]:
    """Draw a polyline per unbroken segment of a line, and a dot per mark."""
    segments: list[list[Point]] = [[]]
    dots = []
    for mark in line.marks:
        if mark.y is None or (y_scale.log and mark.y <= 0):
            segments.append([])
            continue
        point = (x_scale(mark.x), y_scale(mark.y))
        segments[-1].append(point)
        if mark.has_ring:
            dots.append(element("circle", cx=point[0], cy=point[1], r=11, cls=f"line c{line.color}"))
        dots.append(dot(point, f"{'line thin' if mark.is_outlined else 'dot'} c{line.color}", mark.tip))
    cls = f"line c{line.color}" + " dashed" * line.dashed
    return [*(polyline(segment, cls) for segment in segments if len(segment) > 1), *dots]


def _strip_elements(strip: Strip, x_scale: Scale, top: float, height: float) -> list[Markup]:
    max_value = max([strip.top, *(value for *_, points in strip.lines for _, value in points if value is not None)])
    ticks = linear_ticks(max_value, 2)
    bottom = top + height
    y_scale = Scale(0.0, ticks[-1], bottom, top)
    elements = [
        text((x_scale.start, top - 9), strip.title, "axis", "start"),
        *_y_axis(y_scale, ticks, x_scale.start, x_scale.end),
    ]
    names = [(name, color) for name, color, _ in strip.lines if name]
    elements += [colored_names((x_scale.end, top - 9), names)] if names else []
    for _, color, points in strip.lines:
        visible_points = [(t_s, value) for t_s, value in points if t_s <= x_scale.high]
        for is_measured, group in groupby(visible_points, key=lambda point: point[1] is not None):
            if not is_measured:
                continue
            segment = [(x_scale(t_s), y_scale(value)) for t_s, value in group if value is not None]
            # A point alone becomes a short line, or it would not be seen.
            segment = segment if len(segment) > 1 else [(segment[0][0] - 1, segment[0][1]), *segment]
            if strip.is_filled:
                outline = [(segment[0][0], bottom), *segment, (segment[-1][0], bottom)]
                elements.append(element("polygon", points=points_text(outline), cls=f"area c{color}"))
            elements.append(polyline(segment, f"line thin c{color}"))
    return elements


def format_tick(value: float, unit: str) -> str:
    """Format the label of a tick: 1500 as "1.5k", or with the unit "ms" as "1.5 s"."""
    if unit == "ms":
        return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def linear_ticks(high: float, max_ticks: int = 5) -> list[float]:
    """Return about `max_ticks` round values from 0 on. The last value is at least `high`.

    Returns [0, 1] for a `high` of 0 or less.
    """
    if high <= 0:
        return [0.0, 1.0]
    step = _round_step(high / max_ticks, (1, 2, 2.5, 5, 10))
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks from `low` to `high` (both above 0): powers of ten, or 1-2-5 steps for less than three decades."""
    first_power, last_power = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last_power = max(last_power, first_power + 1)
    if last_power - first_power >= 3:
        return [10.0**power for power in range(first_power, last_power + 1)]
    candidates = [factor * 10.0**power for power in range(first_power, last_power) for factor in (1, 2, 5)] + [
        10.0**last_power
    ]
    first_index = max(index for index, value in enumerate(candidates) if value <= low * (1 + 1e-9))
    last_index = min(index for index, value in enumerate(candidates) if value >= high * (1 - 1e-9))
    return candidates[first_index : max(last_index, first_index + 1) + 1]


def inner_ticks(low: float, high: float) -> list[float]:
    """Return about five round values between `low` and `high`, in ascending order."""
    step = _round_step((high - low) / 5, (1, 2, 5, 10))
    return [step * multiple for multiple in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_step(min_step: float, factors: Sequence[float]) -> float:
    """Return the smallest step of at least `min_step` that is one of `factors` times a power of ten."""
    power = 10.0 ** math.floor(math.log10(min_step))
    return next(power * factor for factor in factors if power * factor >= min_step * (1 - 1e-9))


def spaced_indices(positions: Sequence[float], gap: float) -> list[int]:
    """Return the indices of positions that are at least `gap` apart, always including the last position.

    `positions` are in ascending order.
    """
    selected: list[int] = []
    for index, position in enumerate(positions):
        if not selected or position - positions[selected[-1]] >= gap:
            selected.append(index)
    last = len(positions) - 1
    if selected and selected[-1] != last:
        if positions[last] - positions[selected[-1]] < gap:
            selected.pop()
        selected.append(last)
    return selected


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """Return one SVG element, with its text escaped.

    The attribute `cls` becomes `class`, underscores become hyphens, and floats get one decimal.
    """
    content = Markup("").join(escape(child) for child in children)
    opening_tag = " ".join([tag, *(_attribute(name, value) for name, value in attributes.items())])
    markup = f"<{opening_tag}>{content}</{tag}>" if content else f"<{opening_tag}/>"
    return Markup(markup)  # noqa: S704 - children and attributes are escaped


def _attribute(name: str, value: object) -> str:
    formatted = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
    return f'{"class" if name == "cls" else name.replace("_", "-")}="{escape(formatted)}"'


def text(position: Point, content: str, cls: str, anchor: str = "middle") -> Markup:
    """Return a text element. `anchor` says which part of the text is at `position`: start, middle or end."""
    return element("text", content, x=position[0], y=position[1], cls=cls, text_anchor=anchor)


def colored_names(position: Point, names: Sequence[tuple[str, int]]) -> Markup:
    """Return one line of text of (name, color) pairs that ends at `position`.

    Em spaces separate the names, since resvg misplaces `dx`.
    """
    name_spans = [
        element("tspan", "\u2003" * bool(index) + name, cls=f"name c{color}")
        for index, (name, color) in enumerate(names)
    ]
    return element("text", *name_spans, x=position[0], y=position[1], text_anchor="end")


def line_between(start: Point, end: Point, cls: str) -> Markup:
    """Return a straight line from `start` to `end`."""
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], cls=cls)


def polyline(points: Sequence[Point], cls: str) -> Markup:
    """Return a line through `points`."""
    return element("polyline", points=points_text(points), cls=cls)


def dot(center: Point, cls: str, tooltip: str) -> Markup:
    """Return a small circle at `center` that shows `tooltip` on hover."""
    return element("circle", element("title", tooltip), cx=center[0], cy=center[1], r=4, cls=cls)


def svg(width: float, height: float, label: str, children: Iterable[Markup], **attributes: object) -> Markup:
    """Return a whole chart with `children`; `label` is its description for screen readers."""
    view_box = f"0 0 {width:g} {height:g}"
    return element("svg", *children, viewBox=view_box, role="img", aria_label=label, **attributes)


def points_text(points: Sequence[Point]) -> str:
    """Format points as the value of an SVG attribute."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
