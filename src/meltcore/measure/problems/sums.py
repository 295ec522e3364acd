"""Defines arithmetic problems with one operation on two numbers, and the split into training and held-out problems.

A combination is an operation with its two operands, in either order for + and *. A keyed hash decides whether a
combination is held out. One in five is held out, and no training text contains it, not even as a step. Sums within 20
are always in training, because they have too few neighbors to be inferred. The hash has no seed, so the split is the
same on every machine.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

_ANSWER = re.compile(r"The answer is\s*(-?\d[\d,]*)")


@dataclass(frozen=True)
class Problem:
    """Holds one problem and its answer.

    `question` is the user's message. `answer` is the worked text, which ends in "The answer is 42."; `value` is that
    number. `kind` is "short" (one operation), "medium" (a story of two steps) or "long" (a page of facts, then a
    question).
    """

    question: str
    answer: str
    value: int
    kind: str


def extract_answer(text: str) -> int | None:
    """Return the number after the last "The answer is", or None. The number may have thousands commas."""
    answers = _ANSWER.findall(text)
    return int(answers[-1].replace(",", "")) if answers else None


def is_correct(problem: Problem, text: str) -> bool:
    """Return whether an answer states the problem's number. The working before it is not graded."""
    return extract_answer(text) == problem.value


Operation = Literal["+", "-", "*"]

_HASH_KEY = b"meltcore sums"
_HELD_OUT_ONE_IN = 5
MAX_TABLE_OPERAND = 20


def is_held_out(operation: Operation, a: int, b: int) -> bool:
    """Return whether a combination appears in held-out problems only."""
    if max(a, b) <= MAX_TABLE_OPERAND:
        return False
    if operation != "-":
        a, b = sorted((a, b))
    digest = hashlib.blake2b(f"{a}{operation}{b}".encode(), key=_HASH_KEY, digest_size=4).digest()
    return int.from_bytes(digest) % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Sum:
    """Represents `a` `operation` `b`, computed as taught at school.

    A multiplication has a factor below 10 (`b`) and adds the products of tens and ones. Differences are never negative.
    """

    operation: Operation
    a: int
    b: int

    @property
    def value(self) -> int:
        """Return the result of the operation."""
        if self.operation == "+":
            return self.a + self.b
        return self.a - self.b if self.operation == "-" else self.a * self.b

    @property
    def partial_products(self) -> Sum | None:
        """Return the sum of the two partial products of a multiplication: 34 * 6 is 180 + 24.

        Returns None for other operations, and within the multiplication tables.
        """
        if self.operation != "*" or self.a < 10:
            return None
        return Sum("+", self.a // 10 * 10 * self.b, self.a % 10 * self.b)

    @property
    def expression(self) -> str:
        """Return the expression as text: "34 + 27"."""
        return f"{self.a} {self.operation} {self.b}"

    @property
    def solved_text(self) -> str:
        """Return the expression with its result: "34 + 27 = 61", or "34 * 6 = 180 + 24 = 204"."""
        intermediate_text = f"{self.partial_products.expression} = " if self.partial_products else ""
        return f"{self.expression} = {intermediate_text}{self.value}"

    @property
    def is_held_out(self) -> bool:
        """Return whether the combination appears in held-out problems only."""
        return is_held_out(self.operation, self.a, self.b)

    @property
    def is_trainable(self) -> bool:
        """Return whether training may use this sum, that is, whether `solved_text` has no held-out expression."""
        return not self.is_held_out and (self.partial_products is None or not self.partial_products.is_held_out)


def draw_main_operation(split: Split, make_candidate: Callable[[], Sum]) -> Sum:
    """Return the first candidate that may be a main operation.

    A main operation is held out for the split "heldout", and trainable for the split "train".
    """
    while True:
        candidate = make_candidate()
        if candidate.is_trainable if split == "train" else candidate.is_held_out:
            return candidate


def draw_step(split: Split, make_candidate: Callable[[], Sum]) -> Sum:
    """Return the first candidate that may be a further step. The split "train" requires a trainable candidate."""
    while True:
        candidate = make_candidate()
        if split == "heldout" or candidate.is_trainable:
            return candidate


def random_sum(rng: random.Random, operation: Operation, *, max_value: int) -> Sum:
    """Draw a sum of operands of at least 2 with no number above `max_value`.

    A multiplication has one operand of two digits and one of one digit, whatever `max_value` is.
    """
    if operation == "*":
        return Sum("*", rng.randint(11, 99), rng.randint(2, 9))
    total = rng.randint(4, max_value)
    part = rng.randint(2, total - 2)
    return Sum("+", part, total - part) if operation == "+" else Sum("-", total, part)


_PHRASINGS: dict[Operation, list[str]] = {
    "+": ["{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}"],
    "-": ["{a} - {b}", "{a} minus {b}", "the difference between {a} and {b}"],
    "*": ["{a} * {b}", "{a} times {b}", "the product of {a} and {b}"],
}
_QUESTION_TEMPLATES = [
    "What is {phrasing}?",
    "Work out {phrasing}.",
    "Find {phrasing}.",
    "How much is {phrasing}?",
    "Tell me {phrasing}.",
]
_OPERATIONS: list[Operation] = ["+", "-", "*"]
_OPERATION_PROBABILITIES = [0.45, 0.4, 0.15]
_TABLE_RATIO = 0.08


def short_problem(rng: random.Random, split: Split) -> Problem:
    """Generate a short problem: "What is 37 + 45?", "The answer is 82.".

    The answer to a multiplication shows the two partial products first.
    """
    operation = rng.choices(_OPERATIONS, _OPERATION_PROBABILITIES)[0]
    if split == "train" and rng.random() < _TABLE_RATIO:
        problem_sum = draw_main_operation(split, lambda: _draw_table_sum(rng, operation))
    else:
        max_value = 99 if rng.random() < 0.4 else 999
        problem_sum = draw_main_operation(split, lambda: random_sum(rng, operation, max_value=max_value))
    first_operand, second_operand = problem_sum.a, problem_sum.b
    if operation == "*" and rng.random() < 0.5:
        first_operand, second_operand = second_operand, first_operand
    phrasing = rng.choice(_PHRASINGS[operation]).format(a=first_operand, b=second_operand)
    working_text = f"{problem_sum.partial_products.expression}. " if problem_sum.partial_products else ""
    return Problem(
        rng.choice(_QUESTION_TEMPLATES).format(phrasing=phrasing),
        f"{working_text}The answer is {problem_sum.value}.",
        problem_sum.value,
        "short",
    )


def _draw_table_sum(rng: random.Random, operation: Operation) -> Sum:
    a, b = rng.randint(0, MAX_TABLE_OPERAND), rng.randint(0, 9 if operation == "*" else MAX_TABLE_OPERAND)
    return Sum(operation, max(a, b), min(a, b)) if operation == "-" else Sum(operation, a, b)
