"""Defines the description of a task for measurements, and finds the task of a name, a workload or a level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from meltcore.common import tasks as declared
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import Distribution, LevelResult, TaskLoad
from meltcore.measure.documents.values.definitions import Definition, define
from meltcore.measure.documents.values.formatting import format_load, format_number
from meltcore.measure.load.config import IntRange, LoadConfig
from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.workloads.workload import Clip, Workload


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of requests to models on GPUs.

    Generation has tokens of prompt and output. Transcription has seconds of a clip.
    """

    input_len: IntRange
    output_len: IntRange
    clip_s: IntRange


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One entry of /v1/models: a name, a task, and the other fields that the server reports."""

    name: str
    task: str
    card: Mapping[str, Any] = field(default_factory=dict)
    is_bundled: bool = False

    @property
    def is_small(self) -> bool:
        """Whether requests are short: a CPU would compute long ones for minutes, and bundled models know no others."""
        return self.is_bundled or self.card.get("device") == "CPU"


@dataclass(frozen=True)
class ThroughputUnit:
    """The words for the throughput of a task: a title, the unit, and a short unit for narrow tables.

    `key` is the key of the definition. `head` is the heading of columns. If it is empty, the unit is the heading.
    """

    key: str
    title: str
    unit: str
    short_unit: str
    head: str = ""


ANSWERS = ThroughputUnit("answers_per_s", "Answers per second", "answers/s", "answers/s")
_ANSWERS_DEFINITION = Definition(
    ANSWERS.key, "Answers/s", "answers/s", "Complete answers divided by the whole level from release to last answer."
)


@dataclass(frozen=True)
class Metric:
    """A metric of a level, shown as one column of a table. `better` says which direction is an improvement."""

    name: str
    value: Callable[[LevelResult], float | None]
    better: str  # "higher" or "lower"


def percentile(key: str, name: str) -> Callable[[LevelResult], float | None]:
    """Return a function that reads a percentile of a distribution of a level, such as `p50` of `ttft_ms`."""
    return lambda level: getattr(distribution_of(level, key), name)


def distribution_of(level: LevelResult, key: str) -> Distribution:
    """Return the distribution `key` of a level or of its task. If neither has it, return one without samples."""
    return getattr(level if hasattr(level, key) else level.task, key, Distribution())


E2E_P50 = Metric("E2E p50 ms", percentile("e2e_ms", "p50"), "lower")
E2E_P99 = Metric("E2E p99 ms", percentile("e2e_ms", "p99"), "lower")
ACCURACY = Metric("accuracy", lambda level: level.accuracy, "higher")


class Latency(NamedTuple):
    """A distribution that tables and charts of a task show.

    The chart has `title` and `unit`, and the columns have `head`. A terminal shows the median and the 99th percentile
    under the two headings of `console`. A heading of None hides its column.
    """

    key: str
    title: str
    head: str
    console: tuple[str, str] | tuple[None, None] = (None, None)
    unit: str = "ms"


END_TO_END = Latency("e2e_ms", "End to end", "End to end, ms")


class Problem(NamedTuple):
    """A problem with a right answer: the input of a request, the answer, and the audio if the request uploads audio."""

    given: str
    answer: str
    audio_wav: bytes | None = None


@dataclass(frozen=True)
class DemoStep:
    """The step of the demo for a task: held-out problems, of which up to `concurrency` run together.

    `make_problems(seed)` returns the problems. `write(folder, problems)` writes the problems and returns the workload.
    """

    concurrency: int
    make_problems: Callable[[int], list[Problem]]
    write: Callable[[Path, Sequence[Problem]], str]


@dataclass(frozen=True)
class ReadBack:
    """The demo's grading of a task whose answers have no single right form: a reader task turns the answers into text.

    `reader` is the path of the reader task. `fields(text)` returns the fields of a request.
    `make_reader_problem(problem, answer)` returns the problem whose input is the answer, for the reader task.
    """

    reader: str
    make_problems: Callable[[int], list[Problem]]
    fields: Callable[[str], dict[str, Any]]
    make_reader_problem: Callable[[Problem, bytes], Problem]


def work(record: RequestRecord) -> TaskWork:
    """Return the work of a request. It is an empty TaskWork if the request was not answered."""
    return record.work or TaskWork()


def task_load(level: LevelResult) -> TaskLoad:
    """Return the task's metrics of a level. The level must count work."""
    assert level.task is not None
    return level.task


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredTask:
    """Holds everything that measurements need to know about one task.

    Args:
        name: The name of the task in cards of models, in documents and in options, from its declaration.
        aliases: Names of the task in the cards of other servers.
        word: The word with which the task's workloads begin, such as `speak` in `speak:words=8`. It is empty for the
            task of all other workloads. None uses the name of the task.
        usage: The task's workloads for `meltcore load --help`, each with a description of its requests.
        path: The route of the task's requests, from its declaration.
        uploads: True if requests upload audio. A burst of such requests costs the client CPU time.
        share: The task's share of a mixed level of `load --fleet`, in percent.
        demo_share: The task's share of a mixed level of the demo, in percent.
        open: Opens the workload of a configuration for a number of requests. If another process has made the clips of
            the run, it receives those clips. Raises ConfigError for a malformed description and an unreadable file.
        default_workload: Returns the workload for a model if none is given. A small model gets short requests.
        slo_metrics: The latencies that `--goodput` may limit.
        work_of: Returns the work of a complete answer, in the unit of the throughput. By default each answer is one
            unit. None counts output tokens.
        details: Returns fields of TaskLoad that only this task has, from the complete answers and the duration.
        notes: Returns the notes on the complete answers of a level.
        may_be_empty: True if an answer without text may be right.
        unit: The unit of the task's throughput.
        first_key: The key of the latency to the first part of an answer. None means that answers arrive whole.
        first_word: The name of the first part of an answer.
        latencies: The latencies that tables and charts show.
        distributions: The distributions of the full table of a level.
        metrics: The metrics that comparisons show beside the throughput and `shared_metrics`.
        shared_metrics: The metrics that other tasks have too.
        definitions: The definitions of metrics that only this task has.
        facts: Returns what the succeeded requests of a level have done, as names and texts.
        step: The demo's step of the task.
        read_back: The demo's step of a task whose answers have no single right form.
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    word: str | None = None
    usage: tuple[tuple[str, str], ...] = ()
    path: str = ""
    uploads: bool = False
    share: float = 10.0
    demo_share: float = 0.0
    open: Callable[[LoadConfig, int, Sequence[Clip]], Workload]
    default_workload: Callable[[ServedModel, Sizes], str]
    slo_metrics: tuple[str, ...] = ("e2e",)
    work_of: Callable[[RequestRecord], float] | None = lambda _record: 1.0
    details: Callable[[Sequence[RequestRecord], float], dict[str, Any]] = lambda _records, _duration_s: {}
    notes: Callable[[Sequence[RequestRecord], LevelResult], list[str]] = lambda _records, _result: []
    may_be_empty: bool = False
    unit: ThroughputUnit = ANSWERS
    first_key: str | None = None
    first_word: str = "first audio"
    latencies: tuple[Latency, ...] = (END_TO_END._replace(console=("E2E\np50 ms", "\np99")),)
    distributions: tuple[str, ...] = ("e2e_ms", "queue_delay_ms")
    metrics: tuple[Metric, ...] = ()
    shared_metrics: tuple[Metric, ...] = (E2E_P50, E2E_P99, ACCURACY)
    definitions: tuple[Definition, ...] = (_ANSWERS_DEFINITION,)
    facts: Callable[[LevelResult], list[tuple[str, str]]] = lambda _level: []
    step: DemoStep | None = None
    read_back: ReadBack | None = None

    @property
    def own_metrics(self) -> tuple[Metric, ...]:
        """The throughput, which is the default metric of a verdict, and then the metrics of this task."""
        return (Metric(self.unit.unit, lambda level: level.throughput, "higher"), *self.metrics)


@cache
def tasks() -> Mapping[str, MeasuredTask]:
    """Return the record of each task by its name. The first one is the default: levels of it have no TaskLoad."""
    records = {}
    for name, task in declared.tasks().items():
        if task.workload:
            record: MeasuredTask = resolve_name(task.workload)
            word = name if record.word is None else record.word
            records[name] = replace(record, name=name, word=word, path=next(iter(task.paths)))
    return records


def default_task() -> MeasuredTask:
    """Return the task of workloads, models and levels that name no task."""
    return next(iter(tasks().values()))


def find_task(name: str, context: str) -> MeasuredTask:
    """Return the task of a name or of an alias. Raises ConfigError, which begins with `context`, for another name."""
    for task in tasks().values():
        if name == task.name or name in task.aliases:
            return task
    raise ConfigError(f"{context}; known are {', '.join(tasks())}")


def workload_task(spec: str) -> MeasuredTask:
    """Return the task of a workload, which the word before the colon names."""
    word = spec.partition(":")[0]
    return next((task for task in tasks().values() if task.word and task.word == word), default_task())


def task_of(level: LevelResult) -> MeasuredTask:
    """Return the task of a level."""
    if level.task is None:
        return default_task()
    return find_task(level.task.task, f"a level has the task {level.task.task!r}")


def by_task(levels: Sequence[LevelResult]) -> dict[MeasuredTask, list[LevelResult]]:
    """Return the levels grouped by task. Tasks are in the order of their first levels."""
    groups: dict[MeasuredTask, list[LevelResult]] = {}
    for level in levels:
        groups.setdefault(task_of(level), []).append(level)
    return groups


def first_latency(level: LevelResult) -> Distribution | None:
    """Return the distribution of the time to the first token or first audio, or None for tasks that do not stream."""
    key = task_of(level).first_key
    return None if key is None else distribution_of(level, key)


def define_metric(key: str) -> Definition:
    """Return the definition of a metric, which belongs to a task or to all levels. Raises KeyError for another key."""
    task_definitions = {definition.key: definition for task in tasks().values() for definition in task.definitions}
    return task_definitions[key] if key in task_definitions else define(key)


def all_metrics() -> list[Metric]:
    """Return all metrics that comparisons can show: the metrics of each task, then the shared metrics."""
    task_metrics = [metric for task in tasks().values() for metric in task.own_metrics]
    shared = [metric for task in tasks().values() for metric in task.shared_metrics]
    return list(dict.fromkeys([*task_metrics, *shared]))


def throughput_text(level: LevelResult) -> str:
    """Return the throughput and load of a level as text, such as "4,200 output tok/s, concurrency 400"."""
    return f"{format_number(level.throughput)} {task_of(level).unit.unit}, {format_load(level)}"


def open_workload(config: LoadConfig, num_requests: int, clips: Sequence[Clip] = ()) -> Workload:
    """Return the workload of `config` for `num_requests` requests.

    If another process has made the clips of the run, `clips` holds them. Raises ConfigError for a malformed
    description, a file that cannot be read, and an option that is not for the task.
    """
    task, spec = workload_task(config.workload), config.workload
    unknown = [name for name in config.slo_ms if name not in task.slo_metrics]
    if unknown:
        measured = ", ".join(task.slo_metrics)
        raise ConfigError(f"--goodput: {', '.join(unknown)} is not measured of {task.name}; {measured} is")
    options = {
        "--max-tokens": config.max_tokens is not None,
        "--tokenizer": config.tokenizer is not None,
        "--no-stream": not config.stream,
        "--record-event-times": config.record_event_times,
    }
    for name, is_given in options.items():
        if is_given and task is not default_task():
            raise ConfigError(f"{name} is for {default_task().name}; the workload {spec} is {task.name}")
    return task.open(config, num_requests, clips)


def check_workload(config: LoadConfig) -> None:
    """Raise ConfigError if the workload of `config` cannot be opened. Call it before a server is started."""
    open_workload(config, num_requests=1)
