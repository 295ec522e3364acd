"""Defines the weights of the levels in the score and in the weighted throughput, by the hackathon's rules (2026)."""

from collections.abc import Sequence
from typing import Literal

from meltcore.measure.documents.schema import LevelResult

WEIGHTS = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4, 32: 4, 64: 8}  # by concurrency
Rate = Literal["total_tokens_per_s", "output_tokens_per_s"]


def missing_concurrencies(levels: Sequence[LevelResult]) -> list[int]:
    """Return the concurrencies that have a weight but no level in `levels`."""
    measured_concurrencies = {level.concurrency for level in levels}
    return [concurrency for concurrency in WEIGHTS if concurrency not in measured_concurrencies]


def weighted_sum(levels: Sequence[LevelResult], rate: Rate) -> float:
    """Return the weighted sum of the levels' token rates. A level must exist for every weighted concurrency."""
    by_concurrency = {level.concurrency: level for level in levels}
    return sum(weight * float(getattr(by_concurrency[concurrency], rate)) for concurrency, weight in WEIGHTS.items())
