"""Spans of time as sorted, disjoint (start, end) pairs of whole nanoseconds. Whole numbers keep sums exact. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """Overlapping and touching spans joined; empty ones left out."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def gaps(spans: Sequence[Span], window: Span) -> list[Span]:
    """What `spans` (a union) leave free of `window`."""
    free: list[Span] = []
    at = window[0]
    for start, end in spans:
        if end <= at:
            continue
        if start >= window[1]:
            break
        if start > at:
            free.append((at, start))
        at = end
    if at < window[1]:
        free.append((at, window[1]))
    return free


def length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def within(spans: Sequence[Span], window: Span) -> list[Span]:
    """The parts of `spans` (a union) that lie in `window`."""
    parts = []
    for place in range(max(0, bisect_right(spans, (window[0],)) - 1), len(spans)):
        start, end = spans[place]
        if start >= window[1]:
            break
        if end > window[0]:
            parts.append((max(start, window[0]), min(end, window[1])))
    return parts
