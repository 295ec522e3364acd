"""Judges the health of each model under the load on a fleet, and of the fleet: lost requests, refusals, p95."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meltcore.measure.documents.schema import CheckResult, Distribution, FleetLoad, StreamLoad
from meltcore.measure.documents.values.formatting import format_number, format_percent
from meltcore.measure.documents.values.percentiles import SAMPLES_NEEDED
from meltcore.measure.documents.verdicts import CheckVerdict
from meltcore.measure.load.tasks.task import first_latency


def fleet_health(result: FleetLoad, p95_limits_ms: Mapping[str, float]) -> list[CheckResult]:
    """Return one line per model and one line for the fleet.

    A model fails if it lost a request. It also fails if its p95 is above a limit in the smallest mixed level that has
    enough samples.
    """
    models = [_model_line(model.name, result, p95_limits_ms) for model in result.models]
    loads = list(_loads(result))
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
    loads = [load for load in _loads(result) if load.model == name]
    if not sum(load.level.requests for load in loads):
        return CheckResult(name=name, status="NOT RUN", detail="no requests")
    details, is_well = [_counts(loads)], not any(load.lost for load in loads)
    failures: dict[str, int] = {}
    for load in loads:
        for reason, count in load.level.failures.items():
            failures[reason] = failures.get(reason, 0) + count
    details += [f"{count:,} x {reason}" for reason, count in sorted(failures.items(), key=lambda each: -each[1])[:2]]
    for metric, limit in p95_limits_ms.items():
        found = _against_limit(name, result, metric, limit)
        if found is not None:
            details.append(found[1])
            is_well = is_well and found[0]
    return CheckResult(name=name, status="PASS" if is_well else "FAIL", detail="; ".join(details))


def _against_limit(name: str, result: FleetLoad, metric: str, limit: float) -> tuple[bool, str] | None:
    """Return whether the smallest mixed level keeps the limit, and a sentence on the levels up to which it holds.

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
        has_samples = any(_latency(load, metric) is not None for load in _loads(result) if load.model == name)
        return (True, f"p95 of {metric}: too few samples, {SAMPLES_NEEDED['p95']} needed") if has_samples else None
    kept = []
    for connections, p95 in measured:
        if p95 > limit:
            break
        kept.append(connections)
    first_connections, first_p95 = measured[0]
    text = f"p95 of {metric} {format_number(first_p95)} ms at {first_connections:,} connections, limit {limit:g} ms"
    return bool(kept), f"{text}, kept up to {kept[-1]:,}" if kept else text


def _latency(load: StreamLoad, metric: str) -> Distribution | None:
    if metric == "e2e":
        return load.level.e2e_ms
    has_audio = load.level.task is not None
    return first_latency(load.level) if has_audio == (metric == "first_audio") else None


def _loads(result: FleetLoad) -> Iterator[StreamLoad]:
    for level in result.levels:
        yield from level.streams
    seen: set[str] = set()
    for pair in result.interference:
        yield from (pair.beside, pair.aggressor_load)
        if pair.victim not in seen:
            yield pair.alone
        seen.add(pair.victim)
    if result.experiment is not None:
        yield from (*result.experiment.alone, *result.experiment.together)


def _counts(loads: Sequence[StreamLoad]) -> str:
    requests, lost = (sum(getattr(load.level, name) for load in loads) for name in ("requests", "failed"))
    refused, refusals = (sum(getattr(load, name) for load in loads) for name in ("refused", "refusals"))
    share = format_percent(refused / requests if requests else 0.0)
    return f"{requests:,} requests, {lost:,} lost, {refused:,} refused at first ({share}; {refusals:,} refusals)"
