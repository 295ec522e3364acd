"""Defines the interface of a check, and the steps of a measured check: plan, probe, judge. Every step fails closed."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from meltcore.common.process import CompletedRun
from meltcore.measure.documents.node import TIERS, CertificateRow, CheckReport, Conditions, Expectation, Finding, Tier
from meltcore.measure.documents.verdicts import worst_verdict
from meltcore.measure.node.certify.conditions import ConditionsWatch
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.expectations import shipped_expectation
from meltcore.measure.node.certify.faults import FaultCode
from meltcore.measure.node.certify.judge import Expected, Judgment, judge, make_findings, warn_throttled
from meltcore.measure.node.certify.probe import ProbeJob, ProbeRequest, ProbeResult, Setting, encode, read_results
from meltcore.measure.node.node import last_line

# Importing torch, creating a context on each of eight GPUs, allocating. Generous, since a hang lasts forever.
START_LIMIT_S = 90.0


class HardwareCheck(ABC):
    """One check of a certificate. `name` is a stable identifier for scripts, and `title` is the heading for people."""

    name: str
    title: str
    needs_peers = False
    required_from: Tier = "quick"  # before this tier UNKNOWN of the check leaves the verdict of a certificate alone

    def unavailable(self) -> str:
        """Return why the check cannot run with this installation, or "" if it can."""
        return ""

    def run(self, context: CertifyContext) -> CheckReport:
        """Run the check and return its report. A fault of a GPU or a program raises no error but gives UNKNOWN."""
        reason = "one GPU has no peer" if self.needs_peers and len(context.gpus) < 2 else self.unavailable()
        if reason:
            return CheckReport(name=self.name, title=self.title, verdict="NOT_APPLICABLE", reason=reason)
        start_s = context.node.now_s()
        report = self.measure(context)
        report.duration_s = context.node.now_s() - start_s
        return report

    @abstractmethod
    def measure(self, context: CertifyContext) -> CheckReport:
        """Return the report of the check on a machine to which it applies."""

    def report(
        self,
        rows: Sequence[CertificateRow],
        findings: Sequence[Finding],
        conditions: Sequence[Conditions] = (),
    ) -> CheckReport:
        """Return a report with the worst verdict of its rows and findings."""
        return CheckReport(
            name=self.name,
            title=self.title,
            verdict=worst_verdict(
                [*(row.verdict for row in rows), *(finding.verdict for finding in findings)], "UNKNOWN"
            ),
            rows=list(rows),
            findings=list(findings),
            conditions=list(conditions),
        )


class MeasuredCheck(HardwareCheck):
    """A check whose metrics come from the `probe` function of its file."""

    unit: str
    links: tuple[str, ...] = ()  # of "pcie" and "nvlink": links whose error counters must be readable
    limit_factor = 3.0  # a slow GPU must be measured, not killed
    seconds: tuple[float, float, float]  # per request in the tiers quick, standard, and full or soak
    setup_s: float  # per request: allocating and warming up
    soak_fraction = 0.0  # of a soak's hours, for a check that fills them
    # Metrics without an expectation are RECORDED rather than UNKNOWN.
    is_recorded = False
    # Whether the values have expectations; for `corruption` the speed is irrelevant.
    has_expectations = True

    @abstractmethod
    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return the measurements of this tier."""

    def request_s(self, context: CertifyContext) -> float:
        """Return the number of seconds that one request measures in this tier."""
        if context.tier == "soak" and self.soak_fraction:
            return self.soak_fraction * 3600 * context.hours
        return self.seconds[min(TIERS.index(context.tier), 2)]

    def probe_s(self, context: CertifyContext) -> float:
        """Return the expected number of seconds from the probe's start to its end."""
        return len(self.requests(context)) * (self.request_s(context) + self.setup_s)

    def topology(self, context: CertifyContext, request: ProbeRequest, gpus: Sequence[int]) -> Expectation | None:
        """Return the expectation that follows from the topology for a metric, or None if there is none."""
        raise NotImplementedError

    def adjust(self, context: CertifyContext, results: Sequence[ProbeResult], judgments: list[Judgment]) -> None:
        """Change verdicts in `judgments` by rules other than a floor."""

    def measure(self, context: CertifyContext) -> CheckReport:
        """Start the probe, watch the GPUs meanwhile, and return the judged results."""
        requests = self.requests(context)
        limit_s = START_LIMIT_S + self.limit_factor * self.probe_s(context)
        busy = context.busy()
        watch = ConditionsWatch(context, self.name, self.links)
        command = [sys.executable, "-m", "meltcore.measure.node.certify.probe", self.name]
        completed = context.node.run(command, encode(ProbeJob(requests=requests)), context.environment(), limit_s)
        conditions, findings, throttled = watch.close()
        busy |= context.busy()
        results = read_results(completed.stdout)
        judgments = judge(self._expected_values(context, requests), results, _missing_reason(completed, limit_s), busy)
        self.adjust(context, results, judgments)
        warn_throttled(judgments, throttled)
        rows = [judgment.row for judgment in judgments]
        report = self.report(rows, [*make_findings(self.name, judgments), *findings], conditions)
        if completed.returncode != 0:  # also after its last result: what broke it may have changed the results
            report.verdict = worst_verdict([report.verdict, "UNKNOWN"], "UNKNOWN")
            report.reason = _missing_reason(completed, limit_s)[1].removeprefix("not measured: ")
        return report

    def _expectations(
        self, context: CertifyContext, request: ProbeRequest, gpus: Sequence[int]
    ) -> tuple[Expectation, ...]:
        snapshots = [context.snapshot.gpus[gpu] for gpu in gpus]
        candidates = [
            context.baseline.expectation(snapshots, request.key) if context.baseline is not None else None,
            shipped_expectation(snapshots, request.key),
            None if any(gpu.mig for gpu in snapshots) else self.topology(context, request, gpus),
        ]
        return tuple(expectation for expectation in candidates if expectation is not None)

    def _expected_values(self, context: CertifyContext, requests: Sequence[ProbeRequest]) -> list[Expected]:
        return [
            Expected(
                key=request.key,
                gpus=target,
                subject=context.label(target, _separator(request.settings)),
                unit=self.unit,
                expectations=self._expectations(context, request, target) if self.has_expectations else (),
                is_recorded=self.is_recorded,
            )
            for request in requests
            for target in request.targets()
        ]


def _separator(settings: Mapping[str, Setting]) -> str:
    """Return the separator between the names of two GPUs. For copies, the separator shows the direction."""
    if "op" in settings:
        return " + "
    return " <-> " if settings.get("directions") == 2 else " -> "


def _missing_reason(completed: CompletedRun, limit_s: float) -> tuple[FaultCode, str]:
    if completed.returncode is None:
        kill_note = "; it cannot even be killed, the driver holds it" if completed.is_alive else " and was killed"
        return "TIMED_OUT", f"not measured: the probe took more than {limit_s:.0f} s{kill_note}: {last_line(completed)}"
    if completed.returncode != 0:
        reason = f"with status {completed.returncode}: {last_line(completed)}"
        return "PROBE_FAILED", f"not measured: the probe ended {reason}"
    return "PROBE_FAILED", "not measured: the probe ended without a result"
