"""Plain sums: a line to ask, a few tokens to answer. Asked by the thousand at once."""

from __future__ import annotations

import random

from meltcore.problems.problem import Problem, Split
from meltcore.problems.sums import TABLES_TO, Operation, Sum, draw_main, random_sum

_FORMS: dict[Operation, list[str]] = {
    "+": ["{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}"],
    "-": ["{a} - {b}", "{a} minus {b}", "the difference between {a} and {b}"],
    "*": ["{a} * {b}", "{a} times {b}", "the product of {a} and {b}"],
}
_ASKED = ["What is {form}?", "Work out {form}.", "Find {form}.", "How much is {form}?", "Tell me {form}."]
_OPERATIONS: list[Operation] = ["+", "-", "*"]
_SHARES = [0.45, 0.4, 0.15]
_TABLE_SHARE = 0.08


def short_problem(rng: random.Random, split: Split) -> Problem:
    """ "What is 37 + 45?" answered "The answer is 82."; a product shows its two parts first."""
    operation = rng.choices(_OPERATIONS, _SHARES)[0]
    if split == "train" and rng.random() < _TABLE_SHARE:
        drawn = draw_main(split, lambda: _table_fact(rng, operation))
    else:
        largest = 99 if rng.random() < 0.4 else 999
        drawn = draw_main(split, lambda: random_sum(rng, operation, largest=largest))
    first, second = drawn.a, drawn.b
    if operation == "*" and rng.random() < 0.5:
        first, second = second, first
    form = rng.choice(_FORMS[operation]).format(a=first, b=second)
    parts = f"{drawn.parts.text}. " if drawn.parts else ""
    return Problem(rng.choice(_ASKED).format(form=form), f"{parts}The answer is {drawn.value}.", drawn.value, "short")


def _table_fact(rng: random.Random, operation: Operation) -> Sum:
    a, b = rng.randint(0, TABLES_TO), rng.randint(0, 9 if operation == "*" else TABLES_TO)
    return Sum(operation, max(a, b), min(a, b)) if operation == "-" else Sum(operation, a, b)
