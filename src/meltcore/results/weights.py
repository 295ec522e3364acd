"""How much each level of load counts in the score and in the speed sum: the weights of the hackathon's rules (2026)."""

from collections.abc import Sequence
from typing import Literal

from meltcore.results.schema import LevelResult

WEIGHTS = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4, 32: 4, 64: 8}  # by requests at once
Rate = Literal["total_tokens_per_s", "output_tokens_per_s"]


def missing_loads(levels: Sequence[LevelResult]) -> list[int]:
    """The loads with a weight that `levels` lack."""
    there = {level.concurrency for level in levels}
    return [load for load in WEIGHTS if load not in there]


def weighted_sum(levels: Sequence[LevelResult], rate: Rate) -> float:
    """The sum of weight times tokens a second over all levels with a weight, each of which must be there."""
    by_load = {level.concurrency: level for level in levels}
    return sum(weight * float(getattr(by_load[load], rate)) for load, weight in WEIGHTS.items())
