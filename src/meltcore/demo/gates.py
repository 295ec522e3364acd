"""What a demo run must hold to pass. Pure: from what was measured to a verdict and its reasons."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.results.schema import CheckResult, Evaluation, LevelResult, Verdict
from meltcore.results.wording import load_of, percent

UNLOADED_ACCURACY = 0.95  # at least
ACCURACY_MARGIN = 0.01  # each level's accuracy may differ from the unloaded one by this much, either way
_ROUNDING = 1e-9  # of the binary fractions, so that exactly one point still passes


def judge(
    checks: Sequence[CheckResult], evaluation: Evaluation, levels: Sequence[LevelResult], asked: Sequence[int]
) -> tuple[Verdict, list[str]]:
    """The verdict of a demo told to run `asked` levels, and every reason against it. OK and CLIENT_BOUND pass."""
    reasons = [f"API check failed: {check.name}: {check.detail}" for check in checks if check.status == "FAIL"]
    reasons += _unloaded_reasons(evaluation)
    reasons += _level_reasons(evaluation, levels)
    done = [level.concurrency for level in levels]
    missing = [f"{count:,}" for count in asked if count not in done]
    if missing:
        reasons.append(f"levels not run: {', '.join(missing)}")
    if any(level.verdict == "SERVER_DIED" for level in levels):
        return "SERVER_DIED", reasons
    if reasons:
        return "FAILED", reasons
    return ("CLIENT_BOUND" if any(level.verdict == "CLIENT_BOUND" for level in levels) else "OK"), []


def passed(verdict: Verdict) -> bool:
    """A client at its limit spoils latencies, not answers: such a demo passes, and its report says why to doubt it."""
    return verdict in ("OK", "CLIENT_BOUND")


def _unloaded_reasons(evaluation: Evaluation) -> list[str]:
    reasons = []
    if evaluation.failed:
        reasons.append(f"unloaded: {evaluation.failed} of {evaluation.asked} requests failed")
    if evaluation.share < UNLOADED_ACCURACY:
        reasons.append(f"unloaded accuracy is {percent(evaluation.share)}; the limit is {percent(UNLOADED_ACCURACY)}")
    return reasons


def _level_reasons(evaluation: Evaluation, levels: Sequence[LevelResult]) -> list[str]:
    reasons = []
    for level in levels:
        if level.succeeded != level.requests:
            reasons.append(
                f"{load_of(level)}: {level.succeeded:,} of {level.requests:,} requests got their whole answer"
            )
        if level.peak_in_flight < level.concurrency:
            reasons.append(f"{load_of(level)}: only {level.peak_in_flight:,} were in flight together")
        if level.verdict in ("PARTIAL", "FAILED", "SERVER_DIED"):
            reasons.append(f"{load_of(level)}: {level.verdict}: {'; '.join(level.reasons) or 'no reason recorded'}")
        if level.accuracy is None:
            reasons.append(f"{load_of(level)}: accuracy was not measured")
        elif abs(level.accuracy - evaluation.share) > ACCURACY_MARGIN + _ROUNDING:
            reasons.append(
                f"{load_of(level)}: accuracy {percent(level.accuracy)} is more than one point "
                f"from the unloaded {percent(evaluation.share)}"
            )
    return reasons
