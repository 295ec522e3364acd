"""Holds sums over the steps of an engine by kind of step: what its steps cost, by the size of their batches.

An engine sends all sums with each step, packed as doubles. Unpacked, a hundred numbers would cost the host more than
the short steps of a small model allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

_DECODE_SIZES, _PROMPT_SIZES = 10, 16  # powers of two from 1; larger batches count as the largest


class StepKind(NamedTuple):
    """A kind of step. The size is the power of two at or below the rows of a decode step, or a step's prompt tokens.

    Paced steps of all sizes are one kind of size 0: they were limited because an engine of a higher class was at work.
    """

    phase: Literal["paced", "decode", "prompt"]
    size: int


class StepSums(NamedTuple):
    """The number of some steps, their seconds, and the rows and prompt tokens in all of them."""

    steps: float = 0.0
    seconds: float = 0.0
    rows: float = 0.0
    prompt_tokens: float = 0.0


STEP_KINDS = (
    StepKind("paced", 0),
    *(StepKind("decode", 1 << exponent) for exponent in range(_DECODE_SIZES)),
    *(StepKind("prompt", 1 << exponent) for exponent in range(_PROMPT_SIZES)),
)
NUM_SUMS = len(StepSums._fields) * len(STEP_KINDS)
NO_STEPS = bytes(8 * NUM_SUMS)


def kind_of_step(rows: int, prompt_tokens: int, *, is_paced: bool) -> int:
    """Return the index in `STEP_KINDS` of a step with at least one row."""
    if is_paced:
        return 0
    if prompt_tokens:
        return _DECODE_SIZES + min(prompt_tokens.bit_length(), _PROMPT_SIZES)
    return min(rows.bit_length(), _DECODE_SIZES)


def sums_by_kind(packed: bytes) -> dict[StepKind, StepSums]:
    """Return the packed sums of all kinds that had steps."""
    cells: Sequence[float] = memoryview(packed).cast("d")
    width = len(StepSums._fields)
    sums = (StepSums(*cells[at * width : (at + 1) * width]) for at in range(len(STEP_KINDS)))
    return {kind: each for kind, each in zip(STEP_KINDS, sums, strict=True) if each.steps}


def total_steps(sums: dict[StepKind, StepSums]) -> StepSums:
    """Return the sums over all kinds."""
    return StepSums(*map(sum, zip(*sums.values(), strict=True))) if sums else StepSums()
