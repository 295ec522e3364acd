"""Defines which models write reasoning before an answer, and which part of a text is reasoning.

Reasoning stands between a start and an end token. Neither is special, so skipping special tokens does not hide them. A
chat template may write the start token: a prompt that ends with it starts reasoning, as DeepSeek-R1's does. A prompt
that ends with start and end token starts the answer, whatever whitespace follows.

A model reasons if its type is listed here, or if its chat template contains one of the tokens. A template uses a token
to begin an answer, or to drop the reasoning of earlier answers. So models that were trained on the answers of a
reasoning model are recognized by their templates, whatever their type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meltcore.text.chat_template import ChatTemplate, MissingTemplate
from meltcore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReasoningFormat:
    """Describes how a model family writes reasoning.

    `template_defaults` are variables of its chat template. They turn reasoning off unless a request's
    chat_template_kwargs turn it on.
    """

    start_token: str
    end_token: str
    template_defaults: Mapping[str, Any]


_THINK_FORMAT = ReasoningFormat("<think>", "</think>", {"enable_thinking": False})
# By the model type in config.json.
REASONING_FORMATS: dict[str, ReasoningFormat] = dict.fromkeys(
    ("qwen3", "qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text", "smollm3"), _THINK_FORMAT
)


@dataclass(frozen=True)
class ReasoningParser:
    """Holds the two tokens around a model's reasoning."""

    start_id: int
    end_id: int
    tokenizer: Tokenizer

    def starts_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the start token, apart from whitespace."""
        for token_id in reversed(prompt):
            if not self.tokenizer.token_bytes(token_id).decode(errors="replace").isspace():
                return token_id == self.start_id
        return False


def reasoning_parser(
    tokenizer: Tokenizer, config: Mapping[str, Any], template: ChatTemplate | MissingTemplate
) -> ReasoningParser | None:
    """Return the reasoning parser for the model of a config.json with a chat template.

    Returns None if the model writes no reasoning, or if its tokenizer lacks the tokens around the reasoning.
    """
    reasoning_format = REASONING_FORMATS.get(config.get("model_type", ""), _THINK_FORMAT)
    is_listed = config.get("model_type", "") in REASONING_FORMATS
    marks = reasoning_format.start_token, reasoning_format.end_token
    if not is_listed and not any(mark in template.source for mark in marks):
        return None
    start_id, end_id = tokenizer.token_id(reasoning_format.start_token), tokenizer.token_id(reasoning_format.end_token)
    return None if start_id is None or end_id is None else ReasoningParser(start_id, end_id, tokenizer)


def template_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return default variables of the model's chat template, which a request may change."""
    reasoning_format = REASONING_FORMATS.get(config.get("model_type", ""))
    return {} if reasoning_format is None else dict(reasoning_format.template_defaults)
