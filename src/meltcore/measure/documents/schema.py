"""Defines the schema of `result.json`, which all commands that measure write, and which reports and comparisons read.

Units are in the names: `_s` seconds, `_ms` milliseconds, `_per_s` per second. `None` means "not measured" or, inside a
`Distribution`, "too few samples" (see percentiles.py). The release of a level is the time when its load starts.
definitions.py defines each metric.
"""

from typing import Any, Literal

import msgspec

from meltcore.common.files import SCHEMA_VERSION
from meltcore.measure.documents.step_costs import StepCosts
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, Verdict

Status = Literal["complete", "partial"]
LoadKind = Literal["closed", "open"]
# Of a load on a fleet.
Part = Literal["per-model", "mixed", "interference"]
# confirmed: the server's counts, with which the tokenizer agrees. tokenizer, events: the server sent no usage with some
# answers, whose tokens were counted with the tokenizer, or as events that carried text.
TokenCountSource = Literal["server-reported", "confirmed", "tokenizer", "events"]


class Distribution(msgspec.Struct, kw_only=True):
    """A summary of `n` samples.

    A percentile for which `n` is too small is None. Mean, minimum and maximum are None if `n` is 0.
    """

    n: int = 0
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None


class SteadyWindow(msgspec.Struct, kw_only=True):
    """The longest window with at least 90 % of the level's requests in flight.

    Times count from the release of the level. `work_per_s` is the rate of a task other than generation, as in TaskLoad.
    """

    start_s: float
    end_s: float
    output_tokens_per_s: float
    work_per_s: float | None = None

    @property
    def rate(self) -> float:
        """The output tokens per second, or the work of the level's task per second."""
        return self.output_tokens_per_s if self.work_per_s is None else self.work_per_s


class TaskLoad(msgspec.Struct, kw_only=True):
    """The metrics of a level of a task other than generation. Such a level counts no output tokens.

    `work` is the work of the succeeded requests: sentences of translation, or seconds of audio of the other tasks. For
    transcription, `work_per_s` is RTFx. `source_per_s` is the rate at which translation read its input: tokens if every
    answer came with the server's count, else characters. `empty_answers` are complete answers without text. Fields that
    a task does not have are None, or have no samples.
    """

    task: str
    work: float
    work_per_s: float
    source: int | None = None
    source_per_s: float | None = None
    source_unit: Literal["token", "character"] | None = None
    empty_answers: int = 0
    first_audio_ms: Distribution = msgspec.field(default_factory=Distribution)
    real_time_factor: Distribution = msgspec.field(default_factory=Distribution)


class ClientLoad(msgspec.Struct, kw_only=True):
    """The CPU use and the event-loop lag of the load generator's busiest process.

    `cpu_utilization` is a fraction of one core. `cpu_utilization` and `loop_lag_p99_ms` are None if the level was too
    short to measure them (about 1 s).
    """

    cpu_utilization: float | None
    loop_lag_p99_ms: float | None = None
    processes: int = 1


class TimelinePoint(msgspec.Struct, kw_only=True):
    """One bucket of a level, which starts `t_s` after the release: mean output rate, and requests in flight at its end.

    `ttft_ms` is the mean over the first tokens that arrived in the bucket, and `itl_ms` over the other tokens. Each is
    None if no such token arrived. `work_per_s` is the rate of a task other than generation, as in TaskLoad.
    """

    t_s: float
    output_tokens_per_s: float
    in_flight: int
    ttft_ms: float | None = None
    itl_ms: float | None = None
    work_per_s: float | None = None

    @property
    def rate(self) -> float:
        """The output tokens per second, or the work of the level's task per second."""
        return self.output_tokens_per_s if self.work_per_s is None else self.work_per_s


class GpuTimeline(msgspec.Struct, kw_only=True):
    """One GPU during a level: `values[key][i]` is the mean of a metric in bucket i, which starts at `i * bucket_s`.

    Times count from the release of the level. Keys are the metrics of common/gpus/metrics.py. A bucket without a
    reading is None. A metric without any reading is in `absent`, with its reason.
    """

    gpu: str
    name: str
    bucket_s: float
    values: dict[str, list[float | None]]
    absent: dict[str, str] = msgspec.field(default_factory=dict)


