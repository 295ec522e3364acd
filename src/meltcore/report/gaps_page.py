"""Gap reports as a page: one bar of the whole window a GPU, causes, sizes and kernel pairs."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.gaps_output import headline, summary
from meltcore.report.template import fill
from meltcore.results.gaps import CAUSES, GapReport
from meltcore.results.wording import percent

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR = 1120.0, 10.0, 1110.0, 8.0, 34.0
_LABEL_ROOM = 150.0  # SVG units a label needs


def render_gaps(reports: Sequence[GapReport], source: str) -> str:
    """One HTML page: style and drawing inside, no script, nothing fetched. `source` names the trace."""
    return fill(
        "gaps.html",
        source=source,
        reports=[(report, headline(report), summary(report), _bar(report)) for report in reports],
        untrusted=any(report.untrusted for report in reports),
        causes=CAUSES,
    )


def _bar(report: GapReport) -> Markup:
    """Computing first, then each cause, to scale."""
    shares = [("computing", report.computing_us), *((part.name, part.total_us) for part in report.by_cause)]
    parts: list[Markup] = []
    at = _LEFT
    for place, (name, total) in enumerate(shares):
        width = (_RIGHT - _LEFT) * total / report.window_us
        style = "bar c3" if place == 0 else f"area c{(place - 1) % 2 * 2 + 2} bar pale"
        tip = svg.element("title", f"{name}: {percent(total / report.window_us)}")
        parts.append(svg.element("rect", tip, x=at, y=_TOP, width=width, height=_BAR, cls=style))
        if width >= _LABEL_ROOM:
            label = f"{name} {percent(total / report.window_us)}"
            parts.append(svg.text((at + width / 2, _TOP + _BAR + 18), label, "axis"))
        at += width
    return svg.picture(_WIDTH, _TOP + _BAR + 28, f"GPU {report.device}: where the time went", parts)
