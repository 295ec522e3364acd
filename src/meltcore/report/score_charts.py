"""The GPU score's drawings: a quantity against concurrency, and what one device did over the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, tick_text, x_axis, y_axis
from meltcore.report.scale import Scale, linear_ticks, log_ticks
from meltcore.results.score import GpuScore, Lines, ScoreLevel
from meltcore.results.wording import number

_WIDE = 1120.0
_WIDE_LEFT, _WIDE_RIGHT = 64.0, 1104.0
_PANEL, _PANEL_GAP, _FIRST_PANEL = 74.0, 36.0, 62.0
_LETTER = 7.5  # the width of a digit, for names that must not touch


@dataclass(frozen=True)
class Curve:
    """`points`: (concurrency, value) of each level that has one."""

    name: str
    colour: int
    points: Sequence[tuple[int, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One strip of the time lines: its title with the unit, and (key, name, colour) of each line.

    `filled`: down to zero, for what adds up over time.
    """

    title: str
    lines: Sequence[tuple[str, str, int]]
    top: float | None = None  # the axis ends there; None: where the values do
    filled: bool = False


_PANELS = (
    Panel("output tokens/s", [("output_tokens_per_s", "", 1)], filled=True),
    Panel("power, W", [("power_w", "", 2)], filled=True),
    Panel("temperature, °C", [("temperature_c", "GPU", 4), ("memory_temperature_c", "memory", 3)]),
    Panel("SM clock, MHz", [("sm_clock_mhz", "", 3)]),
    Panel("memory clock, MHz", [("memory_clock_mhz", "", 2)]),
    Panel(
        "share of time or peak, %",
        [
            ("sm_active_percent", "SM active", 1),
            ("dram_bandwidth_percent", "DRAM bandwidth", 2),
            ("tensor_percent", "tensor cores", 3),
            ("sm_occupancy_percent", "SM occupancy", 4),
        ],
        top=100.0,
    ),
)


def against_concurrency(curves: Sequence[Curve], *, unit: str, log_y: bool, label: str) -> Markup | None:
    """Each curve over the concurrency of its levels (logarithmic). None where there is nothing to draw."""
    loads = sorted({load for curve in curves for load, _ in curve.points})
    values = [value for curve in curves for _, value in curve.points if value > 0 or not log_y]
    if not values:
        return None
    x = Scale(loads[0], loads[-1], LEFT + 14, RIGHT - 14, log=True)
    ticks = log_ticks(min(values), max(values)) if log_y else linear_ticks(max(values))
    y = Scale(ticks[0], ticks[-1], BOTTOM, TOP, log=log_y)
    parts = [*y_axis(y, ticks, unit), *x_axis(x, loads, "Concurrent requests")]
    for curve in curves:
        kept = [(load, value) for load, value in curve.points if value > 0 or not log_y]
        style = f"line c{curve.colour}" + (" dashed" if curve.dashed else "")
        parts.append(svg.polyline([(x(load), y(value)) for load, value in kept], style))
        for load, value in kept:
            tip = f"{load:,} at once: {curve.name} {number(value)} {unit}"
            parts.append(svg.dot((x(load), y(value)), f"dot c{curve.colour}", tip))
    return svg.picture(WIDTH, HEIGHT, label, parts)


def time_lines(device: GpuScore) -> Markup | None:
    """Everything over the whole run, one strip above the other, the windows that count shaded."""
    found = device.lines
    if found is None:
        return None
    panels = [panel for panel in _PANELS if any(key in found.values for key, _, _ in panel.lines)]
    duration_s = found.bucket_s * len(next(iter(found.values.values())))
    x = Scale(0.0, duration_s, _WIDE_LEFT, _WIDE_RIGHT)
    floor = _FIRST_PANEL + len(panels) * (_PANEL + _PANEL_GAP) - _PANEL_GAP
    parts = _windows(device, x, floor)
    for place, panel in enumerate(panels):
        parts += _panel(panel, found, x, _FIRST_PANEL + place * (_PANEL + _PANEL_GAP))
    for tick in linear_ticks(duration_s, 10):
        if tick <= duration_s * 1.001:
            parts.append(svg.text((x(tick), floor + 18), f"{tick:g}", "tick"))
    parts.append(svg.text(((_WIDE_LEFT + _WIDE_RIGHT) / 2, floor + 37), "seconds", "axis"))
    return svg.picture(_WIDE, floor + 44, f"{device.label}: the whole run over time", parts)


def _windows(device: GpuScore, x: Scale, floor: float) -> list[Markup]:
    """The shaded span and the name of each level's window, above all strips."""
    named: list[tuple[ScoreLevel, str]] = [(level, f"{level.concurrency:,}") for level in device.levels]
    if device.sustained is not None:
        named.append((device.sustained, f"sustained, {device.sustained.concurrency:,} at once"))
    parts = []
    labelled = float("-inf")
    for level, name in named:
        start, end = x(level.start_s + level.ramp_s), x(level.end_s)
        tip = svg.element("title", f"counted: {name}, {level.window_s:.1f} s")
        parts.append(svg.element("rect", tip, x=start, y=28.0, width=end - start, height=floor - 28, cls="span"))
        middle, half = (start + end) / 2, len(name) * _LETTER / 2
        if middle - half > labelled + _LETTER:
            parts.append(svg.text((middle, 20), name, "tick"))
            labelled = middle + half
    return parts


def _panel(panel: Panel, found: Lines, x: Scale, top: float) -> list[Markup]:
    present = [(found.values[key], name, colour) for key, name, colour in panel.lines if key in found.values]
    highest = max((value for values, _, _ in present for value in values if value is not None), default=0.0)
    ticks = linear_ticks(highest if panel.top is None else panel.top, 2)
    floor = top + _PANEL
    y = Scale(0.0, ticks[-1], floor, top)
    parts = [svg.text((_WIDE_LEFT, top - 10), panel.title, "axis", "start")]
    for tick in ticks:
        parts.append(svg.line((_WIDE_LEFT, y(tick)), (_WIDE_RIGHT, y(tick)), "frame" if tick == 0 else "grid"))
        parts.append(svg.text((_WIDE_LEFT - 8, y(tick) + 4), tick_text(tick, ""), "tick", "end"))
    names = [
        svg.element("tspan", name, cls=f"name c{colour}", dx=16.0 if place else 0.0)
        for place, (_, name, colour) in enumerate(present)
        if name
    ]
    parts.append(svg.element("text", *names, x=_WIDE_RIGHT, y=top - 10, text_anchor="end"))
    for values, _, colour in present:
        parts += _line(values, found.bucket_s, x, y, floor, colour, filled=panel.filled)
    return parts


def _line(
    values: Sequence[float | None], bucket_s: float, x: Scale, y: Scale, floor: float, colour: int, *, filled: bool
) -> list[Markup]:
    """In pieces: nothing is drawn where nothing was read."""
    parts = []
    numbered = list(enumerate(values))
    for present, group in groupby(numbered, key=lambda item: item[1] is not None):
        piece = [(x((place + 0.5) * bucket_s), y(value)) for place, value in group if value is not None]
        if present and len(piece) > 1:
            if filled:
                parts.append(svg.area(piece, floor, f"area c{colour}"))
            parts.append(svg.polyline(piece, f"line thin c{colour}"))
    return parts