class LevelChecks(msgspec.Struct, kw_only=True):
    """The checks of a level by `meltcore eval throughput`.

    The tokenizer counts the tokens of answers, and of prompts without the server's chat template.
    `counted_content_tokens` leaves out end tokens and reasoning, as the public harness does.
    """

    spot_checks: int
    spot_checks_correct: int
    counted_prompt_tokens: int
    counted_output_tokens: int
    counts_agree: bool
    counted_content_tokens: int | None = None


class WeightedThroughput(msgspec.Struct, kw_only=True):
    """The throughput at concurrency 1 to 64 with weights 1, 1, 2, 2, 4, 4, 8.

    The answers were not checked, so this throughput is not a score.
    """

    total_tokens_per_s: float
    output_tokens_per_s: float


class EvalScore(msgspec.Struct, kw_only=True):
    """The weighted throughput of a server whose answers were checked. Both sums are zero if a gate or a level failed.

    `total_tokens_per_s` counts prompts and answers, as the public harness does. `output_tokens_per_s` counts answers
    only, as the written rules do. `zero_reasons` lists what failed.
    """

    total_tokens_per_s: float
    output_tokens_per_s: float
    zero_reasons: list[str] = msgspec.field(default_factory=list)


class LevelResult(msgspec.Struct, kw_only=True):
    """One level of load. `requests` counts every request that was tried: succeeded + failed == requests.

    `concurrency` is the number of connections of a closed loop, each with one request in flight. It is 0 for an open
    loop, which has the arrival rate `rate_per_s`. `failures` maps a reason to a count. `released_s` is the level's
    start on the machine's monotonic clock, which GPU recordings use too. A level that sent for a time and not a number
    of requests has that time in `send_s`. `cautions` maps a kind to what makes the numbers less certain.
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
    steady: SteadyWindow | None = None
    ttft_ms: Distribution = msgspec.field(default_factory=Distribution)
    itl_ms: Distribution = msgspec.field(default_factory=Distribution)
    event_gap_ms: Distribution = msgspec.field(default_factory=Distribution)
    tpot_ms: Distribution = msgspec.field(default_factory=Distribution)
    e2e_ms: Distribution = msgspec.field(default_factory=Distribution)
    queue_delay_ms: Distribution = msgspec.field(default_factory=Distribution)
    itl_unit: Literal["token", "event"] = "event"
    goodput_per_s: float | None = None
    slo: dict[str, float] | None = None
    events_per_token: float | None = None
    tokens_per_event: float | None = None
    token_count_source: TokenCountSource = "server-reported"
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    client: ClientLoad | None = None
    task: TaskLoad | None = None
    checks: LevelChecks | None = None
    verdict: Verdict = "OK"
    reasons: list[str] = msgspec.field(default_factory=list)
    cautions: dict[str, str] = msgspec.field(default_factory=dict)
    send_s: float | None = None
    timeline: list[TimelinePoint] = msgspec.field(default_factory=list)
    released_s: float | None = None
    gpus: list[GpuTimeline] = msgspec.field(default_factory=list)

    @property
    def throughput(self) -> float:
        """The output tokens per second of the whole level, or the work of its task per second."""
        return self.output_tokens_per_s if self.task is None else self.task.work_per_s

    @property
    def steady_throughput(self) -> float:
        """The throughput of the steady window, in which no connection has stopped, or else of the whole level."""
        return self.throughput if self.steady is None else self.steady.rate


class StreamLoad(msgspec.Struct, kw_only=True):
    """The load on one model, which runs alone or beside others.

    `refused` counts requests that got a 429 or 503 with Retry-After. `refusals` counts such responses: after each the
    request was sent again. Latencies count from the first try. `lost` requests never got a complete answer.
    `rows_per_step` and `prompt_tokens_per_step` are means of the engines' steps, and `steps_s` is the time of all of
    them. They are None if the server has no metrics of steps.
    """

    name: str
    model: str
    level: LevelResult
    refused: int = 0
    refusals: int = 0
    rows_per_step: float | None = None
    prompt_tokens_per_step: float | None = None
    steps_s: float | None = None

    @property
    def lost(self) -> int:
        """The number of requests without a complete answer."""
        return self.level.failed


class GpuUse(msgspec.Struct, kw_only=True):
    """The means of one GPU's metrics over a level, by key. A metric without a reading has no entry."""

    gpu: str
    name: str
    means: dict[str, float] = msgspec.field(default_factory=dict)


