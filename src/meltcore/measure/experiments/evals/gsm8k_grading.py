"""Grades answers to GSM8K exactly as `gsm8k_cot` of lm-evaluation-harness 0.4 does (task version 3.0).

The corner cases of the rules are kept, because an accuracy is comparable only if every item is graded alike. Strict
extraction requires one character after the number: "The answer is 18" without a full stop reads as 1. Flexible
extraction takes the last run of two or more of `$ 0-9 . ,`, which may be an ellipsis.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from meltcore.measure.experiments.evals.gsm8k_data import Item
from meltcore.measure.experiments.servers.api import Answer

INVALID = "[invalid]"

_STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# Removed from both sides before they are compared, one after another.
_IGNORED_PATTERNS = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


class GradedAnswer(NamedTuple):
    """Holds one item's answer and its two grades. A failed request is incorrect by both."""

    item: Item
    answer: Answer
    strict_correct: bool
    flexible_correct: bool

    @property
    def grades(self) -> dict[str, bool]:
        """Return both grades by the name of their extraction."""
        return {"strict": self.strict_correct, "flexible": self.flexible_correct}


def grade(item: Item, answer: Answer) -> GradedAnswer:
    """Grade one answer by strict and by flexible extraction."""
    if answer.failed:
        return GradedAnswer(item, answer, strict_correct=False, flexible_correct=False)
    extracted_numbers = (extract_strict(answer.text), extract_flexible(answer.text))
    return GradedAnswer(item, answer, *(exact_match(extracted, item.reference) for extracted in extracted_numbers))


def extract_strict(text: str) -> str:
    """Return the number after the first "The answer is", or INVALID."""
    match = _STRICT.search(text)
    return match[1] if match else INVALID


def extract_flexible(text: str) -> str:
    """Return the last run of digits, dollar signs, points and commas in `text`, or INVALID."""
    last_number = INVALID
    for match in _FLEXIBLE.finditer(text):
        last_number = match[0]
    return last_number


def exact_match(extracted: str, reference: str) -> bool:
    """Return whether both texts are equal, ignoring commas, dollar signs, a final full stop and upper or lower case."""
    return _normalize(extracted) == _normalize(reference)


def _normalize(text: str) -> str:
    for pattern in _IGNORED_PATTERNS:
        text = pattern.sub("", text)
    return text.lower()
