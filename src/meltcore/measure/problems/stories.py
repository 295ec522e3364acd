"""Generates word problems of two steps, with both steps worked in the answer."""

from __future__ import annotations

import random
from collections.abc import Callable

from meltcore.measure.problems.sums import Problem, Split, Sum, draw_main_operation, draw_step, random_sum

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


def story_problem(rng: random.Random, split: Split) -> Problem:
    """Generate a story whose answer works both steps: "61 + 12 = 73. 73 - 20 = 53. The answer is 53"."""
    question, first_step, second_step = rng.choice(_STORIES)(rng, split)
    return Problem(
        question,
        f"{first_step.solved_text}. {second_step.solved_text}. The answer is {second_step.value}.",
        second_step.value,
        "medium",
    )


_Story = tuple[str, Sum, Sum]


def _draw_addition(rng: random.Random, split: Split, previous: Sum) -> Sum:
    return draw_step(split, lambda: Sum("+", previous.value, rng.randint(2, 99)))


def _draw_subtraction(rng: random.Random, split: Split, previous: Sum) -> Sum:
    return draw_step(split, lambda: Sum("-", previous.value, rng.randint(1, min(99, previous.value))))


def _gain_loss_story(rng: random.Random, split: Split) -> _Story:
    first_name, second_name = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    first_step = draw_main_operation(split, lambda: random_sum(rng, "+", max_value=_MAX_VALUE))
    second_step = _draw_subtraction(rng, split, first_step)
    story = (
        f"{first_name} has {first_step.a} {items}. "
        f"{second_name} brings {first_step.b} more and takes {second_step.b} away."
    )
    return f"{story} How many {items} does {first_name} have now?", first_step, second_step


def _loss_gain_story(rng: random.Random, split: Split) -> _Story:
    first_name, second_name = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    first_step = draw_main_operation(split, lambda: random_sum(rng, "-", max_value=_MAX_VALUE))
    second_step = _draw_addition(rng, split, first_step)
    story = (
        f"{first_name} has {first_step.a} {items} and gives {first_step.b} to {second_name}. "
        f"Then {first_name} finds {second_step.b} more."
    )
    return f"{story} How many {items} does {first_name} have now?", first_step, second_step


def _sales_story(rng: random.Random, split: Split) -> _Story:
    goods = rng.choice(GOODS)
    first_step = draw_main_operation(split, lambda: random_sum(rng, "-", max_value=_MAX_VALUE))
    second_step = _draw_subtraction(rng, split, first_step)
    story = f"A shop has {first_step.a} {goods}. It sells {first_step.b} on Monday and {second_step.b} on Friday."
    return f"{story} How many {goods} are left?", first_step, second_step


def _three_people_story(rng: random.Random, split: Split) -> _Story:
    first_name, second_name, third_name = rng.sample(NAMES, 3)
    items = rng.choice(ITEMS)
    first_step = draw_main_operation(split, lambda: random_sum(rng, "+", max_value=_MAX_VALUE))
    second_step = _draw_addition(rng, split, first_step)
    story = (
        f"{first_name} has {first_step.a} {items}, {second_name} has {first_step.b} and {third_name} has "
        f"{second_step.b}."
    )
    return f"{story} How many {items} do they have together?", first_step, second_step


def _boxes_story(rng: random.Random, split: Split) -> _Story:
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    first_step = draw_main_operation(split, lambda: random_sum(rng, "*", max_value=_MAX_VALUE))
    second_step = _draw_addition(rng, split, first_step)
    story = (
        f"{name} fills {first_step.b} boxes with {first_step.a} {items} each and keeps {second_step.b} more in a bag."
    )
    return f"{story} How many {items} are there in all?", first_step, second_step


def _change_story(rng: random.Random, split: Split) -> _Story:
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    first_step = draw_main_operation(split, lambda: random_sum(rng, "*", max_value=_MAX_VALUE))
    second_step = draw_step(split, lambda: Sum("-", first_step.value + rng.randint(1, 99), first_step.value))
    story = f"{name} buys {first_step.b} {goods} at {first_step.a} coins each and pays with {second_step.a} coins."
    return f"{story} How many coins come back?", first_step, second_step


_STORIES: list[Callable[[random.Random, Split], _Story]] = [
    _gain_loss_story,
    _loss_gain_story,
    _sales_story,
    _three_people_story,
    _boxes_story,
    _change_story,
]
