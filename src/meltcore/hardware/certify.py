"""Certifies a node: a snapshot, every check of the tier in turn, and one verdict that fails closed."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.hardware.checks.base import Check
from meltcore.hardware.expect import Baseline
from meltcore.hardware.node import Node, Telemetry
from meltcore.hardware.select import Gpu
from meltcore.hardware.site import Site
from meltcore.hardware.snapshot import take_snapshot
from meltcore.hardware.tiers import required
from meltcore.results.certificate import Certificate, CheckReport, Finding, Row, RowVerdict, Tier, overall

Told = Callable[[CheckReport], None]

TELEMETRY_FILE = "telemetry.jsonl"
_GRAVITY: tuple[RowVerdict, ...] = ("FAIL", "UNKNOWN", "INVALID", "WARN")
_KEYS_NAMED = 6
_INTERVAL_S, _LONGEST_INTERVAL_S = 0.1, 60.0
_MOMENTS = 36_000  # an hour at ten a second
_RINGS = "NCCL ran without NVLink multicast (NCCL_NVLS_ENABLE=0): its figures are those of rings, lower than NVLS's."
_UNCHANGED = "No setting of any GPU was changed."


def certify(
    node: Node,
    gpus: Sequence[Gpu],
    tier: Tier,
    folder: Path,
    *,
    hours: float = 0.0,
    baseline: Baseline | None = None,
    begun: Callable[[str], None] = lambda title: None,
    told: Told = lambda report: None,
) -> Certificate:
    """Run every check of `tier` on `gpus`. Files go to `folder`.

    `begun` hears of each check as it starts, `told` of its report. Ctrl-C ends it, and what is left is UNKNOWN.

    Raises ConfigError for several MIG slices (a process sees only one) and for a soak without hours.
    """
    if sum(gpu.info.mig for gpu in gpus) > 1:
        raise ConfigError("certify takes one MIG slice at a time: a process can use only one")
    check_hours(tier, hours)
    started, began_s = datetime.now(UTC).isoformat(timespec="seconds"), node.now_s()
    checks = required(tier)
    snapshot = take_snapshot(node, gpus)
    interval_s = sampling_interval_s(hours)
    telemetry = node.telemetry(folder / TELEMETRY_FILE, gpus, interval_s)
    site = Site(
        node=node,
        gpus=gpus,
        snapshot=snapshot,
        tier=tier,
        telemetry=telemetry,
        interval_s=interval_s,
        folder=folder,
        hours=hours,
        baseline=baseline,
    )
    reports: list[CheckReport] = []
    notes = [_UNCHANGED]
    try:
        for check in checks:
            begun(check.title)
            reports.append(check.run(site))
            told(reports[-1])
    except KeyboardInterrupt:
        reports += [_not_run(check) for check in checks[len(reports) :]]
    finally:
        notes += _closed(telemetry)
    names = [check.name for check in checks]
    rows = [row for report in reports for row in report.rows]
    return Certificate(
        tier=tier,
        verdict=overall(reports, names),
        required=names,
        started=started,
        duration_s=node.now_s() - began_s,
        snapshot=snapshot,
        checks=reports,
        findings=merge(finding for report in reports for finding in report.findings),
        unseen=unseen(reports),
        notes=[*([_RINGS] if any(row.key.startswith("collectives/") for row in rows) else []), *notes],
    )


def _not_run(check: Check) -> CheckReport:
    """What was measured before an interruption is kept; a certificate without all of its checks is none."""
    return CheckReport(name=check.name, title=check.title, verdict="UNKNOWN", why="not run to its end: interrupted")


def check_hours(tier: Tier, hours: float) -> None:
    """Raises ConfigError for a soak without hours, and for hours without a soak."""
    if (tier == "soak") != (hours > 0):
        raise ConfigError("a soak needs --hours, and only a soak takes them")


def sampling_interval_s(hours: float) -> float:
    """A tenth of a second, and longer in a soak: what is held of a GPU stays that of an hour.

    Nothing is missed between: errors and time slowed down are counters, and XIDs wait to be fetched.
    """
    return min(_LONGEST_INTERVAL_S, max(_INTERVAL_S, hours * 3600 / _MOMENTS))


def _closed(telemetry: Telemetry) -> list[str]:
    """What is seen by then is not lost because the sampler hangs in the driver: it becomes a note."""
    try:
        telemetry.close()
    except MeltcoreError as error:
        return [str(error)]
    return []


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """The same fault of the same GPU told once, in the words of the first check that met it; the gravest first."""
    merged: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        known = merged.get((finding.code, finding.subject))
        if known is None:
            merged[(finding.code, finding.subject)] = msgspec.structs.replace(finding)
        elif finding.check not in known.check.split(", "):
            known.check += f", {finding.check}"
            known.verdict = min(known.verdict, finding.verdict, key=_GRAVITY.index)
    return sorted(merged.values(), key=lambda finding: _GRAVITY.index(finding.verdict))


def unseen(reports: Iterable[CheckReport]) -> list[str]:
    """One line a check and reason."""
    lines = []
    for report in reports:
        if report.why:
            lines.append(f"{report.title}: {report.why}")
        for word, verdict in (("unknown", "UNKNOWN"), ("invalid", "INVALID"), ("not applicable", "NOT_APPLICABLE")):
            rows = [row for row in report.rows if row.verdict == verdict]
            if rows:
                lines.append(f"{report.title}: {len(rows)} of {len(report.rows)} figures {word}: {_names(rows)}")
    return lines


def _names(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(row.key for row in rows))
    return ", ".join(keys[:_KEYS_NAMED]) + (f" and {len(keys) - _KEYS_NAMED} more" if len(keys) > _KEYS_NAMED else "")
