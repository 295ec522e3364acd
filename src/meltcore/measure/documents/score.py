"""Defines the result of `meltcore bench`, which the report and the leaderboard read.

Names end in units. None means "not measured". A neighboring field or `reasons` gives the reason.
"""

import math

import msgspec

from meltcore.measure.documents.schema import Distribution, RunResult
from meltcore.measure.documents.verdicts import CheckVerdict, Verdict, worst_verdict

# Memory in use before the run, as a fraction: more than a driver keeps. A desktop on a small card may exceed it.
SHARED_MEMORY = 0.05
# The metrics of `ScoreLevel.utilization`, by their keys in the recording: three of NVML's GPM, and NVML's own value.
SM_ACTIVE, TENSOR_ACTIVE, DRAM_ACTIVE = "sm_active_percent", "tensor_percent", "dram_bandwidth_percent"
ANY_KERNEL = "nvml_utilization_percent"
UTILIZATION = (SM_ACTIVE, TENSOR_ACTIVE, DRAM_ACTIVE, ANY_KERNEL)


class ScoreLevel(msgspec.Struct, kw_only=True):
    """A closed loop of `concurrency` requests. All numbers are measured in the window, which excludes the ramp.

    `start_s` counts from the start of the ladder. `waiting` requests had no token when the window ended, so their TTFT
    is in no percentile. The ramp ends when as many requests have ended as run concurrently. `ramp_cut` is True if half
    of the time passed before that, so that the window contains a part of the ramp. `utilization` holds the means of
    UTILIZATION over the window, by key. Cells of a sweep have `output_len` and `temperature`, and each request then has
    that many output tokens.
    """

    concurrency: int
    start_s: float
    ramp_s: float
    window_s: float
    output_tokens: int
    prompt_tokens: int
    finished: int
    waiting: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    power_w: float | None = None
    tokens_per_joule: float | None = None
    ramp_cut: bool = False
    utilization: dict[str, float] = msgspec.field(default_factory=dict)
    output_len: int | None = None
    temperature: float | None = None

    @property
    def end_s(self) -> float:
        """The end of the window, in seconds from the start of the ladder."""
        return self.start_s + self.ramp_s + self.window_s


class Spread(msgspec.Struct, kw_only=True):
    """The variation of the sustained rate over time. `rates` holds output tokens per second, in buckets of `bucket_s`.

    `variation` is the standard deviation divided by the mean. `change` compares the last third with the first: -0.05 is
    a loss of 5 %. It is None if the window is too short. `drifts` is True if the change is a loss beyond the limit.
    """

    bucket_s: float
    rates: list[float]
    variation: float
    change: float | None
    drifts: bool = False


class MetricRow(msgspec.Struct, kw_only=True):
    """One NVML metric over the sustained window. A gauge has mean and maximum, and a counter has its increase.

    If there is no number, `absent` is NOT_APPLICABLE or UNKNOWN. `note` explains how to read the metric.
    """

    key: str
    name: str
    unit: str
    mean: float | None = None
    maximum: float | None = None
    increase: float | None = None
    absent: str | None = None
    note: str = ""


class GpuHealth(msgspec.Struct, kw_only=True):
    """The health of one GPU during a run. Metrics and clock reasons (fractions of samples) cover the sustained window.

    `xids` are the XID errors of the whole run, or None if XID errors could not be observed for the whole run.
    """

    verdict: Verdict
    reasons: list[str] = msgspec.field(default_factory=list)
    metrics: list[MetricRow] = msgspec.field(default_factory=list)
    clock_reasons: dict[str, float] = msgspec.field(default_factory=dict)
    samples: int = 0
    xids: list[int] | None = None


class TimeSeries(msgspec.Struct, kw_only=True):
    """Metrics over time, from the start of the ladder on.

    `values[key][i]` is the mean over the `bucket_s` seconds that begin at i * bucket_s.
    """

    bucket_s: float
    values: dict[str, list[float | None]]


