"""Derives the verdict of a demo, and the reasons against a PASS, from the measurements."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.schema import CheckResult, Evaluation, FleetLevel, LevelResult
from meltcore.measure.documents.values.formatting import format_load, format_percent
from meltcore.measure.documents.verdicts import SCORED, Verdict

MIN_UNLOADED_ACCURACY = 0.95
# Of 8 texts, 6: what a synthesizer with 95 % of texts right reaches, and none with a wrong step or mel.
MIN_READ_BACK_ACCURACY = 0.75
ACCURACY_MARGIN = 0.01  # the accuracy under load may differ from the unloaded one by this much, either way
MIN_GRADED = 200  # requests of a mixed level whose accuracy compares by itself; those of all levels always do
_FLOAT_TOLERANCE = 1e-9  # of binary fractions, so that a difference of exactly one point passes


def judge(
    checks: Sequence[CheckResult],
    evaluation: Evaluation,
    levels: Sequence[LevelResult],
    mixed: Sequence[FleetLevel],
    planned: Sequence[int],
    read_back: LevelResult | None = None,
) -> tuple[Verdict, list[str]]:
    """Return the verdict of a demo, and all reasons against a PASS.

    Each of `levels` measures one task, and `mixed` all models together. `planned` holds the connections of the planned
    levels. In the level `read_back` the transcriber reads the speech of the synthesizer.
    """
    reasons = [f"API check failed: {check.name}: {check.detail}" for check in checks if check.status == "FAIL"]
    if evaluation.failed:
        reasons.append(f"unloaded: {evaluation.failed} of {evaluation.total} requests failed")
    if evaluation.accuracy < MIN_UNLOADED_ACCURACY:
        reasons.append(
            f"unloaded accuracy is {format_percent(evaluation.accuracy)}; "
            f"the limit is {format_percent(MIN_UNLOADED_ACCURACY)}"
        )
    for level in levels:
        limit = MIN_READ_BACK_ACCURACY if level is read_back else MIN_UNLOADED_ACCURACY
        reasons += _task_reasons(level, limit)
    reasons += _mixed_reasons(evaluation, mixed, planned)
    verdicts = [level.verdict for level in levels]
    verdicts += [load.level.verdict for level in mixed for load in level.streams]
    if "SERVER_DIED" in verdicts:
        return "SERVER_DIED", reasons
    return ("FAILED" if reasons else "CLIENT_BOUND" if "CLIENT_BOUND" in verdicts else "OK"), reasons


def passed(verdict: Verdict) -> bool:
    """Return whether a verdict passes. CLIENT_BOUND passes, because a slow client changes latencies and not answers."""
    return verdict in SCORED


def _task_reasons(level: LevelResult, min_accuracy: float) -> list[str]:
    """Return the reasons why a level of one task with graded answers does not pass."""
    reasons = _answer_reasons(level)
    if level.peak_in_flight < level.concurrency:
        reasons.append(f"only {level.peak_in_flight:,} were in flight together")
    if level.accuracy is None:
        reasons.append("accuracy was not measured")
    elif level.accuracy < min_accuracy:
        reasons.append(f"accuracy is {format_percent(level.accuracy)}; the limit is {format_percent(min_accuracy)}")
    return [f"{format_load(level)}: {reason}" for reason in reasons]


def _mixed_reasons(evaluation: Evaluation, mixed: Sequence[FleetLevel], planned: Sequence[int]) -> list[str]:
    measured_connections = [level.connections for level in mixed]
    missing = [f"{connections:,}" for connections in planned if connections not in measured_connections]
    reasons = [f"levels not run: {', '.join(missing)}"] if missing else []
    graded: list[LevelResult] = []
    for level in mixed:
        for load in level.streams:
            load_reasons = _answer_reasons(load.level)
            if load.level.task is None and load.level.requests >= MIN_GRADED:
                load_reasons += _drift_reasons(evaluation, load.level.accuracy)
            graded += [load.level] if load.level.task is None else []
            reasons += [f"{level.label}, {load.name}: {reason}" for reason in load_reasons]
        refused = sum(load.refused for load in level.streams)  # they waited, and were not in flight meanwhile
        if level.peak_in_flight + refused < level.connections:
            reasons.append(f"{level.label}: only {level.peak_in_flight:,} were in flight together")
    accuracies = [(level.accuracy, level.requests) for level in graded if level.accuracy is not None]
    num_requests = sum(requests for _, requests in accuracies)
    mean_accuracy = (
        sum(accuracy * requests for accuracy, requests in accuracies) / num_requests if num_requests else None
    )
    return [*reasons, *(f"mixed levels: {reason}" for reason in _drift_reasons(evaluation, mean_accuracy) if mixed)]


def _answer_reasons(level: LevelResult) -> list[str]:
    reasons = []
    if level.succeeded != level.requests:
        reasons.append(f"{level.succeeded:,} of {level.requests:,} requests got their complete answer")
    if level.verdict in ("PARTIAL", "FAILED", "SERVER_DIED"):
        reasons.append(f"{level.verdict}: {'; '.join(level.reasons) or 'no reason recorded'}")
    return reasons


def _drift_reasons(evaluation: Evaluation, accuracy: float | None) -> list[str]:
    """Return a list with one reason if the accuracy under load differs from the accuracy without load, else empty."""
    if accuracy is None:
        return ["accuracy was not measured"]
    if abs(accuracy - evaluation.accuracy) <= ACCURACY_MARGIN + _FLOAT_TOLERANCE:
        return []
    return [
        f"accuracy {format_percent(accuracy)} is more than one point "
        f"from the unloaded {format_percent(evaluation.accuracy)}"
    ]
