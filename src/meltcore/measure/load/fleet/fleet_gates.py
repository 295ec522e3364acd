"""Computes the gates of a load on a fleet: the health of models and fleet, and the limits of an experiment.

Health gates count lost requests and refusals, and compare p95 with limits. An experiment on interference loads each
stream alone and then all streams together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import (
    CheckResult,
    Distribution,
    FleetExperiment,
    FleetLoad,
    LevelResult,
    SimulatedStream,
    StreamLoad,
)
from meltcore.measure.documents.values.formatting import format_number, format_percent
from meltcore.measure.documents.values.percentiles import SAMPLES_NEEDED, TOO_SMALL
from meltcore.measure.documents.verdicts import CheckVerdict
from meltcore.measure.load.tasks.task import ServedModel, first_latency, task_of

_Ratio = Annotated[float, Meta(gt=0)]
MIN_SIMULATED_SAMPLES = 200  # alone and together, for a limit beside the simulation
NOT_SIMULATED = "not simulated: the step costs of a model are unknown (metrics of the server, or --step-costs)"
MAX_ALONE_ERROR = 0.15  # of a simulation alone: with a larger one no limit beside the simulation is judged


def fleet_health(result: FleetLoad, p95_limits_ms: Mapping[str, float]) -> list[CheckResult]:
    """Return one gate per model and one gate for the fleet.

    A model fails if it lost a request. It also fails if its p95 is above a limit in the smallest mixed level that has
    enough samples.
    """
    models = [_model_line(model.name, result, p95_limits_ms) for model in result.models]
    loads = list(measured_loads(result))
    failed = [line.name for line in models if line.status == "FAIL"]
    not_run = [line.name for line in models if line.status == "NOT RUN"]
    detail = f"{_counts(loads)}; {len(models) - len(failed) - len(not_run)} of {len(models)} models are well"
    status: CheckVerdict = "FAIL" if failed else "NOT RUN" if not_run or not loads else "PASS"
    if not_run:
        detail += f", {', '.join(not_run)} had no request"
    if result.status == "partial":
        status, detail = "FAIL", f"{detail}; the run ended early"
    return [*models, CheckResult(name="fleet", status=status, detail=detail)]


def _model_line(name: str, result: FleetLoad, p95_limits_ms: Mapping[str, float]) -> CheckResult:
    loads = [load for load in measured_loads(result) if load.model == name]
    if not sum(load.level.requests for load in loads):
        return CheckResult(name=name, status="NOT RUN", detail="no requests")
    details, passes = [_counts(loads)], not any(load.lost for load in loads)
    failures: dict[str, int] = {}
    for load in loads:
        for reason, count in load.level.failures.items():
            failures[reason] = failures.get(reason, 0) + count
    details += [f"{count:,} x {reason}" for reason, count in sorted(failures.items(), key=lambda each: -each[1])[:2]]
    for metric, limit in p95_limits_ms.items():
        outcome = _against_limit(name, result, metric, limit)
        if outcome is not None:
            details.append(outcome[1])
            passes = passes and outcome[0]
    return CheckResult(name=name, status="PASS" if passes else "FAIL", detail="; ".join(details))


def _against_limit(name: str, result: FleetLoad, metric: str, limit: float) -> tuple[bool, str] | None:
    """Return whether the smallest measured mixed level meets the limit, and a sentence with the measured p95.

    Returns None if no level measured the metric.
    """
    measured = [
        (sum(stream.level.concurrency for stream in level.streams), distribution.p95)
        for level in result.levels
        if level.part == "mixed"
        for load in level.streams
        if load.model == name and (distribution := _latency(load, metric)) is not None and distribution.p95 is not None
    ]
    if not measured:
        has_samples = any(_latency(load, metric) is not None for load in measured_loads(result) if load.model == name)
        return (True, f"p95 of {metric}: too few samples, {SAMPLES_NEEDED['p95']} needed") if has_samples else None
    passing_connections = []
    for connections, p95 in measured:
        if p95 > limit:
            break
        passing_connections.append(connections)
    first_connections, first_p95 = measured[0]
    text = f"p95 of {metric} {format_number(first_p95)} ms at {first_connections:,} connections, limit {limit:g} ms"
    return bool(passing_connections), f"{text}, kept up to {passing_connections[-1]:,}" if passing_connections else text


def _latency(load: StreamLoad, metric: str) -> Distribution | None:
    if metric == "e2e":
        return load.level.e2e_ms
    has_audio = load.level.task is not None
    return first_latency(load.level) if has_audio == (metric == "first_audio") else None


def measured_loads(result: FleetLoad) -> Iterator[StreamLoad]:
    """Yield the load of each stream in a result, of which its levels, pairs and experiment hold each once."""
    for level in result.levels:
        yield from level.streams
    seen_victims: set[str] = set()
    for pair in result.interference:
        yield from (pair.beside, pair.aggressor_load)
        if pair.victim not in seen_victims:
            yield pair.alone
        seen_victims.add(pair.victim)
    if result.experiment is not None:
        yield from (*result.experiment.alone, *result.experiment.together)


def _counts(loads: Sequence[StreamLoad]) -> str:
    requests, lost = (sum(getattr(load.level, name) for load in loads) for name in ("requests", "failed"))
    refused, refusals = (sum(getattr(load, name) for load in loads) for name in ("refused", "refusals"))
    share = format_percent(refused / requests if requests else 0.0)
    return f"{requests:,} requests, {lost:,} lost, {refused:,} refused at first ({share}; {refusals:,} refusals)"


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of an experiment.

    The stream loads the model `model`, or a model of `task`. Among several models of the task it takes the one with
    `prefer` in its name.

    The load is `concurrency` connections, or `rate` arrivals per second (Poisson). `max_p95_ratio` limits the p95 of
    all streams together divided by the p95 of the stream alone, by metric: `e2e` or `first` (first token or audio).
    `min_throughput_ratio` limits the same ratio of the throughput.

    `max_simulated_p95_ratio` limits the p95 together divided by the p95 that an ideal scheduler gives the same
    arrivals. `min_simulated_share` limits the throughput as a share of alone, divided by the simulated share.
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
    max_simulated_p95_ratio: dict[str, _Ratio] = {}
    min_simulated_share: _Ratio | None = None


class ExperimentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of an experiment's YAML file."""

    name: str
    streams: Annotated[list[StreamSpec], Meta(min_length=2)]


