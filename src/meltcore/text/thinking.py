"""Models that may think before they answer: whether they do, and what of a text are thoughts.

Thoughts stand between two tokens that are no special ones, so skipping those would not hide them. A template writes the
first mark itself: a prompt that ends with it begins thoughts, one that ends with an empty pair an answer, whatever
blank text follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meltcore.text.tokenizer import Tokenizer

_BEGIN, _END = "<think>", "</think>"
# Model types (config.json) that think unless a template is told otherwise. Here they answer at once unless a request's
# chat_template_kwargs say otherwise, and what they think is kept apart from what they answer.
_THINKING_TYPES = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})


@dataclass(frozen=True)
class ThoughtMarks:
    """The two tokens around thoughts, which it iterates over, and the tokenizer that they are of."""

    begin: int
    end: int
    tokenizer: Tokenizer

    def __iter__(self) -> Iterator[int]:
        return iter((self.begin, self.end))

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: Mapping[str, Any]) -> ThoughtMarks | None:
        """None where the family of this config.json does not think, or the tokenizer has no such tokens."""
        begin, end = tokenizer.token_id(_BEGIN), tokenizer.token_id(_END)
        if config.get("model_type") not in _THINKING_TYPES or begin is None or end is None:
            return None
        return cls(begin, end, tokenizer)

    def left_open(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends where thoughts begin: with the first mark, but for blank text."""
        for token_id in reversed(prompt):
            if not self._is_blank(token_id):
                return token_id == self.begin
        return False

    def _is_blank(self, token_id: int) -> bool:
        return self.tokenizer.piece(token_id).decode(errors="replace").isspace()


def template_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template of a model with this config.json is told unless a request says otherwise."""
    return {"enable_thinking": False} if config.get("model_type") in _THINKING_TYPES else {}