class GpuScore(msgspec.Struct, kw_only=True):
    """The run of one device. `failure` says why the device has no score.

    `measurer_lag_p99_ms` is the 99th percentile of the time from a step until the benchmark read it.
    `memory_in_use_bytes` is the memory in use before the engine started. It is None if NVML does not report it. `sweep`
    holds the measured cells of a sweep, which has neither levels nor a sustained run.
    """

    name: str
    label: str
    uuid: str | None = None
    memory_bytes: int | None = None
    memory_in_use_bytes: int | None = None
    engine_settings: dict[str, bool | int | str] = msgspec.field(default_factory=dict)
    levels: list[ScoreLevel] = msgspec.field(default_factory=list)
    sustained: ScoreLevel | None = None
    spread: Spread | None = None
    health: GpuHealth | None = None
    lines: TimeSeries | None = None
    load_s: float | None = None
    measurer_lag_p99_ms: float | None = None
    failure: str | None = None
    sweep: list[ScoreLevel] = msgspec.field(default_factory=list)

    @property
    def is_shared(self) -> bool:
        """Whether other programs used the GPU's memory: more memory was in use than on an idle GPU."""
        if self.memory_bytes is None or self.memory_in_use_bytes is None:
            return False
        return self.memory_in_use_bytes > SHARED_MEMORY * self.memory_bytes

    @property
    def output_tokens_per_s(self) -> float | None:
        """The sustained rate in output tokens per second, or None without a sustained run."""
        return None if self.sustained is None else self.sustained.output_tokens_per_s

    def mean_utilization(self, level: ScoreLevel, key: str) -> float | None:
        """Return the mean of a metric of UTILIZATION over a level's window, or None if the metric was not read.

        Results of older versions lack `ScoreLevel.utilization`. Their mean comes from the metrics of the sustained
        window, or from the whole buckets of the time series for other levels.
        """
        if key in level.utilization:
            return level.utilization[key]
        if level is self.sustained and self.health is not None:
            means = [row.mean for row in self.health.metrics if row.key == key and row.mean is not None]
            if means:
                return means[0]
        if self.lines is None or key not in self.lines.values:
            return None
        bucket_s, values = self.lines.bucket_s, self.lines.values[key]
        first, end = math.ceil((level.start_s + level.ramp_s) / bucket_s), int(level.end_s / bucket_s)
        recorded = [value for value in values[first:end] if value is not None]
        return sum(recorded) / len(recorded) if recorded else None


class Totals(msgspec.Struct, kw_only=True):
    """The sums over the measured windows of all devices: of all levels, and of the sustained run. Ramps are left out.

    `generations` are completed requests.
    """

    generations: int
    sustained_generations: int
    prompt_tokens: int
    output_tokens: int


class WindowExpectation(msgspec.Struct, kw_only=True):
    """One expectation of the sustained window: the expected value, the observed value, and the rule of the verdict."""

    name: str
    expected: str
    seen: str
    verdict: CheckVerdict
    rule: str


class PromptFile(msgspec.Struct, kw_only=True):
    """The prompts of a run with `--prompts`: the SHA-256 of the file, their number, and their lengths in tokens."""

    sha256: str
    prompts: int
    min_tokens: int
    mean_tokens: float
    max_tokens: int


class SweepGrid(msgspec.Struct, kw_only=True):
    """The axes of a sweep.

    Every combination is one cell, measured for `cell_s` with prompts of `prompt_tokens` tokens.
    """

    concurrency: list[int]
    output_lens: list[int]
    temperatures: list[float]
    prompt_tokens: int
    cell_s: float


class ReferenceRatio(msgspec.Struct, kw_only=True):
    """The score divided by a reference's score, or the `reasons` why the two scores are not comparable.

    `per_gpu` is the ratio of the rates per GPU. It is set only if the numbers of GPUs differ. `engine` is the
    reference's engine version.
    """

    name: str
    hardware: str
    engine: str
    output_tokens_per_s: float
    ratio: float | None = None
    per_gpu: float | None = None
    reasons: list[str] = msgspec.field(default_factory=list)


class Score(msgspec.Struct, kw_only=True):
    """The score of a run on one or more devices.

    Two scores are comparable only if workload, engine, model, dtype and weights are equal.

    `output_tokens_per_s` is the sum over the devices, or None if a device has no score. `not_comparable` holds reasons
    why this result is not ranked. `duration_s` is the requested duration. `totals` and `expectations` are computed from
    the other fields (values/scores.py); results of version 0.1.0 lack both fields.
    """

    workload: str
    engine: str
    model: str
    dtype: str
    weights: str
    duration_s: float
    output_tokens_per_s: float | None
    devices: list[GpuScore]
    not_comparable: list[str] = msgspec.field(default_factory=list)
    totals: Totals | None = None
    expectations: list[WindowExpectation] = msgspec.field(default_factory=list)
    references: list[ReferenceRatio] = msgspec.field(default_factory=list)
    grid: SweepGrid | None = None
    prompt_file: PromptFile | None = None

    @property
    def tokens_per_joule(self) -> float | None:
        """The output tokens per joule of all devices together, or None if any device has no energy counter."""
        joules_per_s = 0.0
        for device in self.devices:
            if device.sustained is None or not device.sustained.tokens_per_joule:
                return None
            joules_per_s += device.sustained.output_tokens_per_s / device.sustained.tokens_per_joule
        return None if self.output_tokens_per_s is None else self.output_tokens_per_s / joules_per_s

    @property
    def health(self) -> Verdict:
        """The worst health verdict of all devices."""
        return worst_verdict(
            (device.health.verdict if device.health else "UNKNOWN" for device in self.devices), "UNKNOWN"
        )


class ScoredRun(RunResult, kw_only=True, tag="score"):
    """The contents of the `result.json` of `meltcore bench`."""

    score: Score
