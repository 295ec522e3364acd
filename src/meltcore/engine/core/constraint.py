"""Represents the grammar that the answer of one request follows."""

from __future__ import annotations

from concurrent.futures import Future

from llguidance import LLMatcher

from meltcore.protocol.sampling_params import Grammar


class Constraint:
    """The grammar of one request and its state.

    `mask_row` is the row of the mask of the next token, or 0 while every token is allowed. `is_over` is True when the
    grammar allows no further token, or has failed.
    """

    def __init__(self, matcher: LLMatcher, grammar: Grammar) -> None:
        self.matcher = matcher
        self.mask_row = 0
        self.filling: Future[None] | None = None  # of the mask in `mask_row`
        self.is_over = False
        self._is_reasoning = grammar.starts_in_reasoning
        ids = grammar.reasoning_ids
        self._end_id = None if ids is None else ids[1]
        self.optional_id = (
            None if ids is None or self._is_reasoning else ids[0]
        )  # may begin the reasoning instead of the answer

    @property
    def needs_mask(self) -> bool:
        """Whether the grammar limits the next token."""
        return not (self._is_reasoning or self.is_over)

    def is_ready(self, row: int) -> bool:
        """Return whether the next token of a sequence in this row can be sampled."""
        return not self.needs_mask or (self.mask_row == row and self.filling is not None and self.filling.done())

    def takes(self, token_id: int) -> bool:
        """Handle a sampled token. Returns whether it belongs to the grammar and not to the reasoning before it."""
        self.mask_row, self.filling = 0, None
        if self._is_reasoning:
            self._is_reasoning = token_id != self._end_id
            return False
        self._is_reasoning, self.optional_id = token_id == self.optional_id, None
        return not self._is_reasoning
