"""Defines what the steps of a model cost while it has a GPU to itself."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

UNLIMITED = 1e9  # units; JSON has no infinity


class StepCosts(msgspec.Struct, kw_only=True):
    """The seconds of a step of one model on one type of GPU, measured while no other model was at work.

    A unit is a prompt token of generation, a second of audio of speech, and a character of other tasks.

    Args:
        decode_s: pairs of rows and of seconds of a step without new units, by ascending rows. Empty if not measured.
        row_s: seconds of one more row beyond the largest measured step.
        unit_s: seconds that each unit adds to the step in which it begins.
        max_units: the most units of one step.
        row_steps: steps of a sentence, clip or text. None means that a row has one step per output token.
        step_bytes: bytes that every step reads from the GPU's memory at least. None if unknown.
        unit_flops: operations that a unit, and a row in a step, need at least. None if unknown.
    """

    decode_s: list[tuple[float, float]] = msgspec.field(default_factory=list)
    row_s: float = 0.0
    unit_s: float = 0.0
    max_units: float = UNLIMITED
    row_steps: float | None = None
    step_bytes: float | None = None
    unit_flops: float | None = None

    def step_s(self, rows: int, units: float) -> float:
        """Return the seconds of a step with `rows` sequences in which `units` begin. Costs between points are linear.

        Fewer rows than were measured cost as much as the fewest measured.
        """
        at = bisect_left(self.decode_s, (rows, 0.0))
        if at == 0:
            decode_s = self.decode_s[0][1]
        elif at == len(self.decode_s):
            last_rows, last_s = self.decode_s[-1]
            decode_s = last_s + (rows - last_rows) * self.row_s
        else:
            (low, low_s), (high, high_s) = self.decode_s[at - 1 : at + 1]
            decode_s = low_s + (rows - low) / (high - low) * (high_s - low_s)
        return decode_s + units * self.unit_s


class GpuStepCosts(msgspec.Struct, kw_only=True):
    """The step costs of models on one type of GPU, by the name of the model.

    `bytes_per_s` and `flops_per_s` are the most that the GPU reads and computes in a second. None if unknown.
    """

    models: dict[str, StepCosts] = msgspec.field(default_factory=dict)
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
