"""From what was counted to what is reported: a level's numbers, how even the rate was, and which level was best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meltcore.bench.plan import NEARLY_BEST
from meltcore.bench.tally import Window
from meltcore.results.percentiles import distribution
from meltcore.results.score import ScoreLevel, Spread

MS = 1000.0
BUCKET_S = 10.0
_FEWEST_BUCKETS = 6  # below, thirds would be single pieces
# The boost clock of a GPU that warms up falls by two or three steps of 15 MHz in 1,980; this is beyond that.
DRIFT_LIMIT = 0.03


def score_level(concurrency: int, window: Window, *, began_s: float, released_s: float, ramp_cut: bool) -> ScoreLevel:
    """`began_s`: the beginning of the ladder, which the level's times count from."""
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
        ttft_ms=distribution(window.ttft_s * MS),
        itl_ms=distribution(window.itl_s * MS),
        e2e_ms=distribution(window.e2e_s * MS),
        ramp_cut=ramp_cut,
    )


def best_level(levels: Sequence[ScoreLevel]) -> int:
    """The concurrency of the sustained run."""
    highest = max(level.output_tokens_per_s for level in levels)
    return min(level.concurrency for level in levels if level.output_tokens_per_s >= NEARLY_BEST * highest)


def spread(times_s: np.ndarray, tokens: np.ndarray, start_s: float, end_s: float) -> Spread:
    """Rates over equal pieces of (start_s, end_s], of 10 s each or somewhat more; shorter where the window is short."""
    count = max(1, int((end_s - start_s) / BUCKET_S))
    if count < _FEWEST_BUCKETS:
        count = max(1, min(_FEWEST_BUCKETS, int(end_s - start_s)))
    edges = np.linspace(start_s, end_s, count + 1)
    rates = _rates(times_s, tokens, edges)
    change = None
    if count >= _FEWEST_BUCKETS:
        third = count // 3
        change = float(rates[-third:].mean() / rates[:third].mean() - 1) if rates[:third].any() else None
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
    """Tokens a second in each whole bucket from `start_s` on; the last one may reach beyond `end_s`."""
    count = max(1, int(np.ceil((end_s - start_s) / bucket_s)))
    return [float(rate) for rate in _rates(times_s, tokens, start_s + bucket_s * np.arange(count + 1))]


def _rates(times_s: np.ndarray, tokens: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[buckets] tokens a second, each bucket without its beginning and with its end, as a window is."""
    so_far = np.concatenate(([0.0], np.cumsum(tokens)))
    at_edges = so_far[np.searchsorted(times_s, edges, side="right")]
    return np.diff(at_edges) / np.diff(edges)
