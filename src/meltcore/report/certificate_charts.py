"""The drawings of a certificate: a grid of checks and GPUs, a matrix of pairs, curves of collectives."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup

from meltcore.report import svg
from meltcore.report.scale import Scale, linear_ticks
from meltcore.results.certificate import Certificate, CheckReport, Row, RowVerdict, worst
from meltcore.results.snapshot import GpuState

_WIDTH = 1120.0
_LEFT, _TOP = 210.0, 34.0
_CELL_HEIGHT = 30.0
_GAP = 4.0
_WIDEST_CELL = 108.0

_CLASSES: dict[RowVerdict, str] = {
    "PASS": "v-good",
    "WARN": "v-warn",
    "FAIL": "v-bad",
    "UNKNOWN": "v-unknown",
    "INVALID": "v-unknown",
    "NOT_APPLICABLE": "v-none",
    "RECORDED": "v-none",
}
_MARKS: dict[RowVerdict, str] = {
    "PASS": "✓",
    "WARN": "!",
    "FAIL": "✕",
    "UNKNOWN": "?",
    "INVALID": "busy",
    "NOT_APPLICABLE": "–",
    "RECORDED": "·",
}

_PAIR = re.compile(r" (?:->|<->|\+) ")  # between the names of two GPUs


def grid(certificate: Certificate) -> Markup:
    """A row a check, a column a GPU: the worst of the rows and findings that concern it."""
    gpus = certificate.snapshot.gpus
    width = min(_WIDEST_CELL, (_WIDTH - _LEFT) / max(1, len(gpus)))
    parts = [svg.text((_LEFT + width * (place + 0.5), _TOP - 12), gpu.label, "axis") for place, gpu in enumerate(gpus)]
    for line, report in enumerate(certificate.checks):
        top = _TOP + line * (_CELL_HEIGHT + _GAP)
        parts.append(svg.text((_LEFT - 14, top + _CELL_HEIGHT / 2 + 5), report.title, "name", "end"))
        for place, gpu in enumerate(gpus):
            left = _LEFT + place * width
            parts += _cell(report, place, gpu, (left, top), width - _GAP)
    height = _TOP + len(certificate.checks) * (_CELL_HEIGHT + _GAP)
    return svg.picture(_WIDTH, height, "verdict of every check on every GPU", parts)


def _cell(report: CheckReport, place: int, gpu: GpuState, at: svg.Point, width: float) -> list[Markup]:
    verdict = _verdict_of(report, place, gpu)
    tip = svg.element("title", f"{report.title}, {gpu.label}: {verdict}")
    box = svg.element("rect", tip, x=at[0], y=at[1], width=width, height=_CELL_HEIGHT, rx=4.0, cls=_CLASSES[verdict])
    mark = svg.text((at[0] + width / 2, at[1] + _CELL_HEIGHT / 2 + 5), _MARKS[verdict], "mark")
    return [box, mark]


def _verdict_of(report: CheckReport, place: int, gpu: GpuState) -> RowVerdict:
    """A WARN of several GPUs together is that of the ones that a finding names: the others did nothing."""
    findings = [finding.verdict for finding in report.findings if gpu.label in _PAIR.split(finding.subject)]
    own = [row for row in report.rows if place in row.gpus]
    rows: list[RowVerdict] = ["PASS" if row.verdict == "WARN" and len(row.gpus) > 1 else row.verdict for row in own]
    return worst([*rows, *findings]) if rows or findings else report.verdict


def pair_matrix(gpus: Sequence[GpuState], rows: Sequence[Row]) -> Markup:
    """From each GPU (row) to each other (column)."""
    left, top = _LEFT, _TOP
    size = min(_WIDEST_CELL, (_WIDTH - left) / len(gpus))
    parts = [svg.text((left + size * (place + 0.5), top - 12), gpu.label, "axis") for place, gpu in enumerate(gpus)]
    parts += [
        svg.text((left - 12, top + (place + 0.5) * _CELL_HEIGHT + 5), gpu.label, "axis", "end")
        for place, gpu in enumerate(gpus)
    ]
    for row in rows:
        first, second = row.gpus
        at = (left + size * second, top + _CELL_HEIGHT * first)
        tip = svg.element("title", f"{row.subject}: {row.verdict}")
        parts.append(
            svg.element(
                "rect", tip, x=at[0] + 1, y=at[1] + 1, width=size - 2, height=_CELL_HEIGHT - 2, rx=3.0,
                cls=_CLASSES[row.verdict],
            )
        )  # fmt: skip
        value = "?" if row.measured is None else f"{row.measured:.0f}"
        parts.append(svg.text((at[0] + size / 2, at[1] + _CELL_HEIGHT / 2 + 5), value, "mark"))
    return svg.picture(_WIDTH, top + _CELL_HEIGHT * len(gpus), "peer copies in GB/s", parts)


def ring_curves(rows: Sequence[Row]) -> Markup | None:
    """Bus bandwidth over size for the largest group; None with fewer than three sizes."""
    largest = max((len(row.gpus) for row in rows), default=0)
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        _, operation, _, size = row.key.split("/")
        if len(row.gpus) == largest and row.measured is not None:
            series.setdefault(operation, []).append((bytes_of(size), row.measured))
    if max(map(len, series.values()), default=0) < 3:
        return None
    return _curves({name: sorted(points) for name, points in series.items()})


def _curves(series: dict[str, list[tuple[float, float]]]) -> Markup:
    width, height, left, right, top, bottom = 1120.0, 300.0, 60.0, 960.0, 14.0, 262.0
    sizes = sorted({size for points in series.values() for size, _ in points})
    ticks = linear_ticks(max(value for points in series.values() for _, value in points))
    across = Scale(sizes[0], sizes[-1], left, right, log=True)
    up = Scale(0.0, ticks[-1], bottom, top)
    parts = [svg.line((left, up(tick)), (right, up(tick)), "grid") for tick in ticks]
    parts += [svg.text((left - 10, up(tick) + 4), f"{tick:g}", "axis", "end") for tick in ticks]
    parts += [svg.text((across(size), bottom + 22), _words(size), "axis") for size in sizes]
    names_at: list[float] = []
    for place, (name, points) in enumerate(series.items()):
        colour = f"c{place % 4 + 1}"
        parts.append(svg.polyline([(across(size), up(value)) for size, value in points], f"line {colour}"))
        parts += [
            svg.dot((across(size), up(value)), f"dot {colour}", f"{name} {_words(size)}: {value:.3g} GB/s")
            for size, value in points
        ]
        at = up(points[-1][1])
        while any(abs(at - other) < 16 for other in names_at):
            at += 16
        names_at.append(at)
        parts.append(svg.text((right + 12, at + 4), name.replace("_", "-"), f"name {colour}", "start"))
    return svg.picture(width, height, "bus bandwidth by size", parts)


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def bytes_of(words: str) -> float:
    """64MiB, say, as the keys of collectives have it."""
    unit, factor = next((unit, factor) for unit, factor in _UNITS if words.endswith(unit))
    return float(words.removesuffix(unit)) * factor


def _words(size: float) -> str:
    unit, factor = next((unit, factor) for unit, factor in _UNITS if size >= factor)
    return f"{size / factor:g} {unit}"
