"""Word problems of two steps, with both worked in the answer."""

from __future__ import annotations

import random
from collections.abc import Callable

from meltcore.problems.problem import Problem, Split
from meltcore.problems.sums import Sum, draw_main, draw_step, random_sum
from meltcore.problems.words import GOODS, ITEMS, NAMES

_LARGEST = 399


def story_problem(rng: random.Random, split: Split) -> Problem:
    """A story, its main operation first: "61 + 12 = 73. 73 - 20 = 53. The answer is 53."."""
    question, first, second = rng.choice(_STORIES)(rng, split)
    return Problem(question, f"{first.worked}. {second.worked}. The answer is {second.value}.", second.value, "medium")


_Told = tuple[str, Sum, Sum]


def _more(rng: random.Random, split: Split, before: Sum) -> Sum:
    return draw_step(split, lambda: Sum("+", before.value, rng.randint(2, 99)))


def _fewer(rng: random.Random, split: Split, before: Sum) -> Sum:
    return draw_step(split, lambda: Sum("-", before.value, rng.randint(1, min(99, before.value))))


def _gained_then_lost(rng: random.Random, split: Split) -> _Told:
    one, other = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    first = draw_main(split, lambda: random_sum(rng, "+", largest=_LARGEST))
    second = _fewer(rng, split, first)
    told = f"{one} has {first.a} {items}. {other} brings {first.b} more and takes {second.b} away."
    return f"{told} How many {items} does {one} have now?", first, second


def _lost_then_gained(rng: random.Random, split: Split) -> _Told:
    one, other = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    first = draw_main(split, lambda: random_sum(rng, "-", largest=_LARGEST))
    second = _more(rng, split, first)
    told = f"{one} has {first.a} {items} and gives {first.b} to {other}. Then {one} finds {second.b} more."
    return f"{told} How many {items} does {one} have now?", first, second


def _sold_twice(rng: random.Random, split: Split) -> _Told:
    goods = rng.choice(GOODS)
    first = draw_main(split, lambda: random_sum(rng, "-", largest=_LARGEST))
    second = _fewer(rng, split, first)
    told = f"A shop has {first.a} {goods}. It sells {first.b} on Monday and {second.b} on Friday."
    return f"{told} How many {goods} are left?", first, second


def _three_together(rng: random.Random, split: Split) -> _Told:
    one, other, third = rng.sample(NAMES, 3)
    items = rng.choice(ITEMS)
    first = draw_main(split, lambda: random_sum(rng, "+", largest=_LARGEST))
    second = _more(rng, split, first)
    told = f"{one} has {first.a} {items}, {other} has {first.b} and {third} has {second.b}."
    return f"{told} How many {items} do they have together?", first, second


def _boxes(rng: random.Random, split: Split) -> _Told:
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    first = draw_main(split, lambda: random_sum(rng, "*", largest=_LARGEST))
    second = _more(rng, split, first)
    told = f"{name} fills {first.b} boxes with {first.a} {items} each and keeps {second.b} more in a bag."
    return f"{told} How many {items} are there in all?", first, second


def _change(rng: random.Random, split: Split) -> _Told:
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    first = draw_main(split, lambda: random_sum(rng, "*", largest=_LARGEST))
    second = draw_step(split, lambda: Sum("-", first.value + rng.randint(1, 99), first.value))
    told = f"{name} buys {first.b} {goods} at {first.a} coins each and pays with {second.a} coins."
    return f"{told} How many coins come back?", first, second


_STORIES: list[Callable[[random.Random, Split], _Told]] = [
    _gained_then_lost,
    _lost_then_gained,
    _sold_twice,
    _three_together,
    _boxes,
    _change,
]
