"""Summarizes a GPU's samples per metric, and judges its health from the summary.

A gauge has a mean and a maximum, and a counter has its increase. Samples are added one by one and not stored, so a
recording can run for days. The judgment is a pure function. DEGRADED: an event that a healthy GPU does not show.
UNKNOWN: no such event, but some required value was unreadable. HEALTHY: every required value was readable, and there
was no such event. NOT_APPLICABLE values count neither way, and NVML's utilization is never used (common/gpus/metrics.py
says why).
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec

from meltcore.common.gpus.driver import SLOW_CALL_S
from meltcore.common.gpus.metrics import (
    GPU_IDLE,
    METRIC_BY_KEY,
    METRICS,
    NOT_APPLICABLE,
    SLOWDOWN_COUNTERS,
    SLOWDOWNS,
    SW_POWER_CAP,
    UNKNOWN,
    Absent,
    GpuMetric,
    Value,
)
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.xid import describe
from meltcore.measure.documents.verdicts import Verdict

# Clocks under load are compared over at least this many samples at each end.
_QUARTER_SAMPLES = 20
_LOADED_SM_ACTIVE_PERCENT = 50.0
# A value missing from more than this fraction of the samples counts as unreadable.
_UNREADABLE_FRACTION = 0.05
# A gap longer than this, and than ten intervals, could hide an event.
_GAP_S = 1.0
# Boost clocks of a warming GPU move by two or three steps of 15 MHz in 1,980; 5 % is beyond that.
_DRIFT_FRACTION = 0.05

LOST_PROBLEM = "the GPU was lost: it fell off the bus, or the driver gave up on it"


class MetricSummary(msgspec.Struct, kw_only=True):
    """The samples of one metric.

    `readable` samples have a number. `unknown` samples should have a number and have none. To other samples the metric
    does not apply.

    `mean` and `maximum` are set for gauges and fixed values. `increase`, from the first to the last number, is set for
    counters.
    """

    key: str
    readable: int
    unknown: int
    mean: float | None = None
    maximum: float | None = None
    increase: float | None = None

    @property
    def absent(self) -> Absent | None:
        """UNKNOWN or NOT_APPLICABLE for a metric without any number, or None if it has a number."""
        if self.readable:
            return None
        return UNKNOWN if self.unknown else NOT_APPLICABLE


class GpuSummary(msgspec.Struct, kw_only=True):
    """All samples of one GPU.

    `clock_reasons` counts the samples per reason. The `*_unknown` fields count the samples without the value.
    `loaded_clock_mhz` has the median SM clocks of the first and the last quarter of the samples under load without a
    power cap. It is None if there are too few such samples. `slowest_read_s` is the longest time that the driver took
    to answer, so far if it has not answered (`hung`).
    """

    samples: int
    duration_s: float
    longest_gap_s: float
    metrics: dict[str, MetricSummary]
    clock_reasons: dict[str, int]
    clock_reasons_unknown: int
    xids: list[int]
    xids_unknown: int
    loaded_clock_mhz: tuple[float, float] | None
    lost: bool
    slowest_read_s: float
    hung: bool

    def slow_driver(self) -> str:
        """Return what the driver's slowest answer was if it exceeds SLOW_CALL_S, else ""."""
        if self.slowest_read_s <= SLOW_CALL_S:
            return ""
        hung = ", and has not answered since" if self.hung else ""
        return f"the driver took {self.slowest_read_s:.1f} s to answer about it (limit {SLOW_CALL_S:g} s){hung}"


