"""Limits the prefill of very long prompts while other sequences decode.

A step's token budget is meant for many short prompts. One prompt of 200,000 tokens would fill it for dozens of steps,
each 10 to 30 times as long as a step that only decodes. All other sequences would receive tokens only as often. So such
a prompt is prefilled in chunks that at most double the time of a step, by the measured times of earlier steps.

A chunk has a minimum cost: with routed experts it reads most of their weights, however small it is. When even a small
chunk more than doubles a step, few large chunks of 0.1 s run instead. They are so far apart that more than 99 of 100
steps are as short as without them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

# A step with a chunk may take this many times as long as one without; chunks are sized for a little less.
MAX_SLOWDOWN = 2.0
TARGET_SLOWDOWN = 1.8
FIRST_CHUNK, MIN_CHUNK = 256, 64  # tokens
# The fewest prompt tokens to which a step is limited for the sake of other engines: fewer cost hardly less time.
MIN_LIMIT = 256
# When the smallest chunk more than doubles a step: the time a chunk may add, and the steps from one chunk to the next.
LARGE_CHUNK_ADDED_S, LARGE_CHUNK_INTERVAL_STEPS = 0.1, 150
# The step time without a chunk is the median of STEP_SAMPLES such steps. A step without a chunk runs at least once in
# SAMPLE_EVERY steps, so that the time stays up to date.
STEP_SAMPLES, SAMPLE_EVERY = 3, 32


class StepContents(NamedTuple):
    """The contents of a step: the number of decoding sequences, and the tokens of long and of ordinary prompts."""

    decodes: int
    long_tokens: int
    ordinary_tokens: int


class PromptSpeed:
    """Estimates from the times of earlier steps how many prompt tokens a step of a given time may have."""

    def __init__(self, budget: int) -> None:
        """Start without a measurement. A step has at most `budget` tokens."""
        self._budget = budget
        self._s_per_token: float | None = None

    def record(self, took_s: float, tokens: int) -> None:
        """Record the time of a step with `tokens` prompt tokens.

        Steps with few prompt tokens are ignored, since their time depends mostly on other work.
        """
        if tokens >= min(MIN_LIMIT, self._budget):
            speed = took_s / tokens
            self._s_per_token = speed if self._s_per_token is None else (self._s_per_token + speed) / 2

    def tokens_in(self, limit_s: float) -> int:
        """Return the number of prompt tokens for a step that is limited to `limit_s` seconds.

        Before any measurement this is an eighth of the token budget.
        """
        tokens = self._budget // 8 if self._s_per_token is None else int(limit_s / self._s_per_token)
        return min(max(tokens, MIN_LIMIT), self._budget)


class _ChunkSize:
    """Estimates how many tokens a chunk may have to add a given time to a step."""

    def __init__(self, tokens: int, max_tokens: int, growth: int) -> None:
        """Start with a size of `tokens`.

        It is at most `max_tokens`, and grows at most by the factor `growth` at a time.
        """
        self.tokens = min(tokens, max_tokens)
        self._max_tokens = max_tokens
        self._step_growth = growth

    def fit(self, tokens: int, added_s: float, target_s: float) -> None:
        """Adapt the size after a chunk of `tokens` tokens added `added_s` to its step.

        A smaller chunk that met the target time is ignored.
        """
        if added_s > target_s or tokens >= self.tokens:
            num_fitting = int(tokens * target_s / max(added_s, 0.1 * target_s))
            self.tokens = min(max(num_fitting, MIN_CHUNK), self._step_growth * self.tokens, self._max_tokens)


class Pacer:
    """Allots tokens of long prompts to steps with decodes. The current step may take `tokens_left` more of them."""

    def __init__(self, budget: int) -> None:
        """Start with the full token budget. A step has at most `budget` tokens."""
        self.tokens_left = budget
        self._budget = budget
        self._chunk = _ChunkSize(FIRST_CHUNK, budget, growth=2)
        self._large_chunk = _ChunkSize(FIRST_CHUNK, budget, growth=4)
        self._next_large_step = 0  # the first step that may hold one
        self._min_added_s = math.inf  # the least time that a smallest chunk added: without random delays
        self._min_chunks_seen = 0
        self._step_samples: deque[float] = deque(maxlen=STEP_SAMPLES)
        self._step_s = 0.0  # of a step without a chunk
        self._steps = 0
        self._delay_credit_s = 0.0  # below 0: time by which the other sequences are behind
        self._ordinary_tokens = 0

    def begin(self, *, is_decoding: bool) -> None:
        """Start to schedule a step. `is_decoding` says whether it has decoding sequences."""
        self._steps += 1
        if not is_decoding:
            self.tokens_left = self._budget
            return
        skips_chunk = (
            len(self._step_samples) < STEP_SAMPLES or self._delay_credit_s < 0 or self._steps % SAMPLE_EVERY == 0
        )
        chunk = 0 if skips_chunk else self._chunk.tokens
        if self._is_sparse:
            chunk = 0 if skips_chunk or self._steps < self._next_large_step else self._large_chunk.tokens
            if chunk:
                self._next_large_step = self._steps + LARGE_CHUNK_INTERVAL_STEPS
        # When ordinary prompts make steps long anyway, a long one gets as many tokens as they had in the last step.
        self.tokens_left = min(self._budget, max(chunk, self._ordinary_tokens))

    def end(self, ordinary_tokens: int) -> None:
        """Finish the scheduling of a step, which has `ordinary_tokens` tokens of ordinary prompts."""
        self._ordinary_tokens = ordinary_tokens

    def record(self, took_s: float, step: StepContents) -> None:
        """Update the estimates by the time and the contents of a finished step."""
        if step.ordinary_tokens or not step.decodes:
            return  # its time says nothing about a chunk's
        if not step.long_tokens:
            self._step_samples.append(took_s)
            self._step_s = statistics.median(self._step_samples)  # ignores a single disturbed step
        elif self._step_s:
            self._adapt(step.long_tokens, took_s - self._step_s)
        self._delay_credit_s = min(0.0, self._delay_credit_s + MAX_SLOWDOWN * self._step_s - took_s)

    def _adapt(self, tokens: int, added_s: float) -> None:
        """Adapt the chunk size to the time that a chunk of `tokens` added to its step."""
        if tokens <= MIN_CHUNK:
            self._min_added_s = min(self._min_added_s, added_s)
            self._min_chunks_seen += 1
        if self._is_sparse:
            self._large_chunk.fit(tokens, added_s, LARGE_CHUNK_ADDED_S)
        else:
            self._chunk.fit(tokens, added_s, (TARGET_SLOWDOWN - 1) * self._step_s)

    @property
    def _is_sparse(self) -> bool:
        """Whether even the smallest chunk more than doubles the time of a step."""
        return self._min_chunks_seen > 1 and self._min_added_s > (MAX_SLOWDOWN - 1) * self._step_s
