"""The one result schema of every command that measures. Written as `result.json`, read by reports and comparisons.

Units stand in the names: `_s` seconds, `_ms` milliseconds, `_per_s` a second. `None` means "not measured" or, inside a
`Distribution`, "too few samples" (see percentiles.py). What each metric means stands in definitions.py.
"""

from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 1

Verdict = Literal["OK", "CLIENT_BOUND", "SERVER_DIED", "PARTIAL", "FAILED"]
Status = Literal["complete", "partial"]
LoadKind = Literal["closed", "open"]
# confirmed: the server's figures, which a count of our own agrees with ("re-counted" in files of before).
TokenCountSource = Literal["server-reported", "confirmed", "re-counted"]


class Distribution(msgspec.Struct, kw_only=True):
    """A summary of `n` samples. A percentile that `n` is too small for is None, and so are mean, min and max at n 0."""

    n: int = 0
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None


class Steady(msgspec.Struct, kw_only=True):
    """The longest span with at least 90 % of the level in flight; times count from the release of the level."""

    start_s: float
    end_s: float
    output_tokens_per_s: float


class ClientLoad(msgspec.Struct, kw_only=True):
    """How hard the load generator itself worked. `cpu_share` is of one core, of its busiest process."""

    cpu_share: float
    loop_lag_p99_ms: float | None = None
    processes: int = 1


class TimelinePoint(msgspec.Struct, kw_only=True):
    """One bucket of a level, starting `t_s` after its release: mean output rate in it, and requests open at its end.

    `ttft_ms` is the mean of the first tokens that came in it, `itl_ms` of the others; None where none did.
    """

    t_s: float
    output_tokens_per_s: float
    in_flight: int
    ttft_ms: float | None = None
    itl_ms: float | None = None


class GpuTimeline(msgspec.Struct, kw_only=True):
    """One GPU during a level: `values[key][i]` is the mean from `i * bucket_s` after its release on, None: no reading.

    Keys are those of hardware/metrics.py; one that never gave a number is in `absent`, with the word why.
    """

    gpu: str
    name: str
    bucket_s: float
    values: dict[str, list[float | None]]
    absent: dict[str, str] = msgspec.field(default_factory=dict)


class LevelChecks(msgspec.Struct, kw_only=True):
    """What `meltcore eval throughput` checked of a level beside its speed.

    The counted tokens are the tokenizer's: of the prompts' text without the server's template, and of the answers.
    """

    spot_checks: int
    spot_checks_right: int
    counted_prompt_tokens: int
    counted_output_tokens: int
    counts_agree: bool


class SpeedSum(msgspec.Struct, kw_only=True):
    """Throughput of the levels 1 to 64 weighted 1, 1, 2, 2, 4, 4, 8, answers unchecked: not a score."""

    total_tokens_per_s: float
    output_tokens_per_s: float


class EvalScore(msgspec.Struct, kw_only=True):
    """The same weighted sums, of a server whose answers were checked; both are zero where a gate or a level failed.

    `total_tokens_per_s` counts prompts and answers, as the public harness does; `output_tokens_per_s` answers alone, as
    its rules are written. `zero_because` says what failed.
    """

    total_tokens_per_s: float
    output_tokens_per_s: float
    zero_because: list[str] = msgspec.field(default_factory=list)


