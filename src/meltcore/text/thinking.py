"""Models that may think before they answer: whether they do, and what of a text are thoughts.

Thoughts stand between two tokens that are no special ones, so skipping those would not hide them. A template writes the
first mark itself: a prompt that ends with it begins thoughts, one that ends with an empty pair an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meltcore.text.tokenizer import Tokenizer

_BEGIN, _END = "<think>", "</think>"
# Model types (config.json) that think unless a template is told otherwise. Here they answer at once unless a request's
# chat_template_kwargs say otherwise, and what they think is kept apart from what they answer.
_THINKING_TYPES = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})
# Behind the mark a template may write a token of blank.
_MARK_WITHIN = 2


class ThoughtMarks(NamedTuple):
    """The tokens around thoughts."""

    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: Mapping[str, Any]) -> ThoughtMarks | None:
        """None where the family of this config.json does not think, or the tokenizer has no such tokens."""
        begin, end = tokenizer.token_id(_BEGIN), tokenizer.token_id(_END)
        if config.get("model_type") not in _THINKING_TYPES or begin is None or end is None:
            return None
        return cls(begin, end)

    def left_open(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends where thoughts begin."""
        tail = prompt[-_MARK_WITHIN:]
        return self.begin in tail and self.end not in tail


def template_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template of a model with this config.json is told unless a request says otherwise."""
    return {"enable_thinking": False} if config.get("model_type") in _THINKING_TYPES else {}
