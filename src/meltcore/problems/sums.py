"""One operation on two numbers, and the rule that keeps some of them out of training.

A combination is an operation with its two operands, in either order for + and *. A keyed hash of it decides whether
it is held out: one in five is, and no training text shows it, not even as a step. Sums within 20 are the tables
every pupil learns: they have too few neighbours to be worked out from, so they are always training. The hash has no
seed to choose: the split is the same for everybody.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from meltcore.problems.problem import Split

Operation = Literal["+", "-", "*"]

_KEY = b"meltcore sums"
_ONE_IN = 5
TABLES_TO = 20


def is_held_out(operation: Operation, a: int, b: int) -> bool:
    """Whether the combination appears in held-out problems only."""
    if max(a, b) <= TABLES_TO:
        return False
    if operation != "-":
        a, b = sorted((a, b))
    digest = hashlib.blake2b(f"{a}{operation}{b}".encode(), key=_KEY, digest_size=4).digest()
    return int.from_bytes(digest) % _ONE_IN == 0


@dataclass(frozen=True)
class Sum:
    """`a` `operation` `b`, worked as a pupil would: a product is taken tens and ones apart, then added.

    Products take one factor below 10 (`b`); differences are never negative.
    """

    operation: Operation
    a: int
    b: int

    @property
    def value(self) -> int:
        if self.operation == "+":
            return self.a + self.b
        return self.a - self.b if self.operation == "-" else self.a * self.b

    @property
    def parts(self) -> Sum | None:
        """Of a product beyond the tables, the sum of its tens and its ones: 34 * 6 is 180 + 24."""
        if self.operation != "*" or self.a < 10:
            return None
        return Sum("+", self.a // 10 * 10 * self.b, self.a % 10 * self.b)

    @property
    def text(self) -> str:
        return f"{self.a} {self.operation} {self.b}"

    @property
    def worked(self) -> str:
        """ "34 + 27 = 61", or "34 * 6 = 180 + 24 = 204"."""
        between = f"{self.parts.text} = " if self.parts else ""
        return f"{self.text} = {between}{self.value}"

    @property
    def held_out(self) -> bool:
        return is_held_out(self.operation, self.a, self.b)

    @property
    def trainable(self) -> bool:
        """Whether no expression in the worked text is held out."""
        return not self.held_out and (self.parts is None or not self.parts.held_out)


def draw_main(split: Split, propose: Callable[[], Sum]) -> Sum:
    """The first proposal that may be a problem's main operation: held out for "heldout", trainable for "train"."""
    while True:
        proposed = propose()
        if proposed.trainable if split == "train" else proposed.held_out:
            return proposed


def draw_step(split: Split, propose: Callable[[], Sum]) -> Sum:
    """The first proposal that may be a further step: any for "heldout", trainable for "train"."""
    while True:
        proposed = propose()
        if split == "heldout" or proposed.trainable:
            return proposed


def random_sum(rng: random.Random, operation: Operation, *, largest: int) -> Sum:
    """Operands from 2 up, no number above `largest`; a product is two digits by one."""
    if operation == "*":
        return Sum("*", rng.randint(11, 99), rng.randint(2, 9))
    whole = rng.randint(4, largest)
    part = rng.randint(2, whole - 2)
    return Sum("+", part, whole - part) if operation == "+" else Sum("-", whole, part)
