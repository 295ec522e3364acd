"""Generates lists of problems. The same arguments give the same problems on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Literal

from meltcore.measure.problems.pages import page_problem
from meltcore.measure.problems.stories import story_problem
from meltcore.measure.problems.sums import Problem, Split, short_problem

LONG_RATIO = 0.35
MEDIUM_RATIO = 0.25

_NUM_EVALUATION_PROBLEMS = 200
_EVALUATION_SEED = 2026

_PROBLEM_MAKERS: dict[str, Callable[[random.Random, Split], Problem]] = {
    "short": short_problem,
    "medium": story_problem,
    "long": page_problem,
}


def generate(split: Split, *, kind: Literal["short", "long", "mixed"], num_problems: int, seed: int) -> list[Problem]:
    """Generate `num_problems` problems.

    The kind "mixed" has at least 35 % long and 25 % medium problems, and the rest short, in random order. Held-out
    problems use an operand combination that no training text contains (`sums.is_held_out`).
    """
    rng = random.Random(f"{split}/{kind}/{seed}")  # noqa: S311 - must repeat for a seed
    return [_PROBLEM_MAKERS[problem_kind](rng, split) for problem_kind in _draw_kinds(rng, kind, num_problems)]


def evaluation_set() -> list[Problem]:
    """Return the 200 held-out problems of all kinds that measure a server's accuracy without load."""
    return generate("heldout", kind="mixed", num_problems=_NUM_EVALUATION_PROBLEMS, seed=_EVALUATION_SEED)


def _draw_kinds(rng: random.Random, kind: str, num_problems: int) -> list[str]:
    if kind != "mixed":
        return [kind] * num_problems
    kinds = ["long"] * math.ceil(LONG_RATIO * num_problems) + ["medium"] * math.ceil(MEDIUM_RATIO * num_problems)
    kinds = (kinds + ["short"] * num_problems)[:num_problems]
    rng.shuffle(kinds)
    return kinds
