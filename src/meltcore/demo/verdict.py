"""The gates of a demo: derive the verdict and its reasons from the measurements."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.results.formatting import format_load, format_percent
from meltcore.results.schema import CheckResult, Evaluation, LevelResult, Verdict

MIN_UNLOADED_ACCURACY = 0.95
# Of 8 texts, 6: what a synthesizer with 95 % of texts right reaches, and none with a wrong step or mel.
MIN_READ_BACK_ACCURACY = 0.75
ACCURACY_MARGIN = 0.01  # each level's accuracy may differ from the unloaded one by this much, either way
_ROUNDING = 1e-9  # of binary fractions, so that a difference of exactly one point passes


def judge(
    checks: Sequence[CheckResult],
    evaluation: Evaluation,
    levels: Sequence[LevelResult],
    planned_concurrencies: Sequence[int],
    read_back: LevelResult | None = None,
) -> tuple[Verdict, list[str]]:
    """Return the verdict of a demo that was to run the levels `planned_concurrencies`, and all reasons against it.

    read_back: the one of `levels` in which the recognizer reads what the synthesizer has said.
    """
    reasons = [f"API check failed: {check.name}: {check.detail}" for check in checks if check.status == "FAIL"]
    reasons += _unloaded_reasons(evaluation)
    for level in levels:
        limit = MIN_READ_BACK_ACCURACY if level is read_back else MIN_UNLOADED_ACCURACY
        reasons += _level_reasons(evaluation, level, limit)
    run_concurrencies = [level.concurrency for level in levels if level.task is None]
    missing_levels = [
        f"{concurrency:,}" for concurrency in planned_concurrencies if concurrency not in run_concurrencies
    ]
    if missing_levels:
        reasons.append(f"levels not run: {', '.join(missing_levels)}")
    if any(level.verdict == "SERVER_DIED" for level in levels):
        return "SERVER_DIED", reasons
    if reasons:
        return "FAILED", reasons
    return ("CLIENT_BOUND" if any(level.verdict == "CLIENT_BOUND" for level in levels) else "OK"), []


def passed(verdict: Verdict) -> bool:
    """Return whether a verdict passes. A client-bound run distorts latencies, not answers; the report states it."""
    return verdict in ("OK", "CLIENT_BOUND")


def _unloaded_reasons(evaluation: Evaluation) -> list[str]:
    reasons = []
    if evaluation.failed:
        reasons.append(f"unloaded: {evaluation.failed} of {evaluation.total} requests failed")
    if evaluation.accuracy < MIN_UNLOADED_ACCURACY:
        reasons.append(
            f"unloaded accuracy is {format_percent(evaluation.accuracy)}; "
            f"the limit is {format_percent(MIN_UNLOADED_ACCURACY)}"
        )
    return reasons


def _level_reasons(evaluation: Evaluation, level: LevelResult, task_limit: float) -> list[str]:
    """Return the reasons against a level. task_limit: the least accuracy of tasks other than chat."""
    reasons = []
    if level.succeeded != level.requests:
        reasons.append(f"{level.succeeded:,} of {level.requests:,} requests got their complete answer")
    if level.peak_in_flight < level.concurrency:
        reasons.append(f"only {level.peak_in_flight:,} were in flight together")
    if level.verdict in ("PARTIAL", "FAILED", "SERVER_DIED"):
        reasons.append(f"{level.verdict}: {'; '.join(level.reasons) or 'no reason recorded'}")
    is_graded = level.task is None or level.task.task != "synthesis"
    if level.accuracy is None and is_graded:
        reasons.append("accuracy was not measured")
    elif level.task is not None and level.accuracy is not None:
        if level.accuracy < task_limit:
            reasons.append(f"accuracy is {format_percent(level.accuracy)}; the limit is {format_percent(task_limit)}")
    elif level.accuracy is not None and abs(level.accuracy - evaluation.accuracy) > ACCURACY_MARGIN + _ROUNDING:
        reasons.append(
            f"accuracy {format_percent(level.accuracy)} is more than one point "
            f"from the unloaded {format_percent(evaluation.accuracy)}"
        )
    return [f"{format_load(level)}: {reason}" for reason in reasons]
