"""A judgement as a page: the verdict, what is unlike, every start as a dot, and all metrics below."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.judge_output import STYLES, cells, is_primary, taking
from meltcore.report.scale import Scale, spaced
from meltcore.report.template import fill
from meltcore.results.judgement import JUDGEMENT_FILE, Judgement
from meltcore.results.wording import change, fingerprint_rows, load_words, number

_WIDTH, _LEFT, _RIGHT = 1120.0, 210.0, 1080.0
_ROW, _TOP, _LABEL_GAP = 46.0, 18.0, 84.0


def render_judgement(found: Judgement) -> str:
    """One HTML page: style and drawing inside, no script, nothing fetched."""
    return fill(
        "judge.html",
        found=found,
        badge=STYLES[found.verdict],
        change=change(found.primary.change),
        taking=taking(found),
        strip=strip(found),
        rows=[(row, cells(row), is_primary(found, row)) for row in found.rows],
        load=load_words(found.load),
        fingerprint=[] if found.fingerprint is None else fingerprint_rows(found.fingerprint),
        file=JUDGEMENT_FILE,
    )


def strip(found: Judgement) -> Markup:
    """A line of dots for each set, on one axis that need not start at zero: it is differences that matter here."""
    lines = [(found.old_name, found.primary.old_values, 1), (found.new_name, found.primary.new_values, 2)]
    if found.control is not None:
        lines.insert(0, (f"{found.old_name} before", found.control.old_values, 4))
    values = [value for _, line, _ in lines for value in line]
    room = 0.05 * (max(values) - min(values)) or 0.01 * abs(values[0]) or 1.0
    x = Scale(min(values) - room, max(values) + room, _LEFT, _RIGHT)
    floor = _TOP + len(lines) * _ROW
    parts = _axis(x, floor)
    for index, (name, line, colour) in enumerate(lines):
        parts += _line(name, line, colour, x, _TOP + (index + 0.5) * _ROW)
    return svg.picture(_WIDTH, floor + 44, f"{found.primary.name}: every start", parts)


def _axis(x: Scale, floor: float) -> list[Markup]:
    ticks = ticks_between(x.low, x.high)
    parts = [svg.line((_LEFT, floor), (_RIGHT, floor), "frame")]
    for at in spaced([x(tick) for tick in ticks], _LABEL_GAP):
        parts.append(svg.line((x(ticks[at]), _TOP), (x(ticks[at]), floor), "grid"))
        parts.append(svg.text((x(ticks[at]), floor + 20), f"{ticks[at]:,.10g}", "tick"))
    return parts


def ticks_between(low: float, high: float) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) within a span, about five of them."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(name: str, values: Sequence[float], colour: int, x: Scale, y: float) -> list[Markup]:
    mean = sum(values) / len(values)
    parts = [svg.text((_LEFT - 14, y + 5), name, f"name c{colour}", "end")]
    parts.append(svg.line((x(mean), y - 15), (x(mean), y + 15), f"line c{colour}"))
    # Starts of like values lie on top of each other; a step up and down keeps them apart.
    for place, value in enumerate(values):
        parts.append(
            svg.dot((x(value), y + (place % 3 - 1) * 5), f"dot c{colour}", f"start {place + 1}: {number(value)}")
        )
    return parts
