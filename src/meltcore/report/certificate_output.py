"""A certificate on the console: a line a check as it ends, then the findings, each with what to do, and the verdict."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from meltcore.report.certificate_page import CERTIFICATE_PAGE, weakest
from meltcore.results.certificate import Certificate, CheckReport, RowVerdict

COLOURS: dict[RowVerdict, str] = {
    "PASS": "green",
    "WARN": "yellow",
    "FAIL": "bold red",
    "UNKNOWN": "bold magenta",
    "INVALID": "magenta",
    "NOT_APPLICABLE": "dim",
    "RECORDED": "dim",
}
_VERDICT_WIDTH = 14


def print_report(report: CheckReport, console: Console) -> None:
    """One line: verdict, name, how many figures, and the one nearest to its floor or below."""
    count = len(report.rows)
    figures = f"{count} figure{'s'[: count != 1]}" if count else report.why
    lowest = weakest(report)
    console.print(
        f"[{COLOURS[report.verdict]}]{report.verdict:<{_VERDICT_WIDTH}}[/]  {escape(report.title):<24}  "
        f"{escape(figures)}{escape(f'; least: {lowest}' if lowest else '')}  [dim]{report.duration_s:.0f} s[/]"
    )


def print_certificate(certificate: Certificate, folder: Path, console: Console) -> None:
    """What was found, what was not seen, and the verdict last, where the eye is."""
    for finding in certificate.findings:
        console.print(
            f"\n[{COLOURS[finding.verdict]}]{finding.verdict}[/] [bold]{finding.code}[/]  "
            f"{escape(finding.subject)}  [dim]{escape(finding.check)}[/]\n  {escape(finding.message)}\n"
            f"  -> {escape(finding.action)}"
        )
    if certificate.unseen:
        console.print("\nnot seen:")
    for line in certificate.unseen:
        console.print(f"  {line}", style="dim", markup=False)
    for note in certificate.notes:
        console.print(note, style="dim", markup=False)
    gpus = len(certificate.snapshot.gpus)
    console.print(
        f"\n[{COLOURS[certificate.verdict]}]{certificate.verdict}[/]  {certificate.tier}, "
        f"{gpus} GPU{'s'[: gpus != 1]}, {certificate.duration_s:.0f} s: {folder / CERTIFICATE_PAGE}"
    )
