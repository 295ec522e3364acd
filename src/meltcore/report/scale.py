"""Axes: where a value stands on the paper, and which values get a tick. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to positions in [start, end] (SVG units), linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            low, high, at = math.log10(self.low), math.log10(self.high), math.log10(value)
        else:
            low, high, at = self.low, self.high, value
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def linear_ticks(high: float, most: int = 5) -> list[float]:
    """Round values from 0 up to the first at or above `high`, at most about `most` of them. `high` 0 gives [0, 1]."""
    if high <= 0:
        return [0.0, 1.0]
    rough = high / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * (1 - 1e-9))
    count = math.ceil(high / step - 1e-9)
    return [step * index for index in range(count + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Values that enclose [low, high], both above 0: the decades, or 1-2-5 steps where there are few decades."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last <= first:
        last = first + 1
    if last - first >= 3:
        return [10.0**power for power in range(first, last + 1)]
    steps = [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)] + [10.0**last]
    below = max(index for index, value in enumerate(steps) if value <= low * (1 + 1e-9))
    above = min(index for index, value in enumerate(steps) if value >= high * (1 - 1e-9))
    return steps[below : max(above, below + 1) + 1]


def spaced(positions: Sequence[float], gap: float) -> list[int]:
    """Indices of the positions whose labels fit: each at least `gap` from the one kept before; the last always kept."""
    kept: list[int] = []
    for index, position in enumerate(positions):
        if not kept or position - positions[kept[-1]] >= gap:
            kept.append(index)
    last = len(positions) - 1
    if kept and kept[-1] != last:
        if positions[last] - positions[kept[-1]] < gap:
            kept.pop()
        kept.append(last)
    return kept
