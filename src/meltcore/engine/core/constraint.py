"""Represents the grammar that the answer of one request follows, and the table of masks of an engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from meltcore.protocol.sampling_params import Grammar

_TICKET_SHIFT = 32


class MaskTable(NamedTuple):
    """The masks of the next tokens of running requests, by row of the model runner, in memory that a GPU reads.

    A ticket names one token of one request. It is never 0.

    Args:
        masks: [rows * tokens, words] int32, a bit for each token id. A row has the mask of its next token, and one for
            the token after each draft.
        filled: [rows] int64, which the host writes: the ticket of the token whose mask is in the row. A negative ticket
            means that the token needs no mask.
        outcomes: [2, rows] int64, which the device writes for each sampled token, at the parity of its number: its
            ticket, which is negative if the token was sampled without a mask.
    """

    masks: np.ndarray
    filled: np.ndarray
    outcomes: np.ndarray

    @property
    def masks_per_row(self) -> int:
        """The number of tokens for which a row has masks."""
        return len(self.masks) // len(self.filled)


class Constraint:
    """The grammar of one request and its state.

    `num_taken` counts the sampled tokens that the host has taken. `filling` is the newest task that fills a mask, and
    `is_filling` says whether it still uses the matcher. `is_slow` is True if that took long for it, or for a mask that
    was filled together with it. `is_over` is True when the grammar allows no further token,
    or has failed. `failure` is why no mask could be filled. Masks are also filled for the tokens after `drafts`.
    """

    def __init__(self, matcher: LLMatcher, grammar: Grammar, arrival: int = 0) -> None:
        """Create the state of an answer without tokens. No other request of the engine has the same `arrival`."""
        self.matcher = matcher
        self._first_ticket = arrival << _TICKET_SHIFT
        self.num_taken = 0
        self.rows = [0, 0]  # of the runner, in which the tokens of even and odd numbers were last sampled
        self.filling: Future[None] | None = None
        self.is_filling = self.is_slow = self.is_over = False
        self.failure: str | None = None
        self.drafts: tuple[int, ...] = ()
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

    def ticket(self, number: int) -> int:
        """Return the ticket of the request's generated token of this number, counted from 1."""
        return self._first_ticket + number

    def checkable(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first drafts, up to one after which the grammar would begin, or the reasoning."""
        mark = self._end_id if self._is_reasoning else self.optional_id
        return drafts[: drafts.index(mark)] if mark in drafts else drafts

    def takes(self, token_id: int) -> bool:
        """Handle a sampled token. Returns whether it belongs to the grammar and not to the reasoning before it."""
        self.num_taken += 1
        if self._is_reasoning:
            self._is_reasoning = token_id != self._end_id
            return False
        self._is_reasoning, self.optional_id = token_id == self.optional_id, None
        return not self._is_reasoning
