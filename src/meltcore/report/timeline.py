"""One level over time, everything on one clock: tokens, requests, latencies, and below them what the GPUs did."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.charts import LEFT, RIGHT, tick_text
from meltcore.report.scale import Scale, linear_ticks
from meltcore.results.schema import GpuTimeline, LevelResult
from meltcore.results.wording import load_of

WIDTH = 520.0
_TOP, _GAP, _FOOT = 24.0, 40.0, 44.0
_TALL, _LOW = 86.0, 70.0
_COLOURS = 4
_GIB = 2**30

# (key, what the panel says, what one unit of the scale is, the least top of the scale)
_GPU_PANELS = (
    ("sm_active_percent", "SM active, %", 1.0, 100.0),
    ("dram_bandwidth_percent", "DRAM bandwidth, %", 1.0, 100.0),
    ("power_w", "power, W", 1.0, 0.0),
    ("memory_used_bytes", "memory used, GiB", float(_GIB), 0.0),
)


@dataclass(frozen=True)
class _Line:
    """(seconds since release, value) points; None breaks the line."""

    colour: int
    points: list[tuple[float, float | None]]
    filled: bool = False


@dataclass(frozen=True)
class _Panel:
    name: str
    lines: list[_Line]
    height: float = _LOW
    least_top: float = 0.0


def timeline(level: LevelResult) -> Markup | None:
    """The whole drawing of one level. None where nothing was recorded over time."""
    if len(level.timeline) < 2:
        return None
    panels = [*_of_requests(level), *_of_gpus(level.gpus)]
    end_s = level.timeline[-1].t_s
    x = Scale(0.0, end_s, LEFT, RIGHT)
    floors, bottom = [], _TOP
    for panel in panels:
        floors.append(bottom + panel.height)
        bottom = floors[-1] + _GAP
    floor = floors[-1]
    parts: list[Markup] = []
    if level.steady is not None:
        parts.append(_span(x(level.steady.start_s), x(min(level.steady.end_s, end_s)), floor))
    for panel, below in zip(panels, floors, strict=True):
        parts += _draw(panel, x, below)
    ticks = [tick for tick in linear_ticks(end_s, 6) if tick <= end_s * 1.001]
    parts += [svg.text((x(tick), floor + 17), f"{tick:g}", "tick") for tick in ticks]
    parts.append(svg.text(((LEFT + RIGHT) / 2, floor + 35), "seconds since release", "axis"))
    return svg.picture(WIDTH, floor + _FOOT, f"{load_of(level)}: {', '.join(each.name for each in panels)}", parts)


def _of_requests(level: LevelResult) -> list[_Panel]:
    points = level.timeline
    panels = [
        _Panel(
            "output tokens/s", [_Line(1, [(each.t_s, each.output_tokens_per_s) for each in points], filled=True)], _TALL
        ),
        _Panel("in flight", [_Line(2, [(each.t_s, float(each.in_flight)) for each in points], filled=True)]),
    ]
    # Latencies are drawn where GPUs stand below them to be read against; the tables hold them anyway.
    if level.gpus:
        for name, field, colour in (("mean TTFT, ms", "ttft_ms", 3), ("mean ITL, ms", "itl_ms", 3)):
            line = _Line(colour, [(each.t_s, getattr(each, field)) for each in points])
            if any(value is not None for _, value in line.points):
                panels.append(_Panel(name, [line]))
    return panels


def _of_gpus(gpus: Sequence[GpuTimeline]) -> list[_Panel]:
    """A panel a metric that any GPU has, a line a GPU."""
    panels = []
    for key, name, unit, least_top in _GPU_PANELS:
        lines = [
            _Line(
                at % _COLOURS + 1,
                [
                    (place * gpu.bucket_s, None if value is None else value / unit)
                    for place, value in enumerate(gpu.values[key])
                ],
                filled=len(gpus) == 1,
            )
            for at, gpu in enumerate(gpus)
            if key in gpu.values
        ]
        if lines:
            panels.append(_Panel(name, lines, least_top=least_top))
    return panels


def _draw(panel: _Panel, x: Scale, floor: float) -> list[Markup]:
    top = floor - panel.height
    known = [value for line in panel.lines for _, value in line.points if value is not None]
    ticks = linear_ticks(max([*known, panel.least_top]), 2)
    y = Scale(0.0, ticks[-1], floor, top)
    parts = [svg.text((LEFT, top - 9), panel.name, "axis", "start")]
    for tick in ticks:
        parts.append(svg.line((LEFT, y(tick)), (RIGHT, y(tick)), "frame" if tick == 0 else "grid"))
        parts.append(svg.text((LEFT - 8, y(tick) + 4), tick_text(tick, ""), "tick", "end"))
    for line in panel.lines:
        for piece in _pieces(line, x, y):
            if line.filled:
                parts.append(svg.area(piece, floor, f"area c{line.colour}"))
            parts.append(svg.polyline(piece, f"line thin c{line.colour}"))
    return parts


def _pieces(line: _Line, x: Scale, y: Scale) -> list[list[svg.Point]]:
    """What lies between two unknown values; a lone point becomes a short line, or it would not be seen."""
    pieces: list[list[svg.Point]] = [[]]
    for at_s, value in line.points:
        if value is None:
            pieces.append([])
        elif at_s <= x.high:
            pieces[-1].append((x(at_s), y(value)))
    return [piece if len(piece) > 1 else [(piece[0][0] - 1, piece[0][1]), *piece] for piece in pieces if piece]


def _span(start: float, end: float, floor: float) -> Markup:
    return svg.element(
        "rect",
        svg.element("title", "steady window"),
        x=start,
        y=_TOP,
        width=end - start,
        height=floor - _TOP,
        cls="span",
    )
