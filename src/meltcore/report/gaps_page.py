"""Gap reports as a page: one bar of the whole window a GPU, causes, a step's budget, sizes and kernel pairs."""

from __future__ import annotations

from pathlib import Path

import msgspec
from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.gaps_output import budget_rows, budget_title, budget_unit, headline, plain_name, summary
from meltcore.report.template import fill
from meltcore.results.gaps import CAUSES, NOT_COMPUTING, GapReport, Profile
from meltcore.results.runfolder import write_whole
from meltcore.results.wording import moment, percent

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR = 1120.0, 10.0, 1110.0, 8.0, 34.0
_LABEL_ROOM = 150.0  # SVG units a label needs


def save_profile(page: Path, found: Profile) -> None:
    """Write `page`, and the same as JSON beside it, under the page's name."""
    write_whole(page.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    write_whole(page, render_profile(found).encode())


def render_profile(found: Profile) -> str:
    """One HTML page: style and drawing inside, no script, nothing fetched."""
    return fill(
        "gaps.html",
        found=found,
        taken=moment(found.taken),
        reports=[(report, headline(report), summary(report), window_bar(report)) for report in found.reports],
        untrusted=any(report.untrusted for report in found.reports),
        causes=CAUSES,
        budget_title=budget_title,
        budget_unit=budget_unit,
        budget_rows=budget_rows,
        plain_name=plain_name,
    )


def window_bar(report: GapReport) -> Markup:
    """What computed by groups of kernels, then in pale each cause why nothing did, to scale."""
    groups = [(row.name, row.ran_us) for row in report.budget if row.name not in NOT_COMPUTING and row.ran_us]
    causes = [(part.name, part.total_us) for part in report.by_cause]
    parts: list[Markup] = []
    at = _LEFT
    for place, (name, total) in enumerate([*groups, *causes]):
        width = (_RIGHT - _LEFT) * total / report.window_us
        style = f"bar c{place % 2 * 2 + 1}" if place < len(groups) else f"area c{place % 2 * 2 + 2} bar pale"
        tip = svg.element("title", f"{name}: {percent(total / report.window_us)}")
        parts.append(svg.element("rect", tip, x=at, y=_TOP, width=width, height=_BAR, cls=style))
        if width >= _LABEL_ROOM:
            label = f"{name} {percent(total / report.window_us)}"
            parts.append(svg.text((at + width / 2, _TOP + _BAR + 18), label, "axis"))
        at += width
    return svg.picture(_WIDTH, _TOP + _BAR + 28, f"GPU {report.device}: where the time went", parts)