class FleetLevel(msgspec.Struct, kw_only=True):
    """One level, with streams that were released together and sent requests for `send_s` seconds.

    `duration_s` lasts until the last answer. `connections` were opened for the closed loops of the streams.
    `peak_in_flight` counts all streams together.
    """

    part: Part
    label: str
    connections: int
    send_s: float
    duration_s: float
    peak_in_flight: int
    streams: list[StreamLoad]
    released_s: float
    gpus: list[GpuUse] = msgspec.field(default_factory=list)


class Evaluation(msgspec.Struct, kw_only=True):
    """The comparison of answers with the expected answers.

    `ci_low` and `ci_high` are the 95 % Wilson interval of the accuracy. `failed` requests have no answer, and count in
    `total`. `first_failure` is the reason of the first failed request, in the order of the problems. `strict_correct`
    counts the correct answers by strict extraction. It is None for an evaluation without strict extraction.
    """

    total: int
    correct: int
    failed: int
    ci_low: float
    ci_high: float
    strict_correct: int | None = None
    first_failure: str | None = None
    incorrect: list["IncorrectAnswer"] = msgspec.field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """The ratio of correct answers to all answers, or 0 without answers."""
        return self.correct / self.total if self.total else 0.0


class IncorrectAnswer(msgspec.Struct, kw_only=True):
    """One problem that was not answered correctly: the end of its question, the expected answer, and the actual one.

    If the request failed, `actual` is the reason of the failure.
    """

    question: str
    expected: str
    actual: str


class CheckResult(msgspec.Struct, kw_only=True):
    """The outcome of one check of a server's API, or of a gate. A gate is a condition that a result must meet to count.

    A check that could not run is a FAIL with its reason. A gate that was left out is NOT RUN. Neither FAIL nor NOT RUN
    is a PASS.
    """

    name: str
    status: CheckVerdict
    detail: str = ""


class Gpu(msgspec.Struct, kw_only=True):
    """A GPU as recorded in a fingerprint: its name, UUID and memory."""

    name: str
    uuid: str
    memory_bytes: int


class Fingerprint(msgspec.Struct, kw_only=True):
    """The hardware, software and arguments of a run. Two runs are comparable only if their fingerprints agree.

    There is no host name and no path in a fingerprint. `git_revision` ends in "-dirty" if tracked files had changed.
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


class DemoSample(msgspec.Struct, kw_only=True):
    """One request of a demo with its answer, to show on the page: a sentence, or a clip with its audio.

    If `task` is None, the request is a chat message, whose answer has no expected text.
    """

    task: str | None = None
    given: str
    answer: str
    expected: str | None = None
    audio_wav: bytes | None = None


class VersionedDocument(msgspec.Struct, kw_only=True):
    """The fields that every document has. A document of another schema version is not read."""

    schema_version: int = SCHEMA_VERSION


class Envelope(VersionedDocument, kw_only=True):
    """The fields that all results have. `started` is UTC in ISO 8601, and `notes` are remarks for readers."""

    started: str
    duration_s: float
    fingerprint: Fingerprint
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def taken(self) -> str:
        """The time at which the document was made."""
        return self.started


class RunEnvelope(Envelope, kw_only=True):
    """The fields that the results of all judged runs share. `reasons` explain a verdict other than OK.

    A run with status "partial" never enters a comparison.
    """

    status: Status
    verdict: Verdict = "OK"
    reasons: list[str] = msgspec.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The exit status of the command that made the run."""
        return MEANINGS[self.verdict].exit_code


