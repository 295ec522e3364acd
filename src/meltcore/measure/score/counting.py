"""Counts requests and tokens, and turns the counts into a level's numbers.

The input is the time and the tokens of each step, as the engine reports them. The counts are flat arrays, updated once
per step: at 60,000 tokens per second and eight GPUs, one Python object per token would be too slow.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meltcore.measure.documents.score import ScoreLevel, Spread
from meltcore.measure.documents.values.percentiles import distribution
from meltcore.measure.score.engine_process import EngineError
from meltcore.protocol.json_lines import StepLine

# The sustained run takes the lowest level within 1 % of the best: more concurrent requests would only wait longer.
_NEAR_BEST_FRACTION = 0.99
_MS = 1000.0
_BUCKET_S = 10.0
_MIN_BUCKETS = 6  # with fewer, a third would be a single bucket
# The boost clock of a GPU that warms up falls by two or three steps of 15 MHz in 1,980; this limit is above that.
DRIFT_LIMIT = 0.03


@dataclass(frozen=True, kw_only=True)
class LevelWindow:
    """Token counts, request counts and latencies of a level within (`start_s`, `end_s`].

    `start_s` and `end_s` are ends of steps, so that no partial step distorts a rate. `ttft_s` has one value per request
    that got its first token in the window, `itl_s` one per later token, and `e2e_s` one per finished request.
    `prompt_tokens` belong to requests that got their first token. `waiting` requests had no token at the end.
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
        """The length of the window."""
        return self.end_s - self.start_s


class StepCounter:
    """Counts the tokens and times of one level's requests. Request ids count from 0 in the order of sending."""

    def __init__(self, output_tokens: int) -> None:
        self._expected = output_tokens
        self._size = 0
        self._sent_s = np.zeros(1024)
        self._prompt = np.zeros(1024, dtype=np.int64)
        self._count = np.zeros(1024, dtype=np.int64)
        self._first_s = np.zeros(1024)
        self._last_s = np.zeros(1024)
        self._ended_s = np.full(1024, np.inf)
        self._step_s = array("d")
        self._step_tokens = array("q")
        self._intervals: list[np.ndarray] = []
        self._interval_ends: list[float] = []
        self.finished = 0

    @property
    def num_sent(self) -> int:
        """The number of requests sent."""
        return self._size

    def send(self, prompt_tokens: int, sent_s: float) -> int:
        """Record that a request was sent, and return its id."""
        request_id = self._size
        if request_id == len(self._sent_s):
            self._grow()
        self._sent_s[request_id], self._prompt[request_id] = sent_s, prompt_tokens
        self._size += 1
        return request_id

    def add(self, step: StepLine) -> int:
        """Count the tokens of a step. Return the number of requests that ended with it.

        Raises EngineError for an impossible step: tokens for a request that was never sent or has ended, too many or
        too few tokens, or a time before the previous step.
        """
        if self._step_s and step.t_s < self._step_s[-1]:
            raise EngineError(f"the engine dated a step {self._step_s[-1] - step.t_s:.3f} s before the one before it")
        if step.ids:
            self._add_tokens(step)
        for request_id, reason in step.finish_reasons:
            self._check_end(request_id, reason)
            self._ended_s[request_id] = step.t_s
        self.finished += len(step.finish_reasons)
        return len(step.finish_reasons)

    def open(self) -> list[int]:
        """Return the ids of the requests that have not ended."""
        return [int(request_id) for request_id in np.flatnonzero(np.isinf(self._ended_s[: self._size]))]

    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the times and token counts of all steps with tokens."""
        return np.array(self._step_s), np.array(self._step_tokens)

    def window(self, start_s: float, end_s: float) -> LevelWindow:
        """Return the counts in (`start_s`, `end_s`]."""

        def in_window(times: np.ndarray) -> np.ndarray:
            return (times > start_s) & (times <= end_s)

        times, tokens = self.steps()
        sent_slice = slice(self._size)
        sent_s, first_token_s, ended_s = self._sent_s[sent_slice], self._first_s[sent_slice], self._ended_s[sent_slice]
        has_first_token, is_finished = in_window(first_token_s), in_window(ended_s)
        intervals = [
            intervals_of_step
            for intervals_of_step, end_of_step_s in zip(self._intervals, self._interval_ends, strict=True)
            if start_s < end_of_step_s <= end_s
        ]
        return LevelWindow(
            start_s=start_s,
            end_s=end_s,
            output_tokens=int(tokens[in_window(times)].sum()),
            prompt_tokens=int(self._prompt[sent_slice][has_first_token].sum()),
            finished=int(is_finished.sum()),
            waiting=int(((sent_s <= end_s) & ((first_token_s == 0) | (first_token_s > end_s))).sum()),
            ttft_s=(first_token_s - sent_s)[has_first_token],
            itl_s=np.concatenate(intervals) if intervals else np.zeros(0),
            e2e_s=(ended_s - sent_s)[is_finished],
        )

    def _add_tokens(self, step: StepLine) -> None:
        ids = np.array(step.ids)
        num_new_tokens = np.array([len(tokens) for tokens in step.tokens])
        if len(ids) != len(num_new_tokens) or len(set(step.ids)) != len(ids) or num_new_tokens.min() < 1:
            raise EngineError(f"the engine's step at {step.t_s:.3f} does not hold one list of tokens for each request")
        if ids.min() < 0 or ids.max() >= self._size:
            unknown = next(request_id for request_id in step.ids if not 0 <= request_id < self._size)
            raise EngineError(f"the engine gave tokens for request {unknown}, which was never sent")
        has_ended = np.isfinite(self._ended_s[ids])
        if has_ended.any():
            raise EngineError(f"the engine gave tokens for request {ids[has_ended][0]}, which had ended")
        if (self._sent_s[ids] > step.t_s).any():
            raise EngineError("the engine dated a token before its request was sent")
        num_tokens_before = self._count[ids]
        is_first = num_tokens_before == 0
        self._first_s[ids[is_first]] = step.t_s
        if (num_tokens_before + num_new_tokens > self._expected).any():
            raise EngineError(f"the engine gave more than {self._expected} tokens for one request")
        # Tokens that came together divide the time before them.
        intervals = (step.t_s - self._last_s[ids[~is_first]]) / num_new_tokens[~is_first]
        self._intervals.append(np.repeat(intervals, num_new_tokens[~is_first]))
        self._interval_ends.append(step.t_s)
        self._last_s[ids] = step.t_s
        self._count[ids] = num_tokens_before + num_new_tokens
        self._step_s.append(step.t_s)
        self._step_tokens.append(int(num_new_tokens.sum()))

    def _check_end(self, request_id: int, reason: str) -> None:
        if not 0 <= request_id < self._size or np.isfinite(self._ended_s[request_id]):
            raise EngineError(f"the engine ended request {request_id}, which was not running")
        num_tokens = int(self._count[request_id])
        if reason != "length" or num_tokens != self._expected:
            raise EngineError(
                f"request {request_id} ended ({reason}) after {num_tokens} tokens; each must give exactly "
                f"{self._expected}"
            )

    def _grow(self) -> None:
        for name in ("_sent_s", "_prompt", "_count", "_first_s", "_last_s", "_ended_s"):
            old_array = getattr(self, name)
            new_array = (
                np.full(2 * len(old_array), np.inf)
                if name == "_ended_s"
                else np.zeros(2 * len(old_array), dtype=old_array.dtype)
            )
            new_array[: len(old_array)] = old_array
            setattr(self, name, new_array)


def score_level(
    concurrency: int, window: LevelWindow, *, began_s: float, released_s: float, ramp_cut: bool
) -> ScoreLevel:
    """Return a level's numbers. Its times count from `began_s`, the start of the ladder."""
    return ScoreLevel(
        concurrency=concurrency,
        start_s=released_s - began_s,
        ramp_s=window.start_s - released_s,
        window_s=window.duration_s,
        output_tokens=window.output_tokens,
        prompt_tokens=window.prompt_tokens,
        finished=window.finished,
        waiting=window.waiting,
        output_tokens_per_s=window.output_tokens / window.duration_s,
        total_tokens_per_s=(window.output_tokens + window.prompt_tokens) / window.duration_s,
        requests_per_s=window.finished / window.duration_s,
        ttft_ms=distribution(window.ttft_s * _MS),
        itl_ms=distribution(window.itl_s * _MS),
        e2e_ms=distribution(window.e2e_s * _MS),
        ramp_cut=ramp_cut,
    )