class SummaryBuilder:
    """Accumulates the samples of one GPU, in the order of time."""

    def __init__(self) -> None:
        self._metrics = {metric.key: _MetricBuilder(metric) for metric in METRICS}
        self._clock_reasons: Counter[str] = Counter()
        self._clock_reasons_unknown = 0
        self._xids: list[int] = []
        self._xids_unknown = 0
        self._loaded_clocks = array("f")
        self._lost = self._hung = False
        self._samples = 0
        self._first_s = self._last_s = self._longest_gap_s = self._slowest_read_s = 0.0

    def add(self, sample: Sample) -> None:
        """Add one sample."""
        if self._samples == 0:
            self._first_s = self._last_s = sample.t_s
        self._longest_gap_s = max(self._longest_gap_s, sample.t_s - self._last_s)
        self._last_s = sample.t_s
        self._slowest_read_s, self._hung = max(self._slowest_read_s, sample.read_s), sample.hung
        self._samples += 1
        if isinstance(sample.xids, list):
            self._xids += sample.xids
        else:
            self._xids_unknown += 1
        if sample.lost:
            self._lost = True
            return  # the other values of this sample are unreadable for a known reason
        for key, builder in self._metrics.items():
            builder.add(sample.values[key])
        if isinstance(sample.clock_reasons, list):
            self._clock_reasons.update(sample.clock_reasons)
        else:
            self._clock_reasons_unknown += 1
        clock = sample.values["sm_clock_mhz"]
        if _is_loaded(sample) and not isinstance(clock, str):
            self._loaded_clocks.append(clock)

    def summary(self) -> GpuSummary:
        """Return the summary of all samples so far."""
        return GpuSummary(
            samples=self._samples,
            duration_s=self._last_s - self._first_s,
            longest_gap_s=self._longest_gap_s,
            metrics={key: builder.summary() for key, builder in self._metrics.items()},
            clock_reasons=dict(self._clock_reasons.most_common()),
            clock_reasons_unknown=self._clock_reasons_unknown,
            xids=list(self._xids),
            xids_unknown=self._xids_unknown,
            loaded_clock_mhz=_first_and_last(self._loaded_clocks),
            lost=self._lost,
            slowest_read_s=self._slowest_read_s,
            hung=self._hung,
        )


class _MetricBuilder:
    def __init__(self, metric: GpuMetric) -> None:
        self._metric = metric
        self._readable = self._unknown = 0
        self._sum = self._first = self._last = 0.0
        self._maximum = float("-inf")

    def add(self, value: Value) -> None:
        if isinstance(value, str):
            self._unknown += value == UNKNOWN
            return
        if self._readable == 0:
            self._first = value
        self._readable += 1
        self._last = value
        self._sum += value
        self._maximum = max(self._maximum, value)

    def summary(self) -> MetricSummary:
        summary = MetricSummary(key=self._metric.key, readable=self._readable, unknown=self._unknown)
        if self._readable and self._metric.type == "counter":
            summary.increase = self._last - self._first
        elif self._readable:
            summary.mean, summary.maximum = self._sum / self._readable, self._maximum
        return summary


def summarize(samples: Iterable[Sample]) -> GpuSummary:
    """Return the summary of the samples of one GPU, which must be in the order of time."""
    builder = SummaryBuilder()
    for sample in samples:
        builder.add(sample)
    return builder.summary()


def readable_values(samples: Iterable[Sample], key: str) -> list[float]:
    """Return the readable values of one metric."""
    assert key in METRIC_BY_KEY
    return [value for sample in samples if not isinstance(value := sample.values.get(key, UNKNOWN), str)]


def bucket_means(
    samples: Iterable[Sample], key: str, start_s: float, bucket_s: float, count: int
) -> list[float | None]:
    """Return the mean of a metric in each of `count` buckets from `start_s` on, or None for a bucket without a number.

    No sample may be older than `start_s`. The last bucket has all later samples.
    """
    buckets: list[list[float]] = [[] for _ in range(count)]
    for sample in samples:
        value = sample.values.get(key, UNKNOWN)
        if not isinstance(value, str):
            buckets[min(count - 1, int((sample.t_s - start_s) / bucket_s))].append(value)
    return [round(fmean(values), 2) if values else None for values in buckets]


def _is_loaded(sample: Sample) -> bool:
    if not isinstance(sample.clock_reasons, list) or {GPU_IDLE, SW_POWER_CAP} & set(sample.clock_reasons):
        return False
    active = sample.values["sm_active_percent"]
    return isinstance(active, str) or active >= _LOADED_SM_ACTIVE_PERCENT


def _first_and_last(clocks: Sequence[float]) -> tuple[float, float] | None:
    quarter = len(clocks) // 4
    if quarter < _QUARTER_SAMPLES:
        return None
    return median(clocks[:quarter]), median(clocks[-quarter:])


class HealthReport(msgspec.Struct, kw_only=True):
    """The verdict on one GPU. `reasons` says why it is not HEALTHY: events first, then unreadable values."""

    verdict: Verdict
    reasons: list[str]


def judge_health(summary: GpuSummary, interval_s: float) -> HealthReport:
    """Return the verdict on a GPU from the summary of its samples, which were taken every `interval_s`."""
    events = [*_errors(summary), *_slowdowns(summary), *_clock_drift(summary)]
    unreadable = _unreadable_problems(summary, interval_s)
    verdict: Verdict = "DEGRADED" if events else "UNKNOWN" if unreadable else "HEALTHY"
    return HealthReport(verdict=verdict, reasons=[*events, *unreadable])


def _errors(summary: GpuSummary) -> list[str]:
    problems = [problem for problem in (LOST_PROBLEM if summary.lost else "", summary.slow_driver()) if problem]
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
