"""Generates long problems: a page of facts, then a question that needs one or two facts from far back.

Every needed fact has look-alikes on the page: the same name with other items, the same item with other names, other
towns, other prices. Only the needed fact gives the correct number, so a wrong mask, position or memory page causes a
wrong answer. Questions about homes and houses occur in training only. On a held-out page, such facts are fillers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from meltcore.measure.problems.stories import ASIDES, GOODS, ITEMS, NAMES, TOWNS
from meltcore.measure.problems.sums import Operation, Problem, Split, Sum, draw_main_operation, random_sum

# A fact is 6 to 10 tokens, so 30 to 116 facts make pages of about 240 to 920 tokens, and the 26 facts that follow
# the last needed one put it at least three 64-token pages back.
MIN_FACTS, MAX_FACTS = 30, 116
_NUM_FACTS_AFTER = 26
_FACTS_PER_LINE = 6
_COUNT, _PRICE, _HOME, _HOUSES = "{} counted {}: {}.", "Price of {}: {}.", "{} lives in {}.", "Houses in {}: {}."


@dataclass(frozen=True)
class _Question:
    """Holds a question, the facts it needs in the order of the working, and their sum.

    `facts` maps the key of a fact to its sentence. No other sentence on the page may have the same key.
    """

    text: str
    facts: dict[tuple[str, ...], str]
    sum: Sum


def page_problem(rng: random.Random, split: Split, *, num_facts: int | None = None) -> Problem:
    """Generate a page of `num_facts` sentences and a question about it.

    The default is a random number from MIN_FACTS to MAX_FACTS; the minimum is 3. On a page of fewer than MIN_FACTS
    sentences the needed facts are at random positions. Such pages are for training only.
    """
    num_page_facts = rng.randint(MIN_FACTS, MAX_FACTS) if num_facts is None else num_facts
    question = rng.choice(_QUESTIONS if split == "heldout" else _TRAINING_QUESTIONS)(rng, split)
    needed_facts = list(question.facts.values())
    fillers = _draw_fillers(rng, num_page_facts - len(needed_facts), used_keys=list(question.facts))
    num_fillers_before = (
        num_page_facts - len(needed_facts) - _NUM_FACTS_AFTER if num_page_facts >= MIN_FACTS else len(fillers)
    )
    page = fillers[:num_fillers_before]
    for fact in needed_facts:
        page.insert(rng.randint(0, len(page)), fact)
    page += fillers[num_fillers_before:]
    lines = [" ".join(page[i : i + _FACTS_PER_LINE]) for i in range(0, len(page), _FACTS_PER_LINE)]
    working_text = " ".join([*needed_facts, f"{question.sum.solved_text}."])
    problem_text = "\n".join([*lines, question.text])
    return Problem(problem_text, f"{working_text} The answer is {question.sum.value}.", question.sum.value, "long")


def _draw_fillers(rng: random.Random, count: int, *, used_keys: list[tuple[str, ...]]) -> list[str]:
    """Draw `count` sentences in random order whose keys are not in `used_keys`.

    About half of the sentences are counts by name and item.
    """
    num_per_type = max(1, count // 8)
    home_names = [name for name in rng.sample(NAMES, min(num_per_type, len(NAMES))) if (name,) not in used_keys]
    sentences = [_HOME.format(name, rng.choice(TOWNS)) for name in home_names]
    towns = [town for town in rng.sample(TOWNS, min(num_per_type, len(TOWNS))) if (town,) not in used_keys]
    sentences += [_HOUSES.format(town, rng.randint(100, 899)) for town in towns]
    goods_names = [goods for goods in rng.sample(GOODS, min(num_per_type, len(GOODS))) if (goods,) not in used_keys]
    sentences += [_PRICE.format(goods, rng.randint(11, 99)) for goods in goods_names]
    sentences = sentences[:count]
    sentences += rng.sample(ASIDES, min(num_per_type // 2, count - len(sentences)))
    sentences += _draw_counts(rng, count - len(sentences), used_keys)
    rng.shuffle(sentences)
    return sentences


def _draw_counts(rng: random.Random, count: int, used_keys: list[tuple[str, ...]]) -> list[str]:
    """Draw sentences with a count by (name, item), from the smallest sufficient grid, so that names and items repeat.

    The grid includes the names and items of the question. The first keys drawn from the grid share one of them.
    """
    used_pairs = [key for key in used_keys if len(key) == 2]
    grid_size = 3
    while grid_size * grid_size < count + len(used_pairs) + 2:
        grid_size += 1
    names = _extend_words(rng, [name for name, _ in used_pairs], NAMES, grid_size)
    items = _extend_words(rng, [item for _, item in used_pairs], ITEMS, grid_size)
    free_keys = [(name, item) for name in names for item in items if (name, item) not in used_keys]
    rng.shuffle(free_keys)
    lookalikes = [next(key for key in free_keys if key[i] == used_pair[i]) for used_pair in used_pairs for i in (0, 1)]
    keys = list(dict.fromkeys(lookalikes + free_keys))[:count]
    return [_COUNT.format(name, item, rng.randint(10, 99)) for name, item in keys]


def _extend_words(rng: random.Random, first_words: list[str], words: list[str], num_words: int) -> list[str]:
    """Return `first_words` without repeats, extended with random words from `words` to `num_words`."""
    unique_words = list(dict.fromkeys(first_words))
    other_words = [word for word in words if word not in unique_words]
    return unique_words + rng.sample(other_words, max(0, num_words - len(unique_words)))


def _draw_count_keys(rng: random.Random) -> list[tuple[str, str]]:
    """Return two different (name, item) keys, which share the name or the item in half of the cases."""
    first_name, second_name = rng.sample(NAMES, 2)
    first_item, second_item = rng.sample(ITEMS, 2)
    return [
        (first_name, first_item),
        rng.choice(
            [
                (second_name, second_item),
                (second_name, second_item),
                (first_name, second_item),
                (second_name, first_item),
            ]
        ),
    ]


def _two_digit_sum(rng: random.Random, operation: Operation) -> Sum:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return Sum("+", a, b) if operation == "+" else Sum("-", max(a, b), min(a, b))


def _count_question(operation: Operation, text: str, rng: random.Random, split: Split) -> _Question:
    keys = _draw_count_keys(rng)
    result = draw_main_operation(split, lambda: _two_digit_sum(rng, operation))
    facts: dict[tuple[str, ...], str] = {
        key: _COUNT.format(*key, number) for key, number in zip(keys, (result.a, result.b), strict=True)
    }
    return _Question(text.format(*chain(*keys)), facts, result)


def _cost_question(rng: random.Random, split: Split) -> _Question:
    goods = rng.choice(GOODS)
    cost = draw_main_operation(split, lambda: random_sum(rng, "*", max_value=999))
    question = f"How much do {cost.b} {goods} cost?"
    return _Question(question, {(goods,): _PRICE.format(goods, cost.a)}, cost)


def _town_question(rng: random.Random, split: Split) -> _Question:
    name, town = rng.choice(NAMES), rng.choice(TOWNS)
    num_houses = draw_main_operation(split, lambda: Sum("+", rng.randint(100, 899), rng.randint(10, 99)))
    question = f"The town where {name} lives gets {num_houses.b} new houses. How many houses does it have then?"
    facts: dict[tuple[str, ...], str] = {
        (name,): _HOME.format(name, town),
        (town,): _HOUSES.format(town, num_houses.a),
    }
    return _Question(question, facts, num_houses)


_QUESTIONS: list[Callable[[random.Random, Split], _Question]] = [
    partial(_count_question, "+", "How many are the {1} of {0} and the {3} of {2} together?"),
    partial(_count_question, "-", "How many more are the {1} of {0} than the {3} of {2}?"),
    _cost_question,
]
# The town question is too hard for evaluation, but training needs it: there one name leads to the fact. Six trainings
# without it only learned to find a count by one of its keys; the two with it learned to use both.
_TRAINING_QUESTIONS = [*_QUESTIONS, _town_question]
