"""Defines what the steps of a model cost while it has a GPU to itself."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

UNLIMITED = 1e9  # units; JSON has no infinity
_Positive = Annotated[float, Meta(gt=0)]
_NotNegative = Annotated[float, Meta(ge=0)]
Points = list[tuple[_NotNegative, _NotNegative]]  # sizes with their seconds or bytes, by ascending size


class StepCosts(msgspec.Struct, kw_only=True):
    """The seconds of a step of one model on one type of GPU, measured while no other model was at work.

    A unit is a prompt token of generation, a second of audio of speech, and a character of other tasks. Raises
    ValueError for sizes that do not ascend, and for steps that take no time.

    Args:
        decode_s: pairs of rows and of seconds of a step without new units, by ascending rows. Empty if the model has no
            such steps.
        prompt_s: pairs of units and of the seconds that they add to the step in which they begin, by ascending units.
        max_units: the most units of one step.
        row_steps: steps of a row for each of its output tokens, or in all if the task has no such tokens.
        weight_bytes: pairs of tokens (rows and units) of a step and of the bytes of weights that it reads at least, by
            ascending tokens. Empty if unknown.
        context_bytes: pairs of tokens before a row's new one and of the bytes of keys, values and states that the row
            then reads at least, by ascending tokens. Empty if the model has none, or if they are unknown.
        unit_flops: operations that a unit, and a row in a step, need at least. None if unknown.
    """

    decode_s: Points = msgspec.field(default_factory=list)
    prompt_s: Points = msgspec.field(default_factory=list)
    max_units: _Positive = UNLIMITED
    row_steps: _Positive = 1.0
    weight_bytes: Points = msgspec.field(default_factory=list)
    context_bytes: Points = msgspec.field(default_factory=list)
    unit_flops: _NotNegative | None = None

    def __post_init__(self) -> None:
        for name in ("decode_s", "prompt_s", "weight_bytes", "context_bytes"):
            for (size, _), (larger, _) in pairwise(getattr(self, name)):
                if size >= larger:
                    raise ValueError(f"{name} has the size {larger:g} after {size:g}: sizes must ascend")
        name, points = ("decode_s", self.decode_s) if self.decode_s else ("prompt_s", self.prompt_s)
        for size, seconds in points:
            if seconds <= 0:
                raise ValueError(f"{name} has {seconds:g} s for the size {size:g}: a step takes more than 0 s")

    @property
    def is_measured(self) -> bool:
        """Whether the seconds of a step are known."""
        return bool(self.decode_s or self.prompt_s)

    def step_s(self, rows: float, units: float) -> float:
        """Return the seconds of a step with `rows` sequences in which `units` begin."""
        return _value_at(self.decode_s, rows) + (_value_at(self.prompt_s, units) if units else 0.0)

    def step_bytes(self, tokens: float) -> float:
        """Return the bytes of weights that a step of `tokens` tokens reads at least."""
        return _value_at(self.weight_bytes, tokens)

    def row_bytes(self, context: float, steps: int) -> float:
        """Return the bytes of keys, values and states that a row reads at least in `steps` steps.

        The first of them has `context` tokens before its new one. A window reads no more than its size, so the mean of
        the first and the last step is at most the mean of all.
        """
        ends = (_value_at(self.context_bytes, size) for size in (context, context + steps - 1))
        return steps * sum(ends) / 2


def _value_at(points: Points, size: float) -> float:
    """Return the seconds or bytes of a size: linear between two points and beyond the last two, and 0 without a point.

    A smaller size than the first costs as much as the first. With one point all sizes cost the same.
    """
    if len(points) < 2 or size <= points[0][0]:
        return points[0][1] if points else 0.0
    at = min(bisect_left(points, (size, 0.0)), len(points) - 1)
    (low, low_value), (high, high_value) = points[at - 1 : at + 1]
    slope = (high_value - low_value) / (high - low)
    return low_value + (size - low) * slope if size <= high else high_value + (size - high) * max(0.0, slope)


class GpuStepCosts(msgspec.Struct, kw_only=True):
    """The step costs of models on one type of GPU, by the name of the model.

    `bytes_per_s` and `flops_per_s` are the most that the GPU reads and computes in a second. None if unknown.
    """

    models: dict[str, StepCosts] = msgspec.field(default_factory=dict)
    bytes_per_s: _Positive | None = None
    flops_per_s: _Positive | None = None
