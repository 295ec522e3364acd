"""The GPU score's part of a result: what `meltcore bench` writes, and the report and `meltcore rank` read.

Units stand in the names. `None` is "not measured"; why stands beside it or in `reasons`.
"""

from typing import Literal

import msgspec

from meltcore.results.schema import Distribution, RunResult

HealthVerdict = Literal["HEALTHY", "DEGRADED", "UNKNOWN"]
# More than a driver keeps for itself. A desktop on a small card may exceed it, and does cost score there.
SHARED_MEMORY = 0.05


class ScoreLevel(msgspec.Struct, kw_only=True):
    """A closed loop of `concurrency` requests. The window leaves the ramp out; all numbers are of the window.

    `start_s` counts from the beginning of the ladder. `waiting` requests had no token yet when the window ended, so
    their TTFT is in no percentile. `ramp_cut`: half of the time was over before as many requests had ended as run at
    once, so the window holds a part of the ramp.
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

    @property
    def end_s(self) -> float:
        return self.start_s + self.ramp_s + self.window_s


class Spread(msgspec.Struct, kw_only=True):
    """How even the sustained rate was: output tokens a second in pieces of `bucket_s`.

    `variation` is the standard deviation over the mean. `change` is the last third against the first, -0.05 for 5 %
    less; None where the window is too short to say. `drifts`: the change is a loss beyond the limit.
    """

    bucket_s: float
    rates: list[float]
    variation: float
    change: float | None
    drifts: bool = False


class MetricRow(msgspec.Struct, kw_only=True):
    """One NVML metric over the sustained window: mean and maximum of a level, increase of a counter.

    `absent`: NOT_APPLICABLE or UNKNOWN where there is no number. `note`: how to read it.
    """

    key: str
    name: str
    unit: str
    mean: float | None = None
    maximum: float | None = None
    increase: float | None = None
    absent: str | None = None
    note: str = ""


class Health(msgspec.Struct, kw_only=True):
    """The verdict over the whole run; metrics and clock reasons (shares of the samples) over the sustained window.

    `xids`: the XID errors of the whole run, None where they could not be watched for all of it.
    """

    verdict: HealthVerdict
    reasons: list[str] = msgspec.field(default_factory=list)
    metrics: list[MetricRow] = msgspec.field(default_factory=list)
    clock_reasons: dict[str, float] = msgspec.field(default_factory=dict)
    samples: int = 0
    xids: list[int] | None = None


class Lines(msgspec.Struct, kw_only=True):
    """Time lines from the beginning of the ladder: `values[key][i]` is the mean of `bucket_s` from i * bucket_s on."""

    bucket_s: float
    values: dict[str, list[float | None]]


class GpuScore(msgspec.Struct, kw_only=True):
    """One device's run. `failure`: why it has no score. `measurer_lag_p99_ms`: from a step's time to our reading it.

    `memory_in_use_bytes`: of its memory, before the engine was started; None where it does not say.
    """

    name: str
    label: str
    uuid: str | None = None
    memory_bytes: int | None = None
    memory_in_use_bytes: int | None = None
    engine_settings: dict[str, int | str] = msgspec.field(default_factory=dict)
    levels: list[ScoreLevel] = msgspec.field(default_factory=list)
    sustained: ScoreLevel | None = None
    spread: Spread | None = None
    health: Health | None = None
    lines: Lines | None = None
    load_s: float | None = None
    measurer_lag_p99_ms: float | None = None
    failure: str | None = None

    @property
    def shared(self) -> bool:
        """Whether other programs held a share of its memory that an idle GPU does not have in use."""
        if self.memory_bytes is None or self.memory_in_use_bytes is None:
            return False
        return self.memory_in_use_bytes > SHARED_MEMORY * self.memory_bytes

    @property
    def output_tokens_per_s(self) -> float | None:
        return None if self.sustained is None else self.sustained.output_tokens_per_s


class Score(msgspec.Struct, kw_only=True):
    """The number and what it is a number of. Two scores rank only where workload, engine, model, dtype, weights agree.

    `output_tokens_per_s` is the sum over the devices, None where one has none. `not_comparable`: why this result ranks
    with nothing, empty where it does. `duration_s` was asked for.
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

    @property
    def tokens_per_joule(self) -> float | None:
        """Of all devices together, from their rates and powers; None where one does not count energy."""
        joules_per_s = 0.0
        for device in self.devices:
            if device.sustained is None or not device.sustained.tokens_per_joule:
                return None
            joules_per_s += device.sustained.output_tokens_per_s / device.sustained.tokens_per_joule
        return None if self.output_tokens_per_s is None else self.output_tokens_per_s / joules_per_s

    @property
    def health(self) -> HealthVerdict:
        """The gravest of all devices."""
        verdicts = [device.health.verdict if device.health else "UNKNOWN" for device in self.devices]
        return "DEGRADED" if "DEGRADED" in verdicts else "UNKNOWN" if "UNKNOWN" in verdicts else "HEALTHY"


class ScoredRun(RunResult, kw_only=True):
    """The whole `result.json` of `meltcore bench`."""

    score: Score
