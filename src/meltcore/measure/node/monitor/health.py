"""Judges a GPU's health from its samples, as a pure function.

DEGRADED: an event that a healthy GPU does not show. UNKNOWN: no such event, but some required value was unreadable.
HEALTHY: every required value was readable, and there was no such event. NOT_APPLICABLE values count neither way, and
NVML's utilization is never used (nvml/metrics.py says why).
"""

import msgspec

from meltcore.common.gpus.metrics import METRIC_BY_KEY, METRICS, SLOWDOWN_COUNTERS, SLOWDOWNS
from meltcore.common.gpus.xid import describe
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.node.monitor.summary import GpuSummary

# A value missing from more than this fraction of the samples counts as unreadable.
_UNREADABLE_FRACTION = 0.05
# A gap longer than this, and than ten intervals, could hide an event.
_GAP_S = 1.0
# Boost clocks of a warming GPU move by two or three steps of 15 MHz in 1,980; 5 % is beyond that.
_DRIFT_FRACTION = 0.05

LOST_PROBLEM = "the GPU was lost: it fell off the bus, or the driver gave up on it"


class HealthReport(msgspec.Struct, kw_only=True):
    """The verdict on one GPU. `reasons` says why it is not HEALTHY: events first, then unreadable values."""

    verdict: Verdict
    reasons: list[str]


def judge_health(summary: GpuSummary, interval_s: float) -> HealthReport:
    """Judge one GPU from the summary of its samples, which were taken every `interval_s`."""
    events = [*_errors(summary), *_slowdowns(summary), *_clock_drift(summary)]
    unreadable = _unreadable_problems(summary, interval_s)
    verdict: Verdict = "DEGRADED" if events else "UNKNOWN" if unreadable else "HEALTHY"
    return HealthReport(verdict=verdict, reasons=[*events, *unreadable])


def _errors(summary: GpuSummary) -> list[str]:
    problems = [LOST_PROBLEM] if summary.lost else []
    for severity in ("uncorrected", "corrected"):
        new = summary.metrics[f"ecc_{severity}"].increase
        if new:
            problems.append(f"{new:.0f} new ECC error{'' if new == 1 else 's'}, {severity}")
    return problems + [f"{describe(xid)} x {summary.xids.count(xid)}" for xid in dict.fromkeys(summary.xids)]


def _slowdowns(summary: GpuSummary) -> list[str]:
    num_readable = summary.samples - summary.clock_reasons_unknown
    problems = [
        f"{reason} in {summary.clock_reasons[reason]} of {num_readable} samples"
        for reason in SLOWDOWNS
        if reason in summary.clock_reasons
    ]
    times_s = {key: summary.metrics[key].increase for key in SLOWDOWN_COUNTERS}
    return problems + [
        f"{METRIC_BY_KEY[key].name} for {time_s:.3g} s in total" for key, time_s in times_s.items() if time_s
    ]


def _clock_drift(summary: GpuSummary) -> list[str]:
    if summary.loaded_clock_mhz is None:
        return []
    first, last = summary.loaded_clock_mhz
    if last >= first * (1 - _DRIFT_FRACTION):
        return []
    return [f"the SM clock drifted from {first:.0f} to {last:.0f} MHz under load, without a power cap"]


def _unreadable_problems(summary: GpuSummary, interval_s: float) -> list[str]:
    if summary.samples == 0:
        return ["no sample was taken"]
    unknown_counts = {metric.name: summary.metrics[metric.key].unknown for metric in METRICS if metric.required}
    unknown_counts["clock reasons"] = summary.clock_reasons_unknown
    unknown_counts["XID errors"] = summary.xids_unknown
    problems = [
        f"{name}: unreadable in {count} of {summary.samples} samples"
        for name, count in unknown_counts.items()
        if count > _UNREADABLE_FRACTION * summary.samples
    ]
    if summary.longest_gap_s > max(_GAP_S, 10 * interval_s):
        problems.append(f"no sample for {summary.longest_gap_s:.1f} s")
    return problems
