"""The score of a server: its throughput at 1 to 64 requests at once, weighted, and zero unless it answers rightly."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.errors import ConfigError
from meltcore.results.schema import EvalScore, Gate, LevelResult, SpeedSum, Verdict
from meltcore.results.weights import WEIGHTS, missing_loads, weighted_sum
from meltcore.results.wording import load_of

_COUNTS: tuple[Verdict, ...] = ("OK", "CLIENT_BOUND")
_CUT_SHORT: tuple[Verdict, ...] = ("PARTIAL", "SERVER_DIED")


def speed_sum(levels: Sequence[LevelResult]) -> SpeedSum | None:
    """None unless every one of the seven levels is there and every request of it was answered as asked."""
    good = [level for level in levels if level.verdict in _COUNTS]
    if missing_loads(good):
        return None
    return SpeedSum(
        total_tokens_per_s=weighted_sum(good, "total_tokens_per_s"),
        output_tokens_per_s=weighted_sum(good, "output_tokens_per_s"),
    )


def score(gates: Sequence[Gate], levels: Sequence[LevelResult]) -> EvalScore:
    """Zero where a gate or a level failed.

    Raises ConfigError where a level is missing or was cut short, or where a gate was left out: that is no score at all.
    """
    left_out = [gate.name for gate in gates if gate.status == "NOT RUN"]
    if left_out or not gates:
        raise ConfigError(f"no score without its gates: {', '.join(left_out) or 'none'} NOT RUN")
    missing = missing_loads([level for level in levels if level.verdict not in _CUT_SHORT])
    if missing:
        raise ConfigError(
            f"no score without the levels {', '.join(map(str, missing))}; it takes all of {list(WEIGHTS)}"
        )
    against = [f"{gate.name}: {gate.detail}" for gate in gates if gate.status == "FAIL"]
    against += [f"{load_of(level)}: {level.verdict}" for level in levels if level.verdict not in _COUNTS]
    if against:
        return EvalScore(total_tokens_per_s=0.0, output_tokens_per_s=0.0, zero_because=against)
    return EvalScore(
        total_tokens_per_s=weighted_sum(levels, "total_tokens_per_s"),
        output_tokens_per_s=weighted_sum(levels, "output_tokens_per_s"),
    )
