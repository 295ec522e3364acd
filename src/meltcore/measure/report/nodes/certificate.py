"""Builds the page of a certificate and its lines on the console: verdict, actions, overview of all GPUs, details."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from meltcore.common.options import size_bytes
from meltcore.common.sizes import size_text
from meltcore.measure.documents.node import (
    CERTIFICATE_PAGE,
    Certificate,
    CertificateRow,
    CheckReport,
    GpuSnapshot,
)
from meltcore.measure.documents.values.formatting import (
    NOT_MEASURED,
    fingerprint_rows,
    format_counts,
    format_duration,
    format_percent,
    format_time,
)
from meltcore.measure.documents.verdicts import CheckVerdict, style_of, worst_verdict
from meltcore.measure.report.page.charts import NUM_COLORS, WIDE, Line, Mark, cell_grid, line_figure
from meltcore.measure.report.page.page import (
    Block,
    Box,
    Checks,
    Column,
    Details,
    Facts,
    Figure,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
    Tiles,
    numeric_columns,
    verdict_cell,
)

# (class, mark) of a cell of the grid
_GRID_CELLS: dict[CheckVerdict, tuple[str, str]] = {
    "PASS": ("v-good", "✓"),
    "WARN": ("v-warn", "!"),
    "FAIL": ("v-bad", "✕"),
    "UNKNOWN": ("v-unknown", "?"),
    "INVALID": ("v-unknown", "busy"),
    "NOT_APPLICABLE": ("v-none", "–"),
    "RECORDED": ("v-none", "·"),
}
_TILE_KEYS = (
    ("GEMM, bf16", "gemm/bf16/8192x8192x8192"),
    ("Memory, copy", "memory/copy"),
    ("Host to device", "host/host-to-device"),
    ("Peer copy, unidirectional", "peers/unidirectional"),
)
_SUBJECT_SEPARATOR = re.compile(r" (?:->|<->|\+) ")  # between the names of two GPUs
_ROW_NOTE = Text(
    "Set by: which of baseline, prior (shipped numbers of the product) and topology gave the strictest floor. "
    "RECORDED: a healthy number that nothing is known to compare with.",
    "small",
)
_MAX_UNMERGED_ROWS = 3  # passed measurements of one key on more GPUs than that are one line of the table


def certificate_page(certificate: Certificate, folder: Path | None = None) -> Page:
    """Build the page: findings with their remedy, then an overview of all GPUs, then all measurements.

    `folder` contains the saved certificate. The last line on the console names it.
    """
    snapshot, style = certificate.snapshot, style_of(certificate.verdict)
    num_gpus = len(snapshot.gpus)
    findings: list[Block] = [
        Box(
            style_of(finding.verdict),
            f"{finding.subject} · {finding.code}",
            text=finding.message,
            small_print=f"What to do: {finding.action}",
            tag=finding.verdict,
            aside=finding.check,
        )
        for finding in certificate.findings
    ]
    no_fault_text = (
        "No fault was found." if certificate.verdict == "PASS" else "No fault was found, and not all could be seen."
    )
    unverified_box = Box(title="Not verified, and notes", items=[*certificate.unverified, *certificate.notes])
    page_note = "" if folder is None else f": {folder / CERTIFICATE_PAGE}"
    condition_tables = _condition_tables(certificate)
    return Page(
        title=f"{certificate.verdict} – {_gpu_names(certificate)} – meltcore certificate",
        name="certificate",
        subtitle=f"{format_time(certificate.started)} · {certificate.tier} tier · "
        f"{format_duration(certificate.duration_s)}",
        badge=certificate.verdict,
        style=style,
        device=_gpu_names(certificate),
        details=f"driver {snapshot.driver} · CUDA {snapshot.cuda_driver} · {len(certificate.checks)} checks",
        conclusion=f"{certificate.tier}, {num_gpus} GPU{'s'[: num_gpus != 1]}, {certificate.duration_s:.0f} "
        f"s{page_note}",
        sections=[
            Section("What was found" if findings else "", findings or [Box(style, text=no_fault_text, console=False)]),
            Section(blocks=[Tiles(certificate_tiles(certificate))]),
            Section(blocks=[Figures(certificate_charts(certificate), is_full_width=True)], console=False),
            Section(blocks=[unverified_box] if unverified_box.items else []),
            Section("Every measurement", [_ROW_NOTE, *map(_check_details, certificate.checks)], console=False),
            *([Section("Conditions", condition_tables, console=False)] if condition_tables else []),
            _machine_section(certificate),
        ],
        footer=f"meltcore {snapshot.fingerprint.versions['meltcore']} · certificate schema "
        f"{certificate.schema_version} · "
        f"the same stands in certificate.json · exit status {certificate.exit_code} · nothing was uploaded",
    )


def check_line(report: CheckReport) -> Checks:
    """Format a finished check as one line: verdict, name, number of measurements, and the lowest one.

    The lowest measurement has the smallest ratio to its expected value.
    """
    num_rows = len(report.rows)
    measurements = f"{num_rows} measurement{'s'[: num_rows != 1]}" if num_rows else report.reason
    rated_rows = [worst_row for worst_row in report.rows if worst_row.ratio is not None]
    worst_text = ""
    if rated_rows:
        worst_row = min(rated_rows, key=lambda row: row.ratio or 0.0)
        percent_text = f"{100 * (worst_row.ratio or 0.0):.0f} % of expected"
        worst_text = (
            f"; least: {worst_row.subject} {worst_row.key} {_format_value(worst_row.measured)} "
            f"{worst_row.unit}, {percent_text}"
        )
    detail = f"{measurements}{worst_text}, {report.duration_s:.0f} s"
    return Checks([(style_of(report.verdict), f"{report.verdict:<14}", report.title, detail)], console=True)


def certificate_tiles(certificate: Certificate) -> list[tuple[str, str, str]]:
    """Return a tile (label, median, small print) per main measurement."""
    rows = _all_rows(certificate)
    tile_rows = [(label, [row for row in rows if row.key == key]) for label, key in _TILE_KEYS]
    all_reduce_rows = [row for row in rows if row.key.startswith("collectives/all_reduce/")]
    if all_reduce_rows:
        largest_all_reduce = max(
            all_reduce_rows, key=lambda row: (len(row.gpus), size_bytes(row.key.rpartition("/")[2]))
        )
        tile_rows.append((f"All-reduce, {largest_all_reduce.subject}", [largest_all_reduce]))
    return [_tile(label, key_rows) for label, key_rows in tile_rows if key_rows]


def certificate_charts(certificate: Certificate) -> list[Figure]:
    """Draw the verdict of each check on each GPU. For several GPUs, draw peer copies and collectives too."""
    gpus, rows = certificate.snapshot.gpus, _all_rows(certificate)
    names = [gpu.label for gpu in gpus]
    cells = {}
    for check_index, report in enumerate(certificate.checks):
        for gpu_index, gpu in enumerate(gpus):
            verdict = _gpu_verdict(report, gpu_index, gpu)
            cells[check_index, gpu_index] = (*_GRID_CELLS[verdict], f"{report.title}, {gpu.label}: {verdict}")
    grid = cell_grid(
        [report.title for report in certificate.checks], names, cells, "verdict of every check on every GPU"
    )
    figures = [Figure("Every check on every GPU", grid, note="A measurement of several GPUs counts for each of them.")]
    peer_rows = [row for row in rows if row.key == "peers/unidirectional"]
    if len(peer_rows) > 2:
        cells = {
            (row.gpus[0], row.gpus[1]): (
                _GRID_CELLS[row.verdict][0],
                "?" if row.measured is None else f"{row.measured:.0f}",
                f"{row.subject}: {row.verdict}",
            )
            for row in peer_rows
        }
        matrix = cell_grid(names, names, cells, "peer copies in GB/s")
        figures.append(Figure("Peer copies, unidirectional", matrix, note="GB/s from row to column."))
    lines = _bandwidth_lines([row for row in rows if row.key.startswith("collectives/")])
    if max((len(line.marks) for line in lines), default=0) >= 3:
        figure = line_figure(
            "Collectives by size",
            lines,
            label="bus bandwidth by size",
            x_title="bytes per GPU",
            frame=WIDE,
            format_x=size_text,
            note="Bus bandwidth in GB/s of all GPUs together.",
        )
        assert figure is not None, "measured bandwidths are drawn"
        figures.append(figure)
    return figures


def _gpu_names(certificate: Certificate) -> str:
    return format_counts([gpu.name for gpu in certificate.snapshot.gpus]) or "no GPU"


def _all_rows(certificate: Certificate) -> list[CertificateRow]:
    return [row for report in certificate.checks for row in report.rows]


def _tile(label: str, rows: Sequence[CertificateRow]) -> tuple[str, str, str]:
    values = [row.measured for row in rows if row.measured is not None]
    if not values:
        return label, "UNKNOWN", "no trustworthy measurement"
    ratios = [row.ratio for row in rows if row.ratio is not None]
    small_print = f"{rows[0].unit}; least {100 * min(ratios):.0f} % of expected" if ratios else rows[0].unit
    return label, _format_value(median(values)), small_print


def _gpu_verdict(report: CheckReport, gpu_index: int, gpu: GpuSnapshot) -> CheckVerdict:
    """Return one GPU's verdict in a check. A WARN on several GPUs counts only for GPUs that a finding names."""
    findings = [
        finding.verdict for finding in report.findings if gpu.label in _SUBJECT_SEPARATOR.split(finding.subject)
    ]
    gpu_rows = [row for row in report.rows if gpu_index in row.gpus]
    rows: list[CheckVerdict] = [
        "PASS" if row.verdict == "WARN" and len(row.gpus) > 1 else row.verdict for row in gpu_rows
    ]
    return worst_verdict([*rows, *findings], "UNKNOWN") if rows or findings else report.verdict