class LevelResult(msgspec.Struct, kw_only=True):
    """One level of load. `requests` counts every request tried: succeeded + failed == requests, whatever went wrong.

    `concurrency` is the number of requests kept open (closed loop) or the cap on them (open loop, 0: none);
    `rate_per_s` is the arrival rate of an open loop. `failures` maps a reason to a count. `released_s` is the level's
    start on the machine's monotonic clock, which GPU recordings are on too.
    """

    concurrency: int
    requests: int
    succeeded: int
    failed: int
    peak_in_flight: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    server_peak_in_flight: int | None = None
    accuracy: float | None = None
    load_kind: LoadKind = "closed"
    rate_per_s: float | None = None
    workload: str = ""
    warmup_requests: int = 0
    steady: Steady | None = None
    ttft_ms: Distribution = msgspec.field(default_factory=Distribution)
    itl_ms: Distribution = msgspec.field(default_factory=Distribution)
    tpot_ms: Distribution = msgspec.field(default_factory=Distribution)
    e2e_ms: Distribution = msgspec.field(default_factory=Distribution)
    queue_delay_ms: Distribution = msgspec.field(default_factory=Distribution)
    itl_unit: Literal["token", "chunk"] = "chunk"
    goodput_per_s: float | None = None
    slo: dict[str, float] | None = None
    chunk_to_token_ratio: float | None = None
    token_count_source: TokenCountSource = "server-reported"
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    client: ClientLoad | None = None
    checks: LevelChecks | None = None
    verdict: Verdict = "OK"
    reasons: list[str] = msgspec.field(default_factory=list)
    timeline: list[TimelinePoint] = msgspec.field(default_factory=list)
    released_s: float | None = None
    gpus: list[GpuTimeline] = msgspec.field(default_factory=list)


class Evaluation(msgspec.Struct, kw_only=True):
    """Answers checked against the known values. `low` and `high` bound the share right (Wilson, 95 %).

    `failed` requests gave no answer; they stay in `asked`, and `first_failure` says why the first of them, in the order
    of the problems, gave none. `strict_right` counts the answers that also end in the form
    that was asked for, where an evaluation marks both ways.
    """

    asked: int
    right: int
    failed: int
    low: float
    high: float
    strict_right: int | None = None
    first_failure: str | None = None
    wrong: list["WrongAnswer"] = msgspec.field(default_factory=list)

    @property
    def share(self) -> float:
        return self.right / self.asked if self.asked else 0.0


class WrongAnswer(msgspec.Struct, kw_only=True):
    """One problem not answered rightly: the end of its question, what was expected and what came (or the failure)."""

    question: str
    expected: str
    got: str


class CheckResult(msgspec.Struct, kw_only=True):
    """One check of a server's API form. A check that could not run is a FAIL with the reason, never a pass."""

    name: str
    status: Literal["PASS", "FAIL"]
    detail: str = ""


class Gate(msgspec.Struct, kw_only=True):
    """One condition that a result must meet to count. A gate that was left out says NOT RUN, which is no pass."""

    name: str
    status: Literal["PASS", "FAIL", "NOT RUN"]
    detail: str = ""


class Gpu(msgspec.Struct, kw_only=True):
    name: str
    uuid: str
    memory_bytes: int


class Fingerprint(msgspec.Struct, kw_only=True):
    """What a run ran on and with. Two runs compare only as far as their fingerprints agree.

    Holds no host name and no path. `git_revision` ends in "-dirty" where tracked files had changed.
    """

    cpu: str
    cores: int
    memory_bytes: int
    gpus: list[Gpu] = msgspec.field(default_factory=list)
    gpu_driver: str | None = None
    kernel: str
    python: str
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    git_revision: str | None = None
    arguments: list[str] = msgspec.field(default_factory=list)
    seed: int | None = None
    taken: str


class RunResult(msgspec.Struct, kw_only=True):
    """One run of one command: what `result.json` holds. `accuracy` is the unloaded share right, 0 to 1.

    `started` is UTC in ISO 8601. A run with status "partial" never enters a comparison. `reasons` says why the verdict
    is not OK; `notes` holds reasons to read an OK result with care.
    """

    schema_version: int = SCHEMA_VERSION
    command: str
    status: Status
    started: str
    duration_s: float
    fingerprint: Fingerprint
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    accuracy: float | None = None
    evaluation: Evaluation | None = None
    checks: list[CheckResult] = msgspec.field(default_factory=list)
    gates: list[Gate] = msgspec.field(default_factory=list)
    levels: list[LevelResult] = msgspec.field(default_factory=list)
    speed_sum: SpeedSum | None = None
    eval_score: EvalScore | None = None
    verdict: Verdict = "OK"
    reasons: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
