"""Certifies a node: takes a snapshot, runs every check of the tier, and gives one verdict that fails closed."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.gpus.driver import GpuLostError
from meltcore.common.gpus.select import GpuDevice
from meltcore.measure.documents.node import TIERS, Certificate, CheckReport, Finding, Tier, overall
from meltcore.measure.documents.signature import hash_evidence
from meltcore.measure.documents.verdicts import SEVERITY, CheckVerdict, worst_verdict
from meltcore.measure.node.certify.check import HardwareCheck
from meltcore.measure.node.certify.checks import (
    collectives,
    corruption,
    gemm,
    host,
    host_load,
    inference,
    memory,
    patterns,
    peers,
    pulse,
    state,
    sustained,
    system,
)
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.expectations import Baseline
from meltcore.measure.node.node import Node
from meltcore.measure.node.snapshot import take_snapshot

TELEMETRY_FILE = "telemetry.jsonl"
_MAX_KEYS = 6
_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 60.0
_MAX_SAMPLES = 36_000  # an hour at ten per second
_RINGS = "NCCL ran without NVLink multicast (NCCL_NVLS_ENABLE=0): its bandwidths are those of rings, below NVLS's."
_UNCHANGED_NOTE = "No setting of any GPU was changed."

_STANDARD_CHECKS: tuple[type[HardwareCheck], ...] = (
    state.StateCheck,
    gemm.GemmCheck,
    memory.MemoryCheck,
    host.HostCheck,
    host_load.HostLoadCheck,
    peers.PeersCheck,
    collectives.CollectivesCheck,
    sustained.SustainedCheck,
    corruption.CorruptionCheck,
    pulse.PulseCheck,
    patterns.PatternsCheck,
    inference.InferenceCheck,
    system.SystemCheck,  # the last, so that the kernel log has what the others caused
)
_QUICK_CHECKS = ("state", "gemm", "memory", "host", "collectives", "system")


def checks_of(tier: Tier) -> list[HardwareCheck]:
    """Return the checks of a tier, in the order of running."""
    return [check() for check in _STANDARD_CHECKS if tier != "quick" or check.name in _QUICK_CHECKS]


def certify(
    node: Node,
    gpus: Sequence[GpuDevice],
    tier: Tier,
    folder: Path,
    *,
    hours: float = 0.0,
    baseline: Baseline | None = None,
    on_start: Callable[[str], None] = lambda _title: None,
    on_report: Callable[[CheckReport], None] = lambda _report: None,
) -> Certificate:
    """Run every check of `tier` on `gpus`, and return the certificate. Files go to `folder`.

    `on_start` receives the title of each check when it starts, and `on_report` its report. Ctrl-C ends the run. Checks
    that did not finish, as after an error of their own, are UNKNOWN. Raises ConfigError for several MIG devices (a
    process sees only one) and for a soak without hours.
    """
    if sum(gpu.info.mig for gpu in gpus) > 1:
        raise ConfigError("certify takes one MIG device at a time: a process can use only one")
    check_hours(tier, hours)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), node.now_s()
    checks = checks_of(tier)
    snapshot = take_snapshot(node, gpus)
    interval_s = sampling_interval_s(hours)
    telemetry = node.telemetry(folder / TELEMETRY_FILE, gpus, interval_s)
    context = CertifyContext(
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
    notes = [_UNCHANGED_NOTE]
    try:
        for check in checks:
            on_start(check.title)
            reports.append(_run(check, context))
            on_report(reports[-1])
    except KeyboardInterrupt:
        # What was measured before an interruption is kept.
        reports += [_unfinished(check, "interrupted") for check in checks[len(reports) :]]
    finally:
        try:
            telemetry.close()
        except MeltcoreError as error:  # the certificate must not be lost because the sampler hangs in the driver
            notes.append(str(error))
    if any(row.key.startswith("collectives/") for report in reports for row in report.rows):
        notes.insert(0, _RINGS)
    names = [check.name for check in checks if TIERS.index(tier) >= TIERS.index(check.required_from)]
    return Certificate(
        tier=tier,
        verdict=overall(reports, names),
        required=names,
        started=started,
        duration_s=node.now_s() - start_s,
        snapshot=snapshot,
        checks=reports,
        findings=merge_findings(finding for report in reports for finding in report.findings),
        unverified=unverified_lines(reports),
        notes=notes,
        evidence=hash_evidence(folder),
    )


def _run(check: HardwareCheck, context: CertifyContext) -> CheckReport:
    """Return the report of a check. An error of the check itself must not lose the reports of the others."""
    try:
        return check.run(context)
    except GpuLostError as error:
        return msgspec.structs.replace(_unfinished(check, str(error)), verdict="FAIL")
    except Exception as error:
        traceback.print_exc()
        return _unfinished(check, f"{type(error).__name__}: {error}")


def _unfinished(check: HardwareCheck, reason: str) -> CheckReport:
    return CheckReport(name=check.name, title=check.title, verdict="UNKNOWN", reason=f"not finished: {reason}")


def check_hours(tier: Tier, hours: float) -> None:
    """Raise ConfigError for a soak without hours, and for hours without a soak."""
    if (tier == "soak") != (hours > 0):
        raise ConfigError("a soak needs --hours, and only a soak takes them")


def sampling_interval_s(hours: float) -> float:
    """Return the sampling interval in seconds: 0.1 s, or more in a soak, to limit the number of samples.

    No error is missed between samples: errors and slowdown times are counters, and XIDs stay queued.
    """
    return min(_MAX_INTERVAL_S, max(_INTERVAL_S, hours * 3600 / _MAX_SAMPLES))


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding per fault code and subject, the worst first.

    Its text comes from the first check with the fault.
    """
    merged: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first_finding = merged.setdefault((finding.code, finding.subject), msgspec.structs.replace(finding))
        if finding.check not in first_finding.check.split(", "):
            first_finding.check += f", {finding.check}"
            first_finding.verdict = worst_verdict([first_finding.verdict, finding.verdict], "UNKNOWN")
    return sorted(merged.values(), key=lambda finding: SEVERITY.index(finding.verdict))


def unverified_lines(reports: Iterable[CheckReport]) -> list[str]:
    """Return one line per check and reason for metrics that were not verified."""
    lines = []
    labels: dict[CheckVerdict, str] = {"UNKNOWN": "unknown", "INVALID": "invalid", "NOT_APPLICABLE": "not applicable"}
    for report in reports:
        if report.reason:
            lines.append(f"{report.title}: {report.reason}")
        for verdict, label in labels.items():
            keys = [row.key for row in report.rows if row.verdict == verdict]
            if keys:
                lines.append(
                    f"{report.title}: {len(keys)} of {len(report.rows)} metrics {label}: {_shorten_keys(keys)}"
                )
    return lines


def _shorten_keys(keys: Sequence[str]) -> str:
    keys = list(dict.fromkeys(keys))
    return ", ".join(keys[:_MAX_KEYS]) + (f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else "")