def _bandwidth_lines(rows: Sequence[CertificateRow]) -> list[Line]:
    """Return one line per collective: bus bandwidth over size, for the largest group of GPUs."""
    max_gpus = max((len(row.gpus) for row in rows), default=0)
    series: dict[str, list[Mark]] = {}
    for row in rows:
        _, operation, _, size = row.key.split("/")
        if len(row.gpus) == max_gpus and row.measured is not None:
            tooltip = f"{operation} {size_text(size_bytes(size))}: {row.measured:.3g} GB/s"
            series.setdefault(operation, []).append(Mark(size_bytes(size), row.measured, tooltip))
    return [
        Line(name.replace("_", "-"), index % NUM_COLORS + 1, sorted(marks, key=lambda mark: mark.x))
        for index, (name, marks) in enumerate(series.items())
    ]


def _check_details(report: CheckReport) -> Details:
    columns = [*numeric_columns("Metric", "Of", "Measured", "Expected", "Of expected", "Floor", "Set by", "Unit",
                                "Verdict"),
             Column("Note", align="text")]  # fmt: skip
    rows = [
        Row([
            row.key,
            row.subject,
            _format_value(row.measured),
            _format_value(row.expected),
            format_percent(row.ratio),
            _format_value(row.floor),
            row.floor_set_by or NOT_MEASURED,
            row.unit,
            verdict_cell(row.verdict),
            row.note,
        ])
        for row in _merge_passed_rows(report)
    ]  # fmt: skip
    num_rows = len(report.rows)
    measurements = [f"{num_rows} measurement{'s'[: num_rows != 1]}"] if num_rows else []
    aside_text = ", ".join(
        [*measurements, *([report.reason] if report.reason else []), format_duration(report.duration_s)]
    )
    return Details(
        report.title,
        [Table(columns, rows)],
        report.verdict,
        style_of(report.verdict),
        aside_text,
        is_open=report.verdict in ("FAIL", "UNKNOWN", "WARN", "INVALID") and report.name != "state",
    )


