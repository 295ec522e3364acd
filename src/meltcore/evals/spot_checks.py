"""Sums asked among the requests of a throughput level: a server that answers fast but wrongly is found out."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LARGEST = 99


@dataclass(frozen=True)
class SpotCheck:
    """`question` does not contain `value`, so that an echo of it is no answer."""

    question: str
    value: int

    def passes(self, text: str) -> bool:
        """Whether any number in `text` is the value; models write the sum in many ways, with working and without."""
        return any(float(found.replace(",", "")) == self.value for found in _NUMBER.findall(text))


def draw(rng: random.Random) -> SpotCheck:
    """A sum or a difference of two-digit numbers, drawn anew each time: a list of known ones could be learnt."""
    while True:
        a, b = sorted((rng.randint(2, _LARGEST), rng.randint(2, _LARGEST)), reverse=True)
        sign = rng.choice("+-")
        value = a + b if sign == "+" else a - b
        if value not in (a, b):
            return SpotCheck(f"What is {a} {sign} {b}?", value)
