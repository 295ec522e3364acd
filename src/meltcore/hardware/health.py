"""What a GPU's samples say of its health: a pure function over them.

DEGRADED: something happened that does not happen on a healthy GPU. UNKNOWN: nothing did as far as could be seen, and
not all could be seen. HEALTHY: all could be seen, and nothing happened. Values that are NOT_APPLICABLE count neither
way, and NVML's utilization is never looked at (metrics.py says why).
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from meltcore.hardware.metrics import BY_KEY, METRICS
from meltcore.hardware.recording import Sample
from meltcore.hardware.summary import GpuSummary, summarise
from meltcore.hardware.throttle import SLOWDOWNS
from meltcore.hardware.xid import describe

HealthVerdict = Literal["HEALTHY", "DEGRADED", "UNKNOWN"]

# A value missing from more than this share of the samples counts as not seen.
_UNREADABLE_SHARE = 0.05
# A hole in the samples longer than this, and than ten intervals, could hide something.
_GAP_S = 1.0
# Boost clocks of a warming GPU move by two or three steps of 15 MHz in 1,980; 5 % is beyond that.
_DRIFT_SHARE = 0.05

_SLOWDOWN_COUNTERS = ("hw_thermal_slowdown_s", "hw_power_brake_s", "sw_thermal_slowdown_s")


class Health(msgspec.Struct, kw_only=True):
    """`reasons` says why the verdict is not HEALTHY: what happened first, then what could not be seen."""

    verdict: HealthVerdict
    reasons: list[str]


def judge(samples: Iterable[Sample], interval_s: float) -> Health:
    """The verdict on one GPU from its samples, in the order they were taken, meant to be `interval_s` apart."""
    return judge_summary(summarise(samples), interval_s)


def judge_summary(summary: GpuSummary, interval_s: float) -> Health:
    """As `judge`, from samples summed up already."""
    happened = [*_errors(summary), *_slowdowns(summary), *_clock_drift(summary)]
    unseen = _unseen(summary, interval_s)
    verdict: HealthVerdict = "DEGRADED" if happened else "UNKNOWN" if unseen else "HEALTHY"
    return Health(verdict=verdict, reasons=[*happened, *unseen])


def _errors(summary: GpuSummary) -> list[str]:
    found = ["the GPU was lost: it fell off the bus, or its driver gave it up"] if summary.lost else []
    for kind in ("uncorrected", "corrected"):
        new = summary.metrics[f"ecc_{kind}"].increase
        if new:
            found.append(f"{new:.0f} new ECC error{'' if new == 1 else 's'}, {kind}")
    return found + [f"{describe(xid)} x {summary.xids.count(xid)}" for xid in dict.fromkeys(summary.xids)]


def _slowdowns(summary: GpuSummary) -> list[str]:
    seen = summary.samples - summary.clock_reasons_unknown
    found = [
        f"{reason} in {summary.clock_reasons[reason]} of {seen} samples"
        for reason in SLOWDOWNS
        if reason in summary.clock_reasons
    ]
    for key in _SLOWDOWN_COUNTERS:
        slowed_s = summary.metrics[key].increase
        if slowed_s:
            found.append(f"{BY_KEY[key].name} for {slowed_s:.3g} s in all")
    return found


def _clock_drift(summary: GpuSummary) -> list[str]:
    if summary.loaded_clock_mhz is None:
        return []
    first, last = summary.loaded_clock_mhz
    if last >= first * (1 - _DRIFT_SHARE):
        return []
    return [f"the SM clock drifted from {first:.0f} to {last:.0f} MHz under load, with no power cap"]


def _unseen(summary: GpuSummary, interval_s: float) -> list[str]:
    if summary.samples == 0:
        return ["no sample was taken"]
    missing = {metric.name: summary.metrics[metric.key].unknown for metric in METRICS if metric.judged}
    missing["clock reasons"] = summary.clock_reasons_unknown
    missing["XID errors"] = summary.xids_unknown
    found = [
        f"{name}: unreadable in {count} of {summary.samples} samples"
        for name, count in missing.items()
        if count > _UNREADABLE_SHARE * summary.samples
    ]
    if summary.longest_gap_s > max(_GAP_S, 10 * interval_s):
        found.append(f"no sample for {summary.longest_gap_s:.1f} s")
    return found
