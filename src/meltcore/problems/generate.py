"""Problems by the batch: the same arguments give the same problems, on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Literal

from meltcore.problems.pages import page_problem
from meltcore.problems.problem import Problem, Split
from meltcore.problems.short import short_problem
from meltcore.problems.stories import story_problem

LONG_SHARE = 0.35
MEDIUM_SHARE = 0.25

_EVALUATION_COUNT = 200
_EVALUATION_SEED = 2026

_MAKERS: dict[str, Callable[[random.Random, Split], Problem]] = {
    "short": short_problem,
    "medium": story_problem,
    "long": page_problem,
}


def generate(split: Split, *, kind: Literal["short", "long", "mixed"], count: int, seed: int) -> list[Problem]:
    """`count` problems. "mixed" is at least 35 % long and 25 % medium, the rest short, in random order.

    Held-out problems turn on an operand combination that no training text contains (see `sums`).
    """
    rng = random.Random(f"{split}/{kind}/{seed}")
    return [_MAKERS[each](rng, split) for each in _kinds(rng, kind, count)]


def evaluation_set() -> list[Problem]:
    """The 200 held-out problems, all kinds, that measure a server's accuracy without load."""
    return generate("heldout", kind="mixed", count=_EVALUATION_COUNT, seed=_EVALUATION_SEED)


def _kinds(rng: random.Random, kind: str, count: int) -> list[str]:
    if kind != "mixed":
        return [kind] * count
    kinds = ["long"] * math.ceil(LONG_SHARE * count) + ["medium"] * math.ceil(MEDIUM_SHARE * count)
    kinds = (kinds + ["short"] * count)[:count]
    rng.shuffle(kinds)
    return kinds
