"""Computes time series of a level from its records: requests in flight, arrivals of text, and buckets of 1 s.

Counts come from records and not from a counter in the client, so they are the same for any number of worker processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meltcore.measure.documents.schema import TimelinePoint
from meltcore.measure.load.record import RequestRecord

STEADY_RATIO = 0.9
MIN_STEADY_S = 1.0  # a shorter window holds so few engine steps that its rate is noise
# Requests that end in one engine step are followed by others a moment later: that is not a gap in the load.
MAX_DIP_S = 0.02
BUCKET_S = 1.0
MS_PER_S = 1000.0


class InFlight:
    """Represents the number of requests in flight as a step function of time.

    `counts[i]` holds from `times_s[i]` to the next time.
    """

    def __init__(self, sent_s: np.ndarray, ended_s: np.ndarray) -> None:
        """Build the step function from the requests that were sent.

        Args:
            sent_s: [requests] float64, the time at which each request was sent.
            ended_s: [requests] float64, the time at which each request ended.
        """
        change_times_s = np.concatenate([ended_s, sent_s])
        deltas = np.concatenate([np.full(len(ended_s), -1), np.full(len(sent_s), 1)])
        order = np.argsort(
            change_times_s, kind="stable"
        )  # at equal times ends come first: back to back is not concurrent
        self.times_s = change_times_s[order]
        self.counts = np.cumsum(deltas[order])

    @property
    def peak(self) -> int:
        """Return the largest number of requests that were in flight together."""
        return int(self.counts.max(initial=0))

    def steady_window(self, concurrency: int) -> tuple[float, float] | None:
        """Return (start, end) in seconds of the longest window with at least 90 % of `concurrency` requests in flight.

        Returns None if no window lasts MIN_STEADY_S. A dip shorter than MAX_DIP_S does not end a window.
        """
        if not len(self.counts):
            return None
        is_steady = self.counts >= np.ceil(STEADY_RATIO * concurrency)
        edges = np.diff(np.concatenate(([0], is_steady.astype(np.int8), [0])))
        window_starts_s = self.times_s[np.flatnonzero(edges == 1)]
        end_idx = np.minimum(np.flatnonzero(edges == -1), len(self.times_s) - 1)
        window_ends_s = self.times_s[end_idx]
        if not len(window_starts_s):
            return None
        is_real_dip = window_starts_s[1:] - window_ends_s[:-1] >= MAX_DIP_S
        window_starts_s, window_ends_s = (
            window_starts_s[np.concatenate(([True], is_real_dip))],
            window_ends_s[np.concatenate((is_real_dip, [True]))],
        )
        longest_idx = int(np.argmax(window_ends_s - window_starts_s))
        window = float(window_starts_s[longest_idx]), float(window_ends_s[longest_idx])
        return window if window[1] - window[0] >= MIN_STEADY_S else None

    def counts_at(self, times_s: np.ndarray) -> np.ndarray:
        """Return the number of requests in flight at each of `times_s`: [times]."""
        if not len(self.counts):
            return np.zeros(len(times_s), dtype=int)
        idx = np.searchsorted(self.times_s, times_s, side="right") - 1
        return np.where(idx >= 0, self.counts[np.maximum(idx, 0)], 0)


@dataclass(frozen=True)
class TextArrivals:
    """Holds the times at which text arrived. Events of one answer that were read together are one arrival.

    Otherwise two events of one read would have a gap of 0 ms between them. If a server sends the tokens of one step in
    several events, even the median gap would be 0 ms. Each array holds all answers, one after another. With 10,000
    answers, separate arrays per answer would take as long to build as the rest of the summary.
    """

    num_arrivals: int
    times_s: np.ndarray  # [gaps] float64: the end of each gap between two arrivals of one answer
    gaps_ms: np.ndarray  # [gaps] float64
    tokens_per_gap: np.ndarray  # [gaps] int64: tokens of the arrival at its end as the server counted them, else events

    @classmethod
    def from_records(cls, records: Sequence[RequestRecord], *, use_token_counts: bool = True) -> TextArrivals:
        """Return the arrivals of the answers in `records`, at least one of which must have text.

        With `use_token_counts` False, every event counts as one token.
        """
        events_per_answer = np.array([len(record.times_s) for record in records])
        times_s = np.concatenate([record.times_s for record in records])
        answer_ends = np.cumsum(events_per_answer)
        is_answer_end = np.zeros(len(times_s), dtype=bool)
        is_answer_end[answer_ends - 1] = True
        is_arrival_end = np.append(np.diff(times_s) > 0, True) | is_answer_end  # event of its arrival
        cumulative_counts = [record.cumulative_tokens for record in records] if use_token_counts else [None]
        if any(counts is None for counts in cumulative_counts):
            cumulative_tokens = np.arange(len(times_s)) - np.repeat(answer_ends - events_per_answer, events_per_answer)
        else:
            cumulative_tokens = np.concatenate([counts for counts in cumulative_counts if counts is not None]).astype(
                np.int64
            )
        arrivals_s = times_s[is_arrival_end]
        is_within_answer = ~is_answer_end[is_arrival_end][:-1]  # gaps between arrivals of one answer
        return cls(
            num_arrivals=len(arrivals_s),
            times_s=arrivals_s[1:][is_within_answer],
            gaps_ms=np.diff(arrivals_s)[is_within_answer] * MS_PER_S,
            tokens_per_gap=np.maximum(np.diff(cumulative_tokens[is_arrival_end])[is_within_answer], 1),
        )

    @property
    def itl_ms(self) -> np.ndarray:
        """Return the inter-token latencies, [tokens after the first arrival of each answer].

        Each gap is divided evenly among its tokens, or among its events without token counts.
        """
        return np.repeat(self.gaps_ms / self.tokens_per_gap, self.tokens_per_gap)


@dataclass(frozen=True)
class TokenTimes:
    """Holds the times at which output tokens arrived: `token_counts[i]` tokens at `times_s[i]`.

    The token counts add up to the server's count.
    """

    times_s: np.ndarray
    token_counts: np.ndarray

    @classmethod
    def from_records(cls, records: Sequence[RequestRecord]) -> TokenTimes:
        """Return the times of all tokens. Tokens of an answer without text count at the end of the answer."""
        times = [record.times_s if record.first_text_s else np.array([record.ended_s]) for record in records]
        token_counts = [_tokens_per_event(record) for record in records]
        return cls(np.concatenate(times or [np.zeros(0)]), np.concatenate(token_counts or [np.zeros(0)]))

    def count_between(self, start_s: float, end_s: float) -> float:
        """Return the number of tokens that arrived from `start_s` until before `end_s`."""
        return float(self.token_counts[(self.times_s >= start_s) & (self.times_s < end_s)].sum())


def _tokens_per_event(record: RequestRecord) -> np.ndarray:
    """Return the number of output tokens of each event, [events].

    These are the server's counts. Without counts, the total is spread evenly over the events. Tokens after the last
    text, such as an end token, count with the last event.
    """
    cumulative_counts = record.cumulative_tokens
    num_events = max(1, len(record.times_s))
    if cumulative_counts is None:
        return np.full(num_events, record.output_tokens / num_events)
    token_counts = np.diff(cumulative_counts.astype(np.float64), prepend=0.0)
    token_counts[-1] += record.output_tokens - cumulative_counts[-1]
    return token_counts


def timeline(in_flight: InFlight, token_times: TokenTimes, start_s: float, end_s: float) -> list[TimelinePoint]:
    """Return one point per bucket of 1 s from `start_s`.

    The last bucket is 0.5 to 1.5 s long, because the rate of a shorter bucket would mean little.
    """
    edges = _bucket_edges(start_s, end_s)
    counts, _ = np.histogram(token_times.times_s, bins=edges, weights=token_times.token_counts)
    # Just before each bucket's end: at the end of the last one nothing is in flight.
    in_flight_counts = in_flight.counts_at(np.nextafter(edges[1:], -np.inf))
    rates = counts / np.diff(edges)
    return [
        TimelinePoint(t_s=float(i * BUCKET_S), output_tokens_per_s=float(rate), in_flight=int(count))
        for i, (rate, count) in enumerate(zip(rates, in_flight_counts, strict=True))
    ]


def bucket_means(
    times_s: np.ndarray, token_counts: np.ndarray, counts: np.ndarray, start_s: float, end_s: float
) -> list[float | None]:
    """Return one mean per bucket of `timeline`: the sum of `token_counts` divided by the sum of `counts`.

    The mean of a bucket is None if the sum of its `counts` is 0.
    """
    edges = _bucket_edges(start_s, end_s)
    sums, _ = np.histogram(times_s, bins=edges, weights=token_counts)
    totals, _ = np.histogram(times_s, bins=edges, weights=counts)
    return [float(token_count / total) if total > 0 else None for token_count, total in zip(sums, totals, strict=True)]


def _bucket_edges(start_s: float, end_s: float) -> np.ndarray:
    """Return the edges of the buckets in seconds, [buckets + 1]. The last bucket ends at `end_s`."""
    num_buckets = max(1, int((end_s - start_s) / BUCKET_S + 0.5))
    edges = start_s + BUCKET_S * np.arange(num_buckets + 1)
    edges[-1] = max(end_s, edges[-2] + 1e-9)
    return edges
