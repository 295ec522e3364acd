"""How lm-evaluation-harness 0.4 marks an answer to `gsm8k_cot` (task version 3.0), number by number.

The rules are kept as they are, with their corners, because a share is comparable only when every item is marked alike:
strict asks for one character after the number ("The answer is 18" without a stop reads as 1), and flexible takes the
last run of two or more of `$ 0-9 . ,`, which may be an ellipsis.
"""

from __future__ import annotations

import re

NOTHING = "[invalid]"

_STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# Left out of both sides before they are compared, one after another.
_IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


def strict(text: str) -> str:
    """The number after the first "The answer is", or NOTHING."""
    found = _STRICT.search(text)
    return found[1] if found else NOTHING


def flexible(text: str) -> str:
    """The last thing in `text` that looks like a number, or NOTHING."""
    last = NOTHING
    for found in _FLEXIBLE.finditer(text):
        last = found[0]
    return last


def exact_match(extracted: str, reference: str) -> bool:
    """Whether both are the same text once commas, dollar signs, a final stop and case are left out."""
    return _plain(extracted) == _plain(reference)


def _plain(text: str) -> str:
    for ignored in _IGNORED:
        text = ignored.sub("", text)
    return text.lower()
