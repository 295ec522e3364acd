"""How many requests were in flight when: peak, steady window and time line, from send and end times alone.

Counting from records, not with a counter in the client, gives one truth for any number of worker processes.
"""

from __future__ import annotations

import numpy as np

from meltcore.results.schema import TimelinePoint

STEADY_SHARE = 0.9
# A span shorter than this holds so few steps of a server that its rate is noise.
MIN_STEADY_S = 1.0
# Requests that end in one step of the server are followed by others a moment later: that is no gap in the load.
MAX_DIP_S = 0.02
BUCKET_S = 1.0


class InFlight:
    """The number of requests in flight as a step function: `counts[i]` holds from `times_s[i]` to the next time."""

    def __init__(self, sent_s: np.ndarray, ended_s: np.ndarray) -> None:
        """`sent_s`, `ended_s`: [requests] float64, of the requests that were sent."""
        moments = np.concatenate([ended_s, sent_s])
        changes = np.concatenate([np.full(len(ended_s), -1), np.full(len(sent_s), 1)])
        order = np.argsort(moments, kind="stable")  # at a tie ends come first: handing over is not overlapping
        self.times_s = moments[order]
        self.counts = np.cumsum(changes[order])

    @property
    def peak(self) -> int:
        return int(self.counts.max(initial=0))

    def steady_window(self, concurrency: int) -> tuple[float, float] | None:
        """(start, end) of the longest span with at least 90 % of `concurrency` in flight, or None below 1 s."""
        if not len(self.counts):
            return None
        full = self.counts >= np.ceil(STEADY_SHARE * concurrency)
        edges = np.diff(np.concatenate(([0], full.astype(np.int8), [0])))
        starts = self.times_s[np.flatnonzero(edges == 1)]
        last = np.minimum(np.flatnonzero(edges == -1), len(self.times_s) - 1)
        ends = self.times_s[last]
        if not len(starts):
            return None
        real = starts[1:] - ends[:-1] >= MAX_DIP_S
        starts, ends = starts[np.concatenate(([True], real))], ends[np.concatenate((real, [True]))]
        longest = int(np.argmax(ends - starts))
        window = float(starts[longest]), float(ends[longest])
        return window if window[1] - window[0] >= MIN_STEADY_S else None

    def at(self, moments_s: np.ndarray) -> np.ndarray:
        """[moments] counts in flight at each of `moments_s`."""
        if not len(self.counts):
            return np.zeros(len(moments_s), dtype=int)
        position = np.searchsorted(self.times_s, moments_s, side="right") - 1
        return np.where(position >= 0, self.counts[np.maximum(position, 0)], 0)


def timeline(
    in_flight: InFlight, token_times_s: np.ndarray, token_weights: np.ndarray, start_s: float, end_s: float
) -> list[TimelinePoint]:
    """Buckets of 1 s from `start_s`; the last one is 0.5 to 1.5 s, so that no rate is that of a sliver."""
    edges = _edges(start_s, end_s)
    tokens, _ = np.histogram(token_times_s, bins=edges, weights=token_weights)
    # Just before each bucket's end: the end of the last one is when everything is over.
    held = in_flight.at(np.nextafter(edges[1:], -np.inf))
    widths = np.diff(edges)
    return [
        TimelinePoint(t_s=float(at * BUCKET_S), output_tokens_per_s=float(rate), in_flight=int(open_then))
        for at, (rate, open_then) in enumerate(zip(tokens / widths, held, strict=True))
    ]


def means(
    moments_s: np.ndarray, amounts: np.ndarray, counts: np.ndarray, start_s: float, end_s: float
) -> list[float | None]:
    """Sum of `amounts` over sum of `counts` in each bucket of `timeline`; None where nothing counts."""
    edges = _edges(start_s, end_s)
    sums, _ = np.histogram(moments_s, bins=edges, weights=amounts)
    totals, _ = np.histogram(moments_s, bins=edges, weights=counts)
    return [float(amount / total) if total > 0 else None for amount, total in zip(sums, totals, strict=True)]


def _edges(start_s: float, end_s: float) -> np.ndarray:
    """[buckets + 1]"""
    count = max(1, int((end_s - start_s) / BUCKET_S + 0.5))
    edges = start_s + BUCKET_S * np.arange(count + 1)
    edges[-1] = max(end_s, edges[-2] + 1e-9)
    return edges