class RunResult(RunEnvelope, kw_only=True, tag_field="document", tag="run"):
    """One run of one command: the contents of `result.json`. `accuracy` is measured without load, from 0 to 1.

    `mixed` holds the levels that loaded all models of a fleet together.
    """

    command: str
    accuracy: float | None = None
    evaluation: Evaluation | None = None
    checks: list[CheckResult] = msgspec.field(default_factory=list)
    gates: list[CheckResult] = msgspec.field(default_factory=list)
    levels: list[LevelResult] = msgspec.field(default_factory=list)
    mixed: list[FleetLevel] = msgspec.field(default_factory=list)
    weighted_throughput: WeightedThroughput | None = None
    eval_score: EvalScore | None = None
    samples: list[DemoSample] = msgspec.field(default_factory=list)


class ModelUnderLoad(msgspec.Struct, kw_only=True):
    """One model of the fleet: its name, task and workload, and fields of /v1/models such as `weights`."""

    name: str
    task: str
    workload: str
    share: float  # of the connections of a mixed level, 0 to 1
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class Interference(msgspec.Struct, kw_only=True):
    """The load on one model (the victim), measured alone and beside the load on another model (the aggressor)."""

    victim: str
    aggressor: str
    alone: StreamLoad
    beside: StreamLoad
    aggressor_load: StreamLoad


class SimulatedStream(msgspec.Struct, kw_only=True):
    """What an ideal scheduler gives a stream for the arrivals of the run together.

    `throughput_ratio` is its share of its simulated throughput alone. `bytes_ratio` and `flops_ratio` are what bytes
    and operations leave of it at most. All are None for open loops, and these two where a stream's needs are unknown.
    `outside_ms` is the time of a request outside of steps, which was measured alone and is part of the latencies,
    `first_outside_ms` the same until the first token. `alone_busy_s` is the time of all steps alone.
    """

    throughput_ratio: float | None = None
    bytes_ratio: float | None = None
    flops_ratio: float | None = None
    outside_ms: float = 0.0
    first_outside_ms: float = 0.0
    first_ms: Distribution
    e2e_ms: Distribution
    alone_e2e_ms: Distribution
    alone_first_ms: Distribution = msgspec.field(default_factory=Distribution)
    alone_requests_per_s: float
    alone_busy_s: float

    def pairs_alone(self, load: StreamLoad) -> list[tuple[str, float | None, float | None]]:
        """Return what was measured of the stream alone beside the simulation: name, measured, simulated."""
        level, ttft, first = load.level, load.level.ttft_ms, self.alone_first_ms
        rows: list[tuple[str, float | None, float | None]] = [
            ("end to end, p50, ms", level.e2e_ms.p50, self.alone_e2e_ms.p50),
            ("end to end, p95, ms", level.e2e_ms.p95, self.alone_e2e_ms.p95),
            ("requests/s", level.succeeded / level.duration_s, self.alone_requests_per_s),
            ("steps, s", load.steps_s, self.alone_busy_s),
        ]
        if level.task is None:  # the simulation does not say when audio begins
            rows += [("first token, p50, ms", ttft.p50, first.p50), ("first token, p95, ms", ttft.p95, first.p95)]
        return rows


class FleetExperiment(msgspec.Struct, kw_only=True):
    """A named experiment. Each stream runs alone, then all run together, and gates limit the change.

    `simulated` has one entry per stream, or none if there is no simulation. `simulation_error` says why it is no bound.
    """

    name: str
    send_s: float
    alone: list[StreamLoad]
    together: list[StreamLoad]
    simulated: list[SimulatedStream] = msgspec.field(default_factory=list)
    simulation_error: str = ""
    gates: list[CheckResult]


class FleetLoad(RunEnvelope, kw_only=True, tag_field="document", tag="fleet-load"):
    """One run of `meltcore load --fleet`: the contents of its `result.json`.

    `health` has one line per model and one line for the fleet. `gpu_note` says how the GPUs were measured, or why not.
    `step_costs` has the models whose steps were measured while they were alone.
    """

    models: list[ModelUnderLoad]
    levels: list[FleetLevel] = msgspec.field(default_factory=list)
    interference: list[Interference] = msgspec.field(default_factory=list)
    experiment: FleetExperiment | None = None
    step_costs: dict[str, StepCosts] = msgspec.field(default_factory=dict)
    health: list[CheckResult] = msgspec.field(default_factory=list)
    gpu_note: str = ""
