"""The report's drawings of a quantity against the load of each level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.scale import Scale, linear_ticks, log_ticks, spaced
from meltcore.results.schema import LevelResult
from meltcore.results.wording import load_of, number

WIDTH, HEIGHT = 520.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 504.0, 16.0, 250.0
LABEL_GAP = 52.0  # the least room for one tick label below the x axis


@dataclass(frozen=True)
class Series:
    """One line of a chart. `colour` is 1 to 4 (the style sheet's); `value` None leaves the level out."""

    name: str
    colour: int
    value: Callable[[LevelResult], float | None]
    dashed: bool = False


def against_load(
    levels: Sequence[LevelResult], series: Sequence[Series], *, unit: str, log_y: bool, label: str
) -> Markup | None:
    """Draw `series` over the levels' loads (logarithmic). None where no series has a value to draw."""
    loads = [_load(level) for level in levels]
    values = [value for line in series for level in levels if (value := line.value(level)) is not None]
    values = [value for value in values if value > 0] if log_y else values
    if not values or min(loads) <= 0:
        return None
    x = Scale(min(loads), max(loads), LEFT + 14, RIGHT - 14, log=True)
    ticks = log_ticks(min(values), max(values)) if log_y else linear_ticks(max(values))
    y = Scale(ticks[0], ticks[-1], BOTTOM, TOP, log=log_y)
    kind = "Requests per second offered" if levels[0].load_kind == "open" else "Concurrent requests"
    parts = [*y_axis(y, ticks, unit), *x_axis(x, loads, kind)]
    for line in series:
        parts += _draw(line, levels, x, y, unit)
    return svg.picture(WIDTH, HEIGHT, label, parts)


def _load(level: LevelResult) -> float:
    return level.rate_per_s or 0.0 if level.load_kind == "open" else float(level.concurrency)


def y_axis(y: Scale, ticks: Sequence[float], unit: str) -> list[Markup]:
    """Grid lines over the width of a chart and their labels."""
    parts: list[Markup] = []
    for tick in ticks:
        parts.append(svg.line((LEFT, y(tick)), (RIGHT, y(tick)), "grid"))
        parts.append(svg.text((LEFT - 8, y(tick) + 4), tick_text(tick, unit), "tick", "end"))
    return parts


def x_axis(x: Scale, loads: Sequence[float], kind: str) -> list[Markup]:
    """The floor of a chart with a mark for each load; labels where they fit, `kind` below."""
    positions = sorted({x(load): load for load in loads}.items())
    kept = spaced([position for position, _ in positions], LABEL_GAP)
    parts = [svg.line((LEFT, BOTTOM), (RIGHT, BOTTOM), "frame")]
    for position, _ in positions:
        parts.append(svg.line((position, BOTTOM), (position, BOTTOM + 5), "frame"))
    parts += [svg.text((positions[i][0], BOTTOM + 20), f"{positions[i][1]:,g}", "tick") for i in kept]
    parts.append(svg.text(((LEFT + RIGHT) / 2, BOTTOM + 42), kind, "axis"))
    return parts


def _draw(line: Series, levels: Sequence[LevelResult], x: Scale, y: Scale, unit: str) -> list[Markup]:
    """The series in pieces: a level without a value breaks the line, and so does another workload."""
    pieces: list[list[svg.Point]] = [[]]
    dots: list[Markup] = []
    workload = None
    for level in sorted(levels, key=_load):
        if level.workload != workload:
            pieces.append([])
            workload = level.workload
        value = line.value(level)
        if value is None or (y.log and value <= 0):
            pieces.append([])
            continue
        at = (x(_load(level)), y(value))
        pieces[-1].append(at)
        dots.append(svg.dot(at, f"dot c{line.colour}", f"{load_of(level)}: {line.name} {number(value)} {unit}"))
    style = f"line c{line.colour}" + (" dashed" if line.dashed else "")
    return [*(svg.polyline(piece, style) for piece in pieces if len(piece) > 1), *dots]


def tick_text(value: float, unit: str) -> str:
    """Short: 1500 -> "1.5k"; with unit "ms" 2000 -> "2 s"."""
    if unit == "ms":
        return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
