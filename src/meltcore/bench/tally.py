"""Counting: what was sent, what came back and when. Nothing that the engine says of itself enters here but the tokens
and the time of each step.

Kept by request in flat arrays and updated a step at a time: at 60,000 tokens a second and eight GPUs, one Python object
a token would be too much work.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from meltcore.bench.engine_process import EngineError
from meltcore.bench.lines import Step


@dataclass(frozen=True, kw_only=True)
class Window:
    """Everything that happened after `start_s` and up to `end_s`, both times of steps.

    From one step to another, so that a rate is not off by the part of a step that a clock would cut.

    `ttft_s` [requests whose first token came], `itl_s` [later tokens], `e2e_s` [requests that ended]. `prompt_tokens`
    are of the requests whose first token came. `waiting`: sent, and without a token at the end.
    """

    start_s: float
    end_s: float
    output_tokens: int
    prompt_tokens: int
    finished: int
    waiting: int
    ttft_s: np.ndarray
    itl_s: np.ndarray
    e2e_s: np.ndarray

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Tally:
    """One level's requests, numbered from 0 in the order they were sent."""

    def __init__(self, output_tokens: int) -> None:
        self._wanted = output_tokens
        self._size = 0
        self._sent_s = np.zeros(1024)
        self._prompt = np.zeros(1024, dtype=np.int64)
        self._count = np.zeros(1024, dtype=np.int64)
        self._first_s = np.zeros(1024)
        self._last_s = np.zeros(1024)
        self._ended_s = np.full(1024, np.inf)
        self._step_s = array("d")
        self._step_tokens = array("q")
        self._gaps: list[np.ndarray] = []
        self._gap_ends: list[float] = []
        self.finished = 0

    @property
    def sent(self) -> int:
        return self._size

    def send(self, prompt_tokens: int, sent_s: float) -> int:
        """Note one request and return its number."""
        number = self._size
        if number == len(self._sent_s):
            self._grow()
        self._sent_s[number], self._prompt[number] = sent_s, prompt_tokens
        self._size += 1
        return number

    def take(self, step: Step) -> int:
        """Count a step; how many requests it ended.

        Raises EngineError where the step cannot be true: tokens for a request that was never sent or is over, too
        many or too few of them, time that runs backwards.
        """
        if self._step_s and step.t_s < self._step_s[-1]:
            raise EngineError(f"the engine dated a step {self._step_s[-1] - step.t_s:.3f} s before the one before it")
        if step.ids:
            self._take_tokens(step)
        for number, reason in step.ended:
            self._check_end(number, reason)
            self._ended_s[number] = step.t_s
        self.finished += len(step.ended)
        return len(step.ended)

    def open(self) -> list[int]:
        """The requests that are not over."""
        return [int(number) for number in np.flatnonzero(np.isinf(self._ended_s[: self._size]))]

    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """(times, tokens) of every step that brought tokens."""
        return np.array(self._step_s), np.array(self._step_tokens)

    def window(self, start_s: float, end_s: float) -> Window:
        def within(times: np.ndarray) -> np.ndarray:
            return (times > start_s) & (times <= end_s)

        times, tokens = self.steps()
        known = slice(self._size)
        sent, first, ended = self._sent_s[known], self._first_s[known], self._ended_s[known]
        answered, over = within(first), within(ended)
        gaps = [gap for gap, at in zip(self._gaps, self._gap_ends, strict=True) if start_s < at <= end_s]
        return Window(
            start_s=start_s,
            end_s=end_s,
            output_tokens=int(tokens[within(times)].sum()),
            prompt_tokens=int(self._prompt[known][answered].sum()),
            finished=int(over.sum()),
            waiting=int(((sent <= end_s) & ((first == 0) | (first > end_s))).sum()),
            ttft_s=(first - sent)[answered],
            itl_s=np.concatenate(gaps) if gaps else np.zeros(0),
            e2e_s=(ended - sent)[over],
        )

    def _take_tokens(self, step: Step) -> None:
        ids = np.array(step.ids)
        new = np.array([len(tokens) for tokens in step.tokens])
        if len(ids) != len(new) or len(set(step.ids)) != len(ids) or new.min() < 1:
            raise EngineError(f"the engine's step at {step.t_s:.3f} does not hold one list of tokens for each request")
        if ids.min() < 0 or ids.max() >= self._size:
            strange = next(number for number in step.ids if not 0 <= number < self._size)
            raise EngineError(f"the engine gave tokens for request {strange}, which was never sent")
        over = np.isfinite(self._ended_s[ids])
        if over.any():
            raise EngineError(f"the engine gave tokens for request {ids[over][0]}, which had ended")
        if (self._sent_s[ids] > step.t_s).any():
            raise EngineError("the engine dated a token before its request was sent")
        before = self._count[ids]
        fresh = before == 0
        self._first_s[ids[fresh]] = step.t_s
        if (before + new > self._wanted).any():
            raise EngineError(f"the engine gave more than {self._wanted} tokens for one request")
        # Tokens that came together share the gap before them.
        gaps = (step.t_s - self._last_s[ids[~fresh]]) / new[~fresh]
        self._gaps.append(np.repeat(gaps, new[~fresh]))
        self._gap_ends.append(step.t_s)
        self._last_s[ids] = step.t_s
        self._count[ids] = before + new
        self._step_s.append(step.t_s)
        self._step_tokens.append(int(new.sum()))

    def _check_end(self, number: int, reason: str) -> None:
        if not 0 <= number < self._size or np.isfinite(self._ended_s[number]):
            raise EngineError(f"the engine ended request {number}, which was not running")
        got = int(self._count[number])
        if reason != "length" or got != self._wanted:
            raise EngineError(
                f"request {number} ended ({reason}) after {got} tokens; each must give exactly {self._wanted}"
            )

    def _grow(self) -> None:
        for name in ("_sent_s", "_prompt", "_count", "_first_s", "_last_s", "_ended_s"):
            old = getattr(self, name)
            new = np.full(2 * len(old), np.inf) if name == "_ended_s" else np.zeros(2 * len(old), dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