def best_level(levels: Sequence[ScoreLevel]) -> int:
    """Return the concurrency of the sustained run: the lowest level within 1 % of the best output rate."""
    highest = max(level.output_tokens_per_s for level in levels)
    return min(level.concurrency for level in levels if level.output_tokens_per_s >= _NEAR_BEST_FRACTION * highest)


def spread(times_s: np.ndarray, tokens: np.ndarray, start_s: float, end_s: float) -> Spread:
    """Return the spread of the rate over equal parts of (start_s, end_s].

    A part lasts about 10 s, or less in a short window.
    """
    num_buckets = max(1, int((end_s - start_s) / _BUCKET_S))
    if num_buckets < _MIN_BUCKETS:
        num_buckets = max(1, min(_MIN_BUCKETS, int(end_s - start_s)))
    edges = np.linspace(start_s, end_s, num_buckets + 1)
    rates = _rates(times_s, tokens, edges)
    change = None
    if num_buckets >= _MIN_BUCKETS:
        third_size = num_buckets // 3
        change = float(rates[-third_size:].mean() / rates[:third_size].mean() - 1) if rates[:third_size].any() else None
    return Spread(
        bucket_s=float(edges[1] - edges[0]),
        rates=[float(rate) for rate in rates],
        variation=float(rates.std() / rates.mean()) if rates.any() else 0.0,
        change=change,
        drifts=change is not None and change < -DRIFT_LIMIT,
    )


def rates_over_time(
    times_s: np.ndarray, tokens: np.ndarray, start_s: float, end_s: float, bucket_s: float
) -> list[float]:
    """Return the tokens per second in each whole bucket from `start_s`. The last bucket may end after `end_s`."""
    num_buckets = max(1, int(np.ceil((end_s - start_s) / bucket_s)))
    return [float(rate) for rate in _rates(times_s, tokens, start_s + bucket_s * np.arange(num_buckets + 1))]


def _rates(times_s: np.ndarray, tokens: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the tokens per second of each bucket: [buckets].

    A bucket excludes its start and includes its end, as a window does.
    """
    cumulative = np.concatenate(([0.0], np.cumsum(tokens)))
    cumulative_at_edges = cumulative[np.searchsorted(times_s, edges, side="right")]
    return np.diff(cumulative_at_edges) / np.diff(edges)
