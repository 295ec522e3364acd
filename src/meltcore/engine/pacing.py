"""How fast a very long prompt is read while others write.

A step budget is meant for many short prompts. One prompt of 200,000 tokens would fill it for dozens of steps, each ten
to thirty times as long as a step that only decodes, and everybody else's tokens would come at that pace. So such a
prompt is read in pieces that at most double the time of a step, by what steps were seen to take.

A piece has a price however small it is: kernels launched one by one instead of a graph, and with routed experts most of
their weights. Where even the smallest piece more than doubles a step, pieces are cut to take twice as long as that one,
so that half of what they cost is of use, and are read so seldom that the others still have half of the time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

# A step with a piece may take this many times as long as one without; pieces are cut for a little less.
SLOWDOWN = 2.0
AIM = 1.8
FIRST_PIECE, LEAST_PIECE = 256, 16  # tokens
# Steps without a piece: how many, the newest ones, tell what a step takes; and after how many steps there is another.
LOOKS, LOOK_EVERY = 3, 32


class Contents(NamedTuple):
    """Of a step: how many sequences decode in it, and its tokens of long prompts and of ordinary ones."""

    decodes: int
    piece: int
    others: int


class Pacer:
    """Allots tokens of long prompts to the steps that decode. `left` is what the step being planned may still hold."""

    def __init__(self, budget: int) -> None:
        """budget: tokens a step may hold at all."""
        self.left = budget
        self._budget = budget
        self._piece = min(FIRST_PIECE, budget)
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
        # Where steps are long anyway, because of ordinary prompts, a long one takes turns with them.
        self.left = min(self._budget, max(0 if rests else self._piece, self._others))

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
        aim_s = (AIM - 1) * self._step_s
        if self._least_seen > 1 and self._least_s > (SLOWDOWN - 1) * self._step_s:
            aim_s = 2 * self._least_s
        if added_s > aim_s or piece >= self._piece:
            fitting = int(piece * aim_s / max(added_s, 0.1 * self._step_s))
            self._piece = min(max(fitting, LEAST_PIECE), 2 * self._piece, self._budget)
