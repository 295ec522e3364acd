"""Generates word problems of two steps. The answers show both steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from meltcore.measure.problems.sums import Operation, Problem, Split, Sum, draw_main_operation, draw_step, random_sum

# ruff: noqa: SIM905 - a list of words is most readable as words

# Few and short words, so that each is one token.
NAMES = """Ada Ben Cora Dan Eva Finn Gus Hana Ivan Jack Kim Lena Mia Noah Olga Paul Rosa Sam Tess Uma Vera Will Yara
Zoe""".split()

ITEMS = """pears plums nuts figs eggs rolls cups pens maps keys rings bells caps beads boots shells stones ropes lamps
drums kites books cards masks""".split()

GOODS = "chairs tables clocks bags brooms vases spoons plates jars rugs carts tents saws nets axes coats".split()

TOWNS = "Oslo Rome Lima Cairo Paris Delhi Tokyo Quito Milan Perth Lyon Bonn Turin Ghent Malmo Porto".split()

ASIDES = [
    "The wind was cold that morning.",
    "Nobody saw the grey cat again.",
    "It rained for most of the week.",
    "The clerk wrote everything down by hand.",
    "A train passed just before noon.",
    "The old gate was painted green.",
    "Someone left the door open.",
    "The market closes early in winter.",
    "Two dogs slept under the bench.",
    "The road to the mill is steep.",
    "Every page was checked with care.",
    "The lake froze in the first month.",
]

_MAX_VALUE = 399


@dataclass(frozen=True)
class _Story:
    """A story of two steps: `first_operation`, then the step that `draw_second` draws after it.

    `text` names people as {0}, {1} and {2}, the counted things as {things}, and the operands of both steps.
    """

    num_people: int
    things: list[str]
    first_operation: Operation
    draw_second: Callable[[random.Random, Sum], Sum]
    text: str


def _add(rng: random.Random, first: Sum) -> Sum:
    return Sum("+", first.value, rng.randint(2, 99))


def _subtract(rng: random.Random, first: Sum) -> Sum:
    return Sum("-", first.value, rng.randint(1, min(99, first.value)))


def _pay(rng: random.Random, first: Sum) -> Sum:
    return Sum("-", first.value + rng.randint(1, 99), first.value)


_STORIES = [
    _Story(
        2,
        ITEMS,
        "+",
        _subtract,
        "{0} has {first.a} {things}. {1} brings {first.b} more and takes {second.b} away. "
        "How many {things} does {0} have now?",
    ),
    _Story(
        2,
        ITEMS,
        "-",
        _add,
        "{0} has {first.a} {things} and gives {first.b} to {1}. Then {0} finds {second.b} more. "
        "How many {things} does {0} have now?",
    ),
    _Story(
        0,
        GOODS,
        "-",
        _subtract,
        "A shop has {first.a} {things}. It sells {first.b} on Monday and {second.b} on Friday. "
        "How many {things} are left?",
    ),
    _Story(
        3,
        ITEMS,
        "+",
        _add,
        "{0} has {first.a} {things}, {1} has {first.b} and {2} has {second.b}. "
        "How many {things} do they have together?",
    ),
    _Story(
        1,
        ITEMS,
        "*",
        _add,
        "{0} fills {first.b} boxes with {first.a} {things} each and keeps {second.b} more in a bag. "
        "How many {things} are there in all?",
    ),
    _Story(
        1,
        GOODS,
        "*",
        _pay,
        "{0} buys {first.b} {things} at {first.a} coins each and pays with {second.a} coins. How many coins come back?",
    ),
]


def story_problem(rng: random.Random, split: Split) -> Problem:
    """Generate a story whose answer shows both steps: "61 + 12 = 73. 73 - 20 = 53. The answer is 53"."""
    story = rng.choice(_STORIES)
    names, things = rng.sample(NAMES, story.num_people), rng.choice(story.things)
    first = draw_main_operation(split, lambda: random_sum(rng, story.first_operation, max_value=_MAX_VALUE))
    second = draw_step(split, lambda: story.draw_second(rng, first))
    return Problem(
        story.text.format(*names, things=things, first=first, second=second),
        f"{first.solved_text}. {second.solved_text}. The answer is {second.value}.",
        second.value,
        "medium",
    )