def load_experiment(name: str) -> ExperimentSpec:
    """Return the experiment of a YAML file. Raises ConfigError if the file is missing or invalid."""
    try:
        spec = msgspec.yaml.decode(Path(name).read_bytes(), type=ExperimentSpec)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--interference {name}: {error}; there is pairs, or a YAML file") from error
    for stream in spec.streams:
        if (stream.concurrency is None) == (stream.rate is None):
            raise ConfigError(f"{name}: {stream.name} needs concurrency or rate, one of them")
        if (stream.model is None) == (stream.task is None):
            raise ConfigError(f"{name}: {stream.name} needs model or task, one of them")
        for limits in ("max_p95_ratio", "max_simulated_p95_ratio"):
            unknown = set(getattr(stream, limits)) - {"e2e", "first"}
            if unknown:
                raise ConfigError(f"{name}: {stream.name}: {limits}.{unknown.pop()} is not one of e2e, first")
    return spec


def choose_models(spec: ExperimentSpec, models: Sequence[ServedModel]) -> list[ServedModel]:
    """Return one model per stream. Streams of one task get different models.

    Raises ConfigError if a model is missing.
    """
    chosen: list[ServedModel] = []
    preferred = [stream.prefer for stream in spec.streams]
    for stream in spec.streams:
        if stream.model is not None:
            candidates = [model for model in models if model.name == stream.model]
        else:
            candidates = [model for model in models if model.task == stream.task and model not in chosen]
            other_preferences = [name for name in preferred if name and name != stream.prefer]
            # The one that is meant, then one that no other stream means.
            candidates.sort(
                key=lambda model: (not _has(model, stream.prefer), any(_has(model, name) for name in other_preferences))
            )
        if not candidates:
            description = stream.model or f"another model of the task {stream.task}"
            raise ConfigError(
                f"the experiment {spec.name} needs {description} for its stream {stream.name}; "
                f"there are {', '.join(f'{model.name} ({model.task})' for model in models)}"
            )
        chosen.append(candidates[0])
    return chosen


def _has(model: ServedModel, part: str) -> bool:
    return bool(part) and part.lower() in model.name.lower()


def experiment_gates(
    spec: ExperimentSpec,
    alone: Sequence[StreamLoad],
    together: Sequence[StreamLoad],
    simulated: Sequence[SimulatedStream] | str = NOT_SIMULATED,
) -> list[CheckResult]:
    """Return one gate per limit, with the measured ratio and the limit.

    A gate with too few samples is NOT RUN. So is one of a simulation that was not possible, whose reason `simulated` is
    then, or that does not give what was measured of each stream alone.
    """
    gates = []
    error = simulation_error(spec, alone, simulated)
    ideal_streams: Sequence[SimulatedStream | str] = [error] * len(together) if error else simulated
    for stream, before, after, ideal in zip(spec.streams, alone, together, ideal_streams, strict=True):
        name = f"{stream.name} ({before.model})"
        for metric, limit in stream.max_p95_ratio.items():
            gates.append(_p95_gate(name, metric, limit, before.level, after.level))
        if stream.min_throughput_ratio is not None:
            gates.append(_throughput_gate(name, stream.min_throughput_ratio, before, after))
        for metric, limit in stream.max_simulated_p95_ratio.items():
            gates.append(_simulated_p95_gate(name, metric, limit, before.level, after.level, ideal))
        if stream.min_simulated_share is not None:
            gates.append(_simulated_share_gate(name, stream.min_simulated_share, before, after, ideal))
        lost = before.lost + after.lost
        detail = f"{lost:,} requests lost, limit 0"
        gates.append(CheckResult(name=f"{name}: nothing lost", status="FAIL" if lost else "PASS", detail=detail))
    return gates


