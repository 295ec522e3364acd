"""A bar for each precision that was tried: its output rate, and what it gains on the server as it is shipped."""

from __future__ import annotations

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.tune_rows import setting_of
from meltcore.results.tuning import Tuning, gain
from meltcore.results.wording import NOT_MEASURED, change, number

_WIDTH, _LEFT, _RIGHT = 1120.0, 170.0, 860.0
_ROW, _BAR, _TOP = 44.0, 24.0, 6.0


def bars(found: Tuning) -> Markup | None:
    """In the order they were tried, the shipped one pale; None where nothing ran."""
    ran = [(point, point.output_tokens_per_s) for point in found.points if point.ok and point.output_tokens_per_s]
    if not ran:
        return None
    most = max(rate for _, rate in ran)
    parts: list[Markup] = []
    for place, (point, rate) in enumerate(ran):
        y, width = _TOP + place * _ROW, (_RIGHT - _LEFT) * rate / most
        style = "bar c1" if point.settings else "bar c1 pale"
        gained = gain(point, found.shipped) if point.settings else None
        label = number(rate) + ("" if gained is None else f"  {change(gained)}")
        parts.append(svg.text((_LEFT - 14, y + _BAR / 2 + 5), setting_of(point), "name", "end"))
        parts.append(svg.element("rect", x=_LEFT, y=y, width=width, height=_BAR, rx=3.0, cls=style))
        parts.append(svg.text((_LEFT + width + 12, y + _BAR / 2 + 5), label, "value", "start"))
    left_out = [setting_of(point) for point in found.points if not point.ok]
    height = _TOP + len(ran) * _ROW
    if left_out:
        parts.append(
            svg.text((_LEFT, height + 8), f"{NOT_MEASURED} did not run: {', '.join(left_out)}", "axis", "start")
        )
        height += 20
    return svg.picture(_WIDTH, height, "Output tokens per second of each precision", parts)