def _merge_passed_rows(report: CheckReport) -> list[CertificateRow]:
    """Return the rows of a check, with passed rows of one key on many GPUs merged into their median."""
    merged: list[CertificateRow] = []
    for key in dict.fromkeys(row.key for row in report.rows):
        rows = [row for row in report.rows if row.key == key]
        passed_rows = [row for row in rows if row.verdict == "PASS"]
        if len(passed_rows) <= _MAX_UNMERGED_ROWS:
            merged += rows
            continue
        measured_values = [row.measured for row in passed_rows if row.measured is not None]
        ratios = [row.ratio for row in passed_rows if row.ratio is not None]
        merged.append(
            msgspec.structs.replace(
                passed_rows[0],
                subject=f"{len(passed_rows)} alike",
                measured=median(measured_values) if measured_values else None,
                ratio=median(ratios) if ratios else None,
                note=f"{_format_value(min(measured_values))} to {_format_value(max(measured_values))}"
                if len(set(measured_values)) > 1
                else "",
            )
        )
        merged += [row for row in rows if row.verdict != "PASS"]
    return merged


def _condition_tables(certificate: Certificate) -> list[Block]:
    """Build a table per check with each GPU's clocks, power, temperatures, clock reasons and new errors."""
    headers = ("GPU", "SM MHz", "W", "°C, most", "memory °C, most", "Clock reasons, part of the samples", "New errors")
    return [
        Details(
            report.title,
            [
                Table(
                    numeric_columns(*headers),
                    [
                        Row([
                            condition.subject,
                            _format_value(condition.sm_clock_mhz),
                            _format_value(condition.power_w),
                            _format_value(condition.temperature_c),
                            _format_value(condition.memory_temperature_c),
                            _join_or_none([f"{name} {100 * fraction:.0f} "
                                           "%" for name, fraction in condition.clock_reasons.items()]),
                            _join_or_none([f"{key} {count}" for key, count in condition.new_errors.items()]),
                        ])
                        for condition in report.conditions
                    ],
                )
            ],
        )
        for report in certificate.checks
        if report.conditions
    ]  # fmt: skip


def _machine_section(certificate: Certificate) -> Section:
    snapshot = certificate.snapshot
    names = [gpu.label for gpu in snapshot.gpus]
    details = [Details(f"{gpu.label}: {gpu.name}", [Facts(_gpu_facts(gpu))]) for gpu in snapshot.gpus]
    if len(snapshot.topology) > 1:
        rows = [Row([name, *links]) for name, links in zip(names, snapshot.topology, strict=False)]
        details.append(Details("Topology", [Table(numeric_columns("", *names), rows)]))
    versions = [*fingerprint_rows(snapshot.fingerprint), *snapshot.libraries.items()]
    return Section("The machine", [*details, Details("Host and versions", [Facts(versions)])], console=False)


def _gpu_facts(gpu: GpuSnapshot) -> list[tuple[str, str]]:
    facts = {**gpu.facts}
    memory = facts.get("memory_bytes")
    if isinstance(memory, int):
        facts["memory_bytes"] = size_text(memory)
    fact_pairs = [(key.replace("_", " "), str(value)) for key, value in facts.items()]
    return [("uuid", gpu.uuid), *fact_pairs, ("NVLinks up", str(len(gpu.links_up())))]


def _format_value(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _join_or_none(parts: Sequence[str]) -> str:
    return ", ".join(parts) or "none"
