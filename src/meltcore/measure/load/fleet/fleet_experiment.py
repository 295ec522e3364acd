"""Reads experiments on interference: the load of each stream, first alone and then together, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import CheckResult, Distribution, FleetExperiment, LevelResult, StreamLoad
from meltcore.measure.documents.values.formatting import format_number, format_percent
from meltcore.measure.documents.values.percentiles import SAMPLES_NEEDED, TOO_SMALL
from meltcore.measure.load.tasks.task import ServedModel, first_latency, task_of

_Ratio = Annotated[float, Meta(gt=0)]


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of an experiment.

    The stream loads the model `model`, or a model of `task`. Among several models of the task it takes the one with
    `prefer` in its name.

    The load is `concurrency` connections, or `rate` arrivals per second (Poisson). `max_p95_ratio` limits the p95
    together divided by the p95 alone, of `e2e` and `first` (first token or audio). `min_throughput_ratio` limits the
    throughput.
    """

    name: str
    model: str | None = None
    task: str | None = None
    prefer: str = ""
    workload: str | None = None
    concurrency: Annotated[int, Meta(ge=1)] | None = None
    rate: Annotated[float, Meta(gt=0)] | None = None
    alone_s: Annotated[float, Meta(gt=0)] | None = None  # time alone, where not the experiment's
    max_p95_ratio: dict[str, _Ratio] = {}
    min_throughput_ratio: _Ratio | None = None


class ExperimentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of an experiment's YAML file."""

    name: str
    streams: Annotated[list[StreamSpec], Meta(min_length=2)]


def load_experiment(name: str) -> ExperimentSpec:
    """Return the experiment of a YAML file. Raises ConfigError."""
    try:
        spec = msgspec.yaml.decode(Path(name).read_bytes(), type=ExperimentSpec)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--interference {name}: {error}; there is pairs, or a YAML file") from error
    for stream in spec.streams:
        if (stream.concurrency is None) == (stream.rate is None):
            raise ConfigError(f"{name}: {stream.name} needs concurrency or rate, one of them")
        if (stream.model is None) == (stream.task is None):
            raise ConfigError(f"{name}: {stream.name} needs model or task, one of them")
        unknown = set(stream.max_p95_ratio) - {"e2e", "first"}
        if unknown:
            raise ConfigError(f"{name}: {stream.name}: max_p95_ratio.{unknown.pop()} is not one of e2e, first")
    return spec


def choose_models(spec: ExperimentSpec, models: Sequence[ServedModel]) -> list[ServedModel]:
    """Return the model of each stream. Streams of one task get different models.

    Raises ConfigError if a model is missing.
    """
    chosen: list[ServedModel] = []
    preferred = [stream.prefer for stream in spec.streams]
    for stream in spec.streams:
        if stream.model is not None:
            found = [model for model in models if model.name == stream.model]
        else:
            found = [model for model in models if model.task == stream.task and model not in chosen]
            others = [name for name in preferred if name and name != stream.prefer]
            # The one that is meant, then one that no other stream means.
            found.sort(key=lambda model: (not _has(model, stream.prefer), any(_has(model, name) for name in others)))
        if not found:
            wanted = stream.model or f"another model of the task {stream.task}"
            raise ConfigError(
                f"the experiment {spec.name} needs {wanted} for its stream {stream.name}; "
                f"there are {', '.join(f'{model.name} ({model.task})' for model in models)}"
            )
        chosen.append(found[0])
    return chosen


def _has(model: ServedModel, part: str) -> bool:
    return bool(part) and part.lower() in model.name.lower()


def experiment_gates(
    spec: ExperimentSpec, alone: Sequence[StreamLoad], together: Sequence[StreamLoad]
) -> list[CheckResult]:
    """Return one gate per limit, with the measured ratio and the limit. A gate with too few samples is NOT RUN."""
    gates = []
    for stream, before, after in zip(spec.streams, alone, together, strict=True):
        name = f"{stream.name} ({before.model})"
        for metric, limit in stream.max_p95_ratio.items():
            gates.append(_p95_gate(name, metric, limit, before.level, after.level))
        if stream.min_throughput_ratio is not None:
            gates.append(_throughput_gate(name, stream.min_throughput_ratio, before, after))
        lost = before.lost + after.lost
        detail = f"{lost:,} requests lost, limit 0"
        gates.append(CheckResult(name=f"{name}: nothing lost", status="FAIL" if lost else "PASS", detail=detail))
    return gates


def _p95_gate(name: str, metric: str, limit: float, alone: LevelResult, together: LevelResult) -> CheckResult:
    before, after = (_latency(level, metric) for level in (alone, together))
    word = "end to end" if metric == "e2e" else task_of(alone).first_word
    title = f"{name}: p95 of {word}"
    if before is None or after is None or before.p95 is None or after.p95 is None or not before.p95:
        counts = ", ".join(str(0 if each is None else each.n) for each in (before, after))
        return CheckResult(name=title, status="NOT RUN", detail=f"{counts} samples, p95 needs {SAMPLES_NEEDED['p95']}")
    ratio = after.p95 / before.p95
    p99 = " and ".join(f"{TOO_SMALL if each.p99 is None else f'{format_number(each.p99)} ms'} (n {each.n:,})"
                       for each in (before, after))  # fmt: skip
    return CheckResult(
        name=title,
        status="PASS" if ratio <= limit else "FAIL",
        detail=f"{format_number(before.p95)} ms alone, {format_number(after.p95)} ms together: {ratio:.2f} times, "
        f"limit {limit:g}; p99 {p99}",
    )


def _latency(level: LevelResult, metric: str) -> Distribution | None:
    return level.e2e_ms if metric == "e2e" else first_latency(level)


def _throughput_gate(name: str, limit: float, alone: StreamLoad, together: StreamLoad) -> CheckResult:
    before, after = alone.level.steady_throughput, together.level.steady_throughput
    if not before:
        return CheckResult(name=f"{name}: throughput", status="NOT RUN", detail="no throughput alone")
    ratio = after / before
    unit = task_of(alone.level).unit.unit
    return CheckResult(
        name=f"{name}: throughput",
        status="PASS" if ratio >= limit else "FAIL",
        detail=f"{format_number(before)} {unit} alone, {format_number(after)} together: {format_percent(ratio)}, "
        f"limit {format_percent(limit)}",
    )


def make_experiment(
    spec: ExperimentSpec, send_s: float, alone: list[StreamLoad], together: list[StreamLoad]
) -> FleetExperiment:
    """Return the result of an experiment with its gates."""
    gates = experiment_gates(spec, alone, together)
    return FleetExperiment(name=spec.name, send_s=send_s, alone=alone, together=together, gates=gates)
