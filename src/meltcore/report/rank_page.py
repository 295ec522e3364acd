"""The ranking as a page: bars, best first, and a table of what else differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.rank import Entry
from meltcore.report.score_page import HEALTH_STYLE
from meltcore.report.template import fill
from meltcore.results.wording import number

FORCED = "FORCED: unlike results, this is no ranking"

# Names stand above their bars, so that a phone shows both.
_WIDTH, _LONGEST = 640.0, 470.0
_ROW, _BAR, _NAME_ROOM = 56.0, 22.0, 20.0
_NAME = 62  # characters above a bar


def render_rank(entries: Sequence[Entry], reasons: Sequence[str], notes: Sequence[str]) -> str:
    """One HTML page of results already in order. `reasons` not to rank them mark every chart."""
    charts = [
        ("Output tokens per second", _bars(entries, lambda entry: entry.score.output_tokens_per_s, 1, bool(reasons))),
        ("Output tokens per joule", _bars(entries, lambda entry: entry.score.tokens_per_joule, 3, bool(reasons))),
    ]
    return fill(
        "rank.html",
        entries=entries,
        first=entries[0].score,
        reasons=reasons,
        notes=notes,
        forced=FORCED,
        charts=[(title, drawn) for title, drawn in charts if drawn is not None],
        health_style=HEALTH_STYLE,
    )


def _bars(entries: Sequence[Entry], value: Callable[[Entry], float | None], colour: int, forced: bool) -> Markup | None:
    """A bar a result, in the order given. None where no result has a value."""
    values = [value(entry) for entry in entries]
    highest = max((found for found in values if found is not None), default=0.0)
    if highest <= 0:
        return None
    parts: list[Markup] = []
    for place, (entry, found) in enumerate(zip(entries, values, strict=True)):
        parts += _row(entry, found, highest, place * _ROW, colour, forced)
    height = len(entries) * _ROW
    if forced:
        height += 16
        parts.append(svg.text((0.0, height - 6), FORCED, "forced", "start"))
    return svg.picture(_WIDTH, height, "results, best first", parts)


def _row(entry: Entry, found: float | None, highest: float, top: float, colour: int, forced: bool) -> list[Markup]:
    name = svg.element("tspan", entry.hardware, cls="name")
    run = svg.element("tspan", _end(entry), dx=9.0, cls="axis")
    parts = [svg.element("text", name, run, *_doubt(entry), x=0.0, y=top + _NAME_ROOM - 6)]
    middle = top + _NAME_ROOM + _BAR / 2
    if found is None:
        return [*parts, svg.text((0.0, middle + 4), "not measured", "axis", "start")]
    width = _LONGEST * found / highest
    style = f"bar c{colour}" + (" pale" if forced else "")
    tip = svg.element("title", f"{entry.hardware}: {number(found)}")
    parts.append(svg.element("rect", tip, x=0.0, y=top + _NAME_ROOM, width=width, height=_BAR, rx=3.0, cls=style))
    share = svg.element("tspan", f"{100 * found / highest:.0f} %", dx=8.0, cls="axis")
    parts.append(svg.element("text", number(found), share, x=width + 9, y=middle + 5, cls="value"))
    return parts


def _end(entry: Entry) -> str:
    """Of a name too long for its line the end, which tells run folders apart; the table has it all."""
    room = max(12, _NAME - len(entry.hardware) - (12 if entry.score.health == "DEGRADED" else 0))
    return entry.name if len(entry.name) <= room else f"…{entry.name[1 - room :]}"


def _doubt(entry: Entry) -> list[Markup]:
    return [svg.element("tspan", "DEGRADED", dx=9.0, cls="forced")] if entry.score.health == "DEGRADED" else []
