"""A GPU's samples in one row a metric: mean and maximum of a level, increase of a counter.

Samples are added one at a time and not kept, so a recording may run for days.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from meltcore.hardware.metrics import BY_KEY, METRICS, NOT_APPLICABLE, UNKNOWN, Absent, Metric, Value
from meltcore.hardware.recording import Sample
from meltcore.hardware.throttle import GPU_IDLE, SW_POWER_CAP

# Clocks under load are compared over at least this many samples at either end.
_QUARTER_SAMPLES = 20
_LOADED_SM_ACTIVE_PERCENT = 50.0


class MetricSummary(msgspec.Struct, kw_only=True):
    """`readable` samples gave a number, `unknown` ones should have and did not; the rest do not apply.

    `mean` and `maximum` are of levels and fixed values, `increase` is of counters, from the first number to the last.
    """

    key: str
    readable: int
    unknown: int
    mean: float | None = None
    maximum: float | None = None
    increase: float | None = None

    @property
    def absent(self) -> Absent | None:
        """Why there is no number at all, or None."""
        if self.readable:
            return None
        return UNKNOWN if self.unknown else NOT_APPLICABLE


class GpuSummary(msgspec.Struct, kw_only=True):
    """`clock_reasons` counts the samples that had each reason; `*_unknown` those that could not tell.

    `loaded_clock_mhz` are the median SM clocks of the first and the last quarter of the samples under a load that no
    power cap slowed; None where those are too few to compare.
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


class Tally:
    """Adds up the samples of one GPU, in the order they were taken."""

    def __init__(self) -> None:
        self._metrics = {metric.key: _MetricTally(metric) for metric in METRICS}
        self._clock_reasons: Counter[str] = Counter()
        self._clock_reasons_unknown = 0
        self._xids: list[int] = []
        self._xids_unknown = 0
        self._loaded_clocks = array("f")
        self._lost = False
        self._samples = 0
        self._first_s = self._last_s = self._longest_gap_s = 0.0

    def add(self, sample: Sample) -> None:
        self._follow_time(sample.t_s)
        if isinstance(sample.xids, list):
            self._xids += sample.xids
        else:
            self._xids_unknown += 1
        if sample.lost:
            self._lost = True
            return  # what else it holds is unknown, and known to be
        for key, tally in self._metrics.items():
            tally.add(sample.values[key])
        if isinstance(sample.clock_reasons, list):
            self._clock_reasons.update(sample.clock_reasons)
        else:
            self._clock_reasons_unknown += 1
        clock = sample.values["sm_clock_mhz"]
        if _loaded(sample) and not isinstance(clock, str):
            self._loaded_clocks.append(clock)

    def summary(self) -> GpuSummary:
        return GpuSummary(
            samples=self._samples,
            duration_s=self._last_s - self._first_s,
            longest_gap_s=self._longest_gap_s,
            metrics={key: tally.summary() for key, tally in self._metrics.items()},
            clock_reasons=dict(self._clock_reasons.most_common()),
            clock_reasons_unknown=self._clock_reasons_unknown,
            xids=list(self._xids),
            xids_unknown=self._xids_unknown,
            loaded_clock_mhz=_ends(self._loaded_clocks),
            lost=self._lost,
        )

    def _follow_time(self, t_s: float) -> None:
        if self._samples == 0:
            self._first_s = t_s
        else:
            self._longest_gap_s = max(self._longest_gap_s, t_s - self._last_s)
        self._last_s = t_s
        self._samples += 1


class _MetricTally:
    def __init__(self, metric: Metric) -> None:
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
        if self._readable and self._metric.kind == "counter":
            summary.increase = self._last - self._first
        elif self._readable:
            summary.mean, summary.maximum = self._sum / self._readable, self._maximum
        return summary


def summarise(samples: Iterable[Sample]) -> GpuSummary:
    """Sum up samples of one GPU, in the order they were taken."""
    tally = Tally()
    for sample in samples:
        tally.add(sample)
    return tally.summary()


def numbers(samples: Iterable[Sample], key: str) -> list[float]:
    """What could be read of one metric."""
    assert key in BY_KEY
    return [value for sample in samples if not isinstance(value := sample.values[key], str)]


def _loaded(sample: Sample) -> bool:
    if not isinstance(sample.clock_reasons, list) or {GPU_IDLE, SW_POWER_CAP} & set(sample.clock_reasons):
        return False
    active = sample.values["sm_active_percent"]
    return isinstance(active, str) or active >= _LOADED_SM_ACTIVE_PERCENT


def _ends(clocks: Sequence[float]) -> tuple[float, float] | None:
    quarter = len(clocks) // 4
    if quarter < _QUARTER_SAMPLES:
        return None
    return median(clocks[:quarter]), median(clocks[-quarter:])
