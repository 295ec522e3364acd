"""A tuning as a page: the finding, a chart of a sweep with its knee, and every start."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.charts import tick_text
from meltcore.report.scale import Scale, linear_ticks, spaced
from meltcore.report.template import fill
from meltcore.report.tune_bars import bars
from meltcore.report.tune_rows import table_of
from meltcore.results.tuning import TUNING_FILE, Tuning, TuningPoint
from meltcore.results.wording import fingerprint_rows, number, setting

_WIDTH, _LEFT, _RIGHT, _TOP, _FLOOR, _HEIGHT = 1120.0, 90.0, 1080.0, 20.0, 330.0, 384.0
_LABEL_GAP, _COLOURS = 52.0, 3  # the fourth colour is that of the server as it is shipped


def render_tuning(found: Tuning) -> str:
    """One HTML page: style and drawing inside, no script, nothing fetched."""
    heads, rows = table_of(found)
    return fill(
        "tune.html",
        found=found,
        taken=datetime.fromisoformat(found.taken).strftime("%d %B %Y, %H:%M UTC"),
        heads=heads,
        rows=rows,
        chart=chart(found),
        legend=legend(found),
        fingerprint=fingerprint_rows(found.fingerprint),
        load=[(name, setting(value)) for name, value in found.load.items()],
        file=TUNING_FILE,
    )


def legend(found: Tuning) -> list[tuple[str, int]]:
    """(name, colour) of each line of a sweep's chart."""
    if found.kind != "batching":
        return []
    return [(_name(budget), at % _COLOURS + 1) for at, budget in enumerate(_budgets(found.points))]


def chart(found: Tuning) -> Markup | None:
    """Of a sweep the output rate against sequences (logarithmic), a line a token budget, dashed the server as it is
    shipped; of precisions a bar each. None where nothing ran, and for the search of limits.
    """
    return _sweep(found) if found.kind == "batching" else bars(found) if found.kind == "precision" else None


def _sweep(found: Tuning) -> Markup | None:
    measured = [point for point in found.points if point.output_tokens_per_s and point.settings]
    if not measured:
        return None
    shipped = None if found.shipped is None else found.shipped.output_tokens_per_s
    seqs = sorted({int(point.settings["seqs"]) for point in measured})
    x = Scale(seqs[0], seqs[-1], _LEFT + 16, _RIGHT - 16, log=True)
    ticks = linear_ticks(max([point.output_tokens_per_s or 0.0 for point in measured] + [shipped or 0.0]))
    y = Scale(0.0, ticks[-1], _FLOOR, _TOP)
    parts: list[Markup] = []
    for tick in ticks:
        parts.append(svg.line((_LEFT, y(tick)), (_RIGHT, y(tick)), "frame" if tick == 0 else "grid"))
        parts.append(svg.text((_LEFT - 8, y(tick) + 4), tick_text(tick, ""), "tick", "end"))
    for at in spaced([x(count) for count in seqs], _LABEL_GAP):
        parts.append(svg.text((x(seqs[at]), _FLOOR + 20), f"{seqs[at]:,}", "tick"))
    parts.append(svg.text(((_LEFT + _RIGHT) / 2, _FLOOR + 42), "sequences at once", "axis"))
    if shipped is not None:
        parts.append(svg.line((_LEFT, y(shipped)), (_RIGHT, y(shipped)), "line thin dashed c4"))
        parts.append(svg.text((_LEFT + 8, y(shipped) - 7), f"as shipped: {number(shipped)}", "name c4", "start"))
    for at, budget in enumerate(_budgets(found.points)):
        line = [point for point in measured if point.settings.get("tokens") == budget]
        parts += _line(line, at % _COLOURS + 1, x, y, found)
    return svg.picture(_WIDTH, _HEIGHT, "Output tokens per second against sequences at once", parts)


def _line(points: Sequence[TuningPoint], colour: int, x: Scale, y: Scale, found: Tuning) -> list[Markup]:
    places = [(x(int(point.settings["seqs"])), y(point.output_tokens_per_s or 0.0)) for point in points]
    parts = [svg.polyline(places, f"line c{colour}")] if len(places) > 1 else []
    knee = None if found.knee is None else found.points[found.knee]
    for point, place in zip(points, places, strict=True):
        if point is knee:
            parts.append(svg.element("circle", cx=place[0], cy=place[1], r=11, cls=f"line c{colour}"))
        missed = not point.ok or (point.within_limits is not None and point.within_limits < 0.95)
        tip = f"{number(point.output_tokens_per_s)} tok/s" + (", limits missed" if missed else "")
        parts.append(svg.dot(place, f"{'line thin' if missed else 'dot'} c{colour}", tip))
    return parts


def _budgets(points: Sequence[TuningPoint]) -> list[int | str | None]:
    return list(dict.fromkeys(point.settings.get("tokens") for point in points if point.settings))


def _name(budget: int | str | None) -> str:
    return "the server's own budget" if budget is None else f"{budget:,} tokens a step"
