"""One arithmetic problem, and how a reply to it is marked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

_ANSWER = re.compile(r"The answer is\s*(-?\d[\d,]*)")


@dataclass(frozen=True)
class Problem:
    """`question` is the user's message; `answer` the worked text, ending "The answer is 42."; `value` the number in it.

    `kind` is "short" (a plain sum), "medium" (a story of several steps) or "long" (a page of facts, then a question).
    """

    question: str
    answer: str
    value: int
    kind: str


def extract_answer(text: str) -> int | None:
    """The number after the last "The answer is", thousands commas allowed; None where there is none."""
    found = _ANSWER.findall(text)
    return int(found[-1].replace(",", "")) if found else None


def is_right(problem: Problem, text: str) -> bool:
    """Whether a reply states the problem's number. The working before it is not marked."""
    return extract_answer(text) == problem.value
