"""How fast a very long prompt is read while others write.

A step budget is meant for many short prompts. One prompt of 200,000 tokens would fill it for dozens of steps, each ten
to thirty times as long as a step that only decodes, and everybody else's tokens would come at that pace. So such a
prompt is read in pieces that at most double the time of a step, by what steps were seen to take.

A piece has a price however small it is: with routed experts, most of their weights. Where even a small piece more than
doubles a step, few large ones are read instead, of a tenth of a second each and so far apart that more than 99 of 100
steps are as short as without them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

# A step with a piece may take this many times as long as one without; pieces are cut for a little less.
SLOWDOWN = 2.0
AIM = 1.8
FIRST_PIECE, LEAST_PIECE = 256, 64  # tokens
# Where that more than doubles a step: what a piece may add to a step, and from one to the next so many steps.
LARGE_S, LARGE_EVERY = 0.1, 150
# Steps without a piece: how many, the newest ones, tell what a step takes; and after how many steps there is another.
LOOKS, LOOK_EVERY = 3, 32


class Contents(NamedTuple):
    """Of a step: how many sequences decode in it, and its tokens of long prompts and of ordinary ones."""

    decodes: int
    piece: int
    others: int


class _Piece:
    """How many tokens add so much time to a step."""

    def __init__(self, tokens: int, most: int, growth: int) -> None:
        """most: tokens; growth: how many times as large the next piece may be at most."""
        self.tokens = min(tokens, most)
        self._most = most
        self._growth = growth

    def fit(self, tokens: int, added_s: float, aim_s: float) -> None:
        """A piece of so many tokens added so much. A smaller one than this that fits says nothing."""
        if added_s > aim_s or tokens >= self.tokens:
            fitting = int(tokens * aim_s / max(added_s, 0.1 * aim_s))
            self.tokens = min(max(fitting, LEAST_PIECE), self._growth * self.tokens, self._most)


class Pacer:
    """Allots tokens of long prompts to the steps that decode. `left` is what the step being planned may still hold."""

    def __init__(self, budget: int) -> None:
        """budget: tokens a step may hold at all."""
        self.left = budget
        self._budget = budget
        self._piece = _Piece(FIRST_PIECE, budget, growth=2)
        self._large = _Piece(FIRST_PIECE, budget, growth=4)
        self._next_large = 0  # the first step that may have one
        self._least_s = math.inf  # what the smallest piece adds to a step, without what came between by chance
        self._least_seen = 0
        self._looks: deque[float] = deque(maxlen=LOOKS)
        self._step_s = 0.0  # of a step without a piece
        self._steps = 0
        self._credit_s = 0.0  # below 0: time that the others are owed
        self._others = 0

    def plan(self, *, decoding: bool) -> None:
        """A step is being planned; `decoding`: it holds sequences that decode."""
        self._steps += 1
        if not decoding:
            self.left = self._budget
            return
        rests = len(self._looks) < LOOKS or self._credit_s < 0 or self._steps % LOOK_EVERY == 0
        piece = 0 if rests else self._piece.tokens
        if self._seldom:
            piece = 0 if rests or self._steps < self._next_large else self._large.tokens
            if piece:
                self._next_large = self._steps + LARGE_EVERY
        # Where steps are long anyway, because of ordinary prompts, a long one takes turns with them.
        self.left = min(self._budget, max(piece, self._others))

    def planned(self, others: int) -> None:
        """The step being planned holds this many tokens of ordinary prompts."""
        self._others = others

    def note(self, took_s: float, step: Contents) -> None:
        """A step is over: the time it took, and what it held."""
        if step.others or not step.decodes:
            return  # its time says nothing of a piece's
        if not step.piece:
            self._looks.append(took_s)
            self._step_s = statistics.median(self._looks)  # one that was disturbed says nothing
        elif self._step_s:
            self._adapt(step.piece, took_s - self._step_s)
        self._credit_s = min(0.0, self._credit_s + SLOWDOWN * self._step_s - took_s)

    def _adapt(self, piece: int, added_s: float) -> None:
        """Cut pieces by what one of this size added to its step."""
        if piece <= LEAST_PIECE:
            self._least_s = min(self._least_s, added_s)
            self._least_seen += 1
        if self._seldom:
            self._large.fit(piece, added_s, LARGE_S)
        else:
            self._piece.fit(piece, added_s, (AIM - 1) * self._step_s)

    @property
    def _seldom(self) -> bool:
        """Whether even the smallest piece more than doubles a step."""
        return self._least_seen > 1 and self._least_s > (SLOWDOWN - 1) * self._step_s
