"""Long problems: a page of facts, then a question that needs one or two from far back.

Every needed fact has look-alikes on the page: the same name with other items, the same item with other names, other
towns, other prices. Only the right one, read at the right place, gives the right number; so a wrong mask, position or
memory page shows as a wrong answer. Homes and houses are asked for in training alone: they pad a held-out page.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from meltcore.problems.problem import Problem, Split
from meltcore.problems.sums import Sum, draw_main, random_sum
from meltcore.problems.words import ASIDES, GOODS, ITEMS, NAMES, TOWNS

# A fact is 6 to 10 tokens, so 30 to 116 facts make pages of about 240 to 920 tokens, and the 26 facts that follow
# the last needed one put it at least three 64-token pages back.
FEWEST_FACTS, MOST_FACTS = 30, 116
_FACTS_AFTER = 26
_PER_PARAGRAPH = 6


@dataclass(frozen=True)
class _Asked:
    """A question, the facts it needs in the order of the working, and the sum they lead to.

    A fact is its key and the full sentence; no other sentence on the page may have the same key.
    """

    question: str
    facts: dict[tuple[str, ...], str]
    sum: Sum


def page_problem(rng: random.Random, split: Split, *, facts: int | None = None) -> Problem:
    """A page of `facts` sentences (drawn from 30 to 116 where not given; at least 3) and a question about it.

    On a page of fewer than 30 the needed facts stand anywhere: those are for learning on, not for evaluation.
    """
    size = rng.randint(FEWEST_FACTS, MOST_FACTS) if facts is None else facts
    asked = rng.choice(_QUESTIONS if split == "heldout" else _TRAINING_QUESTIONS)(rng, split)
    needed = list(asked.facts.values())
    others = _others(rng, size - len(needed), taken=list(asked.facts))
    first_part = size - len(needed) - _FACTS_AFTER if size >= FEWEST_FACTS else len(others)
    page = others[:first_part]
    for fact in needed:
        page.insert(rng.randint(0, len(page)), fact)
    page += others[first_part:]
    lines = [" ".join(page[at : at + _PER_PARAGRAPH]) for at in range(0, len(page), _PER_PARAGRAPH)]
    working = " ".join([*needed, f"{asked.sum.worked}."])
    question = "\n".join([*lines, asked.question])
    return Problem(question, f"{working} The answer is {asked.sum.value}.", asked.sum.value, "long")


def _count(name: str, item: str, number: int) -> str:
    return f"{name} counted {item}: {number}."


def _price(goods: str, number: int) -> str:
    return f"Price of {goods}: {number}."


def _home(name: str, town: str) -> str:
    return f"{name} lives in {town}."


def _houses(town: str, number: int) -> str:
    return f"Houses in {town}: {number}."


def _others(rng: random.Random, count: int, *, taken: list[tuple[str, ...]]) -> list[str]:
    """`count` sentences, shuffled, none with a key in `taken`; about half are counts by name and item."""
    few = max(1, count // 8)
    homes = [name for name in rng.sample(NAMES, min(few, len(NAMES))) if (name,) not in taken]
    chosen = [_home(name, rng.choice(TOWNS)) for name in homes]
    towns = [town for town in rng.sample(TOWNS, min(few, len(TOWNS))) if (town,) not in taken]
    chosen += [_houses(town, rng.randint(100, 899)) for town in towns]
    priced = [goods for goods in rng.sample(GOODS, min(few, len(GOODS))) if (goods,) not in taken]
    chosen += [_price(goods, rng.randint(11, 99)) for goods in priced]
    chosen = chosen[:count]
    chosen += rng.sample(ASIDES, min(few // 2, count - len(chosen)))
    chosen += _counts(rng, count - len(chosen), taken)
    rng.shuffle(chosen)
    return chosen


def _counts(rng: random.Random, count: int, taken: list[tuple[str, ...]]) -> list[str]:
    """Counts by (name, item), from the smallest grid that holds them, so that names and items repeat.

    The grid includes the names and items asked about, and the first keys drawn from it are their look-alikes.
    """
    pairs = [key for key in taken if len(key) == 2]
    side = 3
    while side * side < count + len(pairs) + 2:
        side += 1
    names = _widened(rng, [name for name, _ in pairs], NAMES, side)
    items = _widened(rng, [item for _, item in pairs], ITEMS, side)
    free = [(name, item) for name in names for item in items if (name, item) not in taken]
    rng.shuffle(free)
    alike = [next(key for key in free if key[part] == pair[part]) for pair in pairs for part in (0, 1)]
    keys = list(dict.fromkeys(alike + free))[:count]
    return [_count(name, item, rng.randint(10, 99)) for name, item in keys]


def _widened(rng: random.Random, start: list[str], words: list[str], size: int) -> list[str]:
    """`start` without repeats, filled from `words` up to `size`."""
    kept = list(dict.fromkeys(start))
    rest = [word for word in words if word not in kept]
    return kept + rng.sample(rest, max(0, size - len(kept)))


def _two_counts(rng: random.Random) -> list[tuple[str, str]]:
    """Two different (name, item) keys; half of the time they share the name or the item."""
    one, other = rng.sample(NAMES, 2)
    item, second = rng.sample(ITEMS, 2)
    return [(one, item), rng.choice([(other, second), (other, second), (one, second), (other, item)])]


def _count_facts(keys: list[tuple[str, str]], sum_: Sum) -> dict[tuple[str, ...], str]:
    return {key: _count(*key, number) for key, number in zip(keys, (sum_.a, sum_.b), strict=True)}


def _two_digit(rng: random.Random, operation: str) -> Sum:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return Sum("+", a, b) if operation == "+" else Sum("-", max(a, b), min(a, b))


def _together(rng: random.Random, split: Split) -> _Asked:
    keys = _two_counts(rng)
    total = draw_main(split, lambda: _two_digit(rng, "+"))
    (one, item), (other, second) = keys
    question = f"How many are the {item} of {one} and the {second} of {other} together?"
    return _Asked(question, _count_facts(keys, total), total)


def _how_many_more(rng: random.Random, split: Split) -> _Asked:
    keys = _two_counts(rng)
    gap = draw_main(split, lambda: _two_digit(rng, "-"))
    (one, item), (other, second) = keys
    question = f"How many more are the {item} of {one} than the {second} of {other}?"
    return _Asked(question, _count_facts(keys, gap), gap)


def _cost(rng: random.Random, split: Split) -> _Asked:
    goods = rng.choice(GOODS)
    cost = draw_main(split, lambda: random_sum(rng, "*", largest=999))
    question = f"How much do {cost.b} {goods} cost?"
    return _Asked(question, {(goods,): _price(goods, cost.a)}, cost)


def _town_grows(rng: random.Random, split: Split) -> _Asked:
    name, town = rng.choice(NAMES), rng.choice(TOWNS)
    grown = draw_main(split, lambda: Sum("+", rng.randint(100, 899), rng.randint(10, 99)))
    question = f"The town where {name} lives gets {grown.b} new houses. How many houses does it have then?"
    facts: dict[tuple[str, ...], str] = {(name,): _home(name, town), (town,): _houses(town, grown.a)}
    return _Asked(question, facts, grown)


_QUESTIONS: list[Callable[[random.Random, Split], _Asked]] = [_together, _how_many_more, _cost]
# The town question is too hard to be marked on, yet training needs it: there a name alone leads to the fact. Six
# trainings without it came to find a count by one of its keys and stopped there; the two with it found it by both.
_TRAINING_QUESTIONS = [*_QUESTIONS, _town_grows]
