"""A certificate as one page to read in a minute: the verdict, what to do, every GPU at a glance, then details."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from statistics import median

import msgspec
from markupsafe import Markup

from meltcore.report.certificate_charts import bytes_of, grid, pair_matrix, ring_curves
from meltcore.report.template import fill
from meltcore.results import wording
from meltcore.results.certificate import CERTIFICATE_FILE, Certificate, CheckReport, Row, RowVerdict
from meltcore.results.runfolder import write_whole
from meltcore.results.snapshot import GpuState

CERTIFICATE_PAGE = "certificate.html"

STYLES: dict[RowVerdict, str] = {
    "PASS": "good",
    "WARN": "unsure",
    "FAIL": "bad",
    "UNKNOWN": "unsure",
    "INVALID": "unsure",
    "NOT_APPLICABLE": "plain",
    "RECORDED": "plain",
}
_GIB = 2**30
_SUMMED_FROM = 3  # rows of one key on more GPUs than that are one line of the table


def save_certificate(folder: Path, certificate: Certificate) -> None:
    """Write `certificate.json` and `certificate.html`, each whole or not at all."""
    write_whole(folder / CERTIFICATE_FILE, msgspec.json.format(msgspec.json.encode(certificate), indent=2) + b"\n")
    write_whole(folder / CERTIFICATE_PAGE, render_certificate(certificate).encode())


def render_certificate(certificate: Certificate) -> str:
    """One HTML page: style and drawings inside, no script, nothing fetched."""
    return fill(
        "certificate.html",
        own_style=Markup((resources.files("meltcore.report") / "certificate.css").read_text(encoding="utf-8")),
        certificate=certificate,
        style_of=STYLES,
        started=wording.moment(certificate.started),
        machine=wording.counted([gpu.name for gpu in certificate.snapshot.gpus]) or "no GPU",
        tiles=tiles(certificate),
        findings=certificate.findings,
        charts=charts(certificate),
        checks=[(report, _lines(report)) for report in certificate.checks],
        figure=_figure,
        conditions=_conditions(certificate),
        gpus=[(gpu, _facts(gpu)) for gpu in certificate.snapshot.gpus],
        fingerprint=wording.fingerprint_rows(certificate.snapshot.fingerprint),
        libraries=list(certificate.snapshot.libraries.items()),
    )


def weakest(report: CheckReport) -> str:
    """The figure that is the smallest share of what was expected; empty where no figure has an expectation."""
    rows = [row for row in report.rows if row.share is not None]
    if not rows:
        return ""
    row = min(rows, key=lambda one: one.share or 0.0)
    return f"{row.subject} {row.key} {_figure(row.measured)} {row.unit}, {100 * (row.share or 0.0):.0f} % of expected"


def tiles(certificate: Certificate) -> list[tuple[str, str, str]]:
    """(label, figure, small print): the median of the figures that people know by heart."""
    wanted = (
        ("Matrix product, bf16", "product/bf16/8192x8192x8192"),
        ("Memory, copy", "memory/copy"),
        ("Host to device", "host/to-device"),
        ("Peer copy, one way", "peers/one-way"),
    )
    found = [tile for label, key in wanted if (tile := _tile(label, [r for r in _rows(certificate) if r.key == key]))]
    reduced = [row for row in _rows(certificate) if row.key.startswith("collectives/all_reduce/")]
    if reduced:
        largest = max(reduced, key=lambda row: (len(row.gpus), bytes_of(row.key.rpartition("/")[2])))
        tile = _tile(f"All-reduce, {largest.subject}", [largest])
        found += [tile] if tile is not None else []
    return found


def _tile(label: str, rows: Sequence[Row]) -> tuple[str, str, str] | None:
    if not rows:
        return None
    values = [row.measured for row in rows if row.measured is not None]
    if not values:
        return label, "UNKNOWN", "no figure to believe"
    shares = [row.share for row in rows if row.share is not None]
    small = f"{rows[0].unit}; least {100 * min(shares):.0f} % of expected" if shares else rows[0].unit
    return label, _figure(median(values)), small


def _rows(certificate: Certificate) -> list[Row]:
    return [row for report in certificate.checks for row in report.rows]


def charts(certificate: Certificate) -> list[tuple[str, str, Markup]]:
    """(title, small print, drawing)."""
    drawn = [("Every check on every GPU", "A figure of several GPUs counts for each of them.", grid(certificate))]
    pairs = [row for row in _rows(certificate) if row.key == "peers/one-way"]
    if len(pairs) > 2:
        small = "GB/s from row to column."
        drawn.append(("Peer copies, one way", small, pair_matrix(certificate.snapshot.gpus, pairs)))
    curves = ring_curves([row for row in _rows(certificate) if row.key.startswith("collectives/")])
    if curves is not None:
        drawn.append(("Collectives by size", "Bus bandwidth in GB/s of all GPUs together.", curves))
    return drawn


def _lines(report: CheckReport) -> list[Row]:
    """Rows of the table: where a figure passed on many GPUs, one line of its median stands for all of them."""
    lines: list[Row] = []
    for key in dict.fromkeys(row.key for row in report.rows):
        rows = [row for row in report.rows if row.key == key]
        good = [row for row in rows if row.verdict == "PASS"]
        if len(good) <= _SUMMED_FROM:
            lines += rows
            continue
        lines.append(_summed(good))
        lines += [row for row in rows if row.verdict != "PASS"]
    return lines


def _summed(rows: Sequence[Row]) -> Row:
    values = [row.measured for row in rows if row.measured is not None]
    shares = [row.share for row in rows if row.share is not None]
    spread = f"{_figure(min(values))} to {_figure(max(values))}" if len(set(values)) > 1 else ""
    return msgspec.structs.replace(
        rows[0],
        subject=f"{len(rows)} alike",
        measured=median(values) if values else None,
        share=median(shares) if shares else None,
        note=spread,
    )


def _conditions(certificate: Certificate) -> list[tuple[str, list[tuple[str, ...]]]]:
    """By check: subject, clock, power, temperatures, clock reasons, new errors."""
    return [
        (
            report.title,
            [
                (
                    seen.subject,
                    _figure(seen.sm_clock_mhz),
                    _figure(seen.power_w),
                    _figure(seen.temperature_c),
                    _figure(seen.memory_temperature_c),
                    ", ".join(f"{reason} {100 * share:.0f} %" for reason, share in seen.reasons.items()) or "none",
                    ", ".join(f"{key} {count}" for key, count in seen.new_errors.items()) or "none",
                )
                for seen in report.conditions
            ],
        )
        for report in certificate.checks
        if report.conditions
    ]


def _facts(gpu: GpuState) -> list[tuple[str, str]]:
    facts = {**gpu.facts}
    memory = facts.get("memory_bytes")
    if isinstance(memory, int):
        facts["memory_bytes"] = f"{memory / _GIB:.0f} GiB"
    up = len(gpu.links_up())
    return [
        ("uuid", gpu.uuid),
        *((key.replace("_", " "), str(value)) for key, value in facts.items()),
        ("NVLinks up", str(up)),
    ]


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