def simulation_error(
    spec: ExperimentSpec, alone: Sequence[StreamLoad], simulated: Sequence[SimulatedStream] | str
) -> str:
    """Say why the simulation is no bound, or return an empty text: it must give what was measured alone."""
    if isinstance(simulated, str):
        return simulated
    for stream, load, ideal in zip(spec.streams, alone, simulated, strict=False):
        for name, measured, found in ideal.pairs_alone(load):
            if measured is not None and found is not None and abs(found - measured) > MAX_ALONE_ERROR * measured:
                return (
                    f"the simulation is no bound: of {stream.name} alone it gives {format_number(found)} for "
                    f"{name}, and {format_number(measured)} was measured (limit {format_percent(MAX_ALONE_ERROR)})"
                )
    return ""


def _p95_gate(name: str, metric: str, limit: float, alone: LevelResult, together: LevelResult) -> CheckResult:
    before, after = (level.e2e_ms if metric == "e2e" else first_latency(level) for level in (alone, together))
    latency_name = "end to end" if metric == "e2e" else task_of(alone).first_word
    title = f"{name}: p95 of {latency_name}"
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


def _simulated_p95_gate(
    name: str, metric: str, limit: float, alone: LevelResult, together: LevelResult, ideal: SimulatedStream | str
) -> CheckResult:
    latency_name = "end to end" if metric == "e2e" else task_of(alone).first_word
    title = f"{name}: p95 of {latency_name} to the simulated one"
    before, after = (level.e2e_ms if metric == "e2e" else first_latency(level) for level in (alone, together))
    num_samples = [0 if each is None else each.n for each in (before, after)]
    bound = None if isinstance(ideal, str) else (ideal.e2e_ms if metric == "e2e" else ideal.first_ms).p95
    if min(num_samples) < MIN_SIMULATED_SAMPLES:
        detail = f"{num_samples[0]} samples alone, {num_samples[1]} together, {MIN_SIMULATED_SAMPLES} needed"
        return CheckResult(name=title, status="NOT RUN", detail=detail)
    if metric == "first" and alone.task is not None:
        return CheckResult(name=title, status="NOT RUN", detail="the simulation does not say when audio begins")
    if not bound or after is None or after.p95 is None:
        detail = ideal if isinstance(ideal, str) else "too few simulated requests for p95"
        return CheckResult(name=title, status="NOT RUN", detail=detail)
    ratio = after.p95 / bound
    return CheckResult(
        name=title,
        status="PASS" if ratio <= limit else "FAIL",
        detail=f"{format_number(after.p95)} ms together, {format_number(bound)} ms simulated: {ratio:.2f} times, "
        f"limit {limit:g}",
    )


def _simulated_share_gate(
    name: str, limit: float, alone: StreamLoad, together: StreamLoad, ideal: SimulatedStream | str
) -> CheckResult:
    title = f"{name}: share of the simulated throughput"
    before, after = alone.level.steady_throughput, together.level.steady_throughput
    if isinstance(ideal, str):
        return CheckResult(name=title, status="NOT RUN", detail=ideal)
    if not before or ideal.throughput_ratio is None:
        detail = "no throughput alone" if not before else "no simulated throughput alone, which only closed loops have"
        return CheckResult(name=title, status="NOT RUN", detail=detail)
    if not ideal.throughput_ratio:
        detail = "the ideal scheduler leaves it no throughput beside the others: there is no share to compare with"
        return CheckResult(name=title, status="NOT RUN", detail=detail)
    measured = after / before
    ratio = measured / ideal.throughput_ratio
    return CheckResult(
        name=title,
        status="PASS" if ratio >= limit else "FAIL",
        detail=f"{format_percent(measured)} of alone, {format_percent(ideal.throughput_ratio)} simulated: "
        f"{ratio:.2f} times, limit {limit:g}",
    )


def make_experiment(
    spec: ExperimentSpec,
    send_s: float,
    alone: list[StreamLoad],
    together: list[StreamLoad],
    simulated: list[SimulatedStream] | str,
) -> FleetExperiment:
    """Return the result of an experiment with its gates."""
    gates = experiment_gates(spec, alone, together, simulated)
    return FleetExperiment(
        name=spec.name,
        send_s=send_s,
        alone=alone,
        together=together,
        simulated=[] if isinstance(simulated, str) else simulated,
        simulation_error=simulation_error(spec, alone, simulated),
        gates=gates,
    )
