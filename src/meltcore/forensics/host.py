"""What the host did while a GPU had nothing to do: who launched the next kernel, and what kept it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from meltcore.forensics.intervals import Span, length, union, within
from meltcore.forensics.trace import Activity, HostEvent
from meltcore.results.gaps import Cause

# Calls that return only when the GPU has caught up.
_SYNCHRONISE = ("synchronize", "cudamemcpy", "cumemcpy")
_ASYNCHRONOUS = "async"
_WAITS = ("poll", "select", "epoll", "recv", "wait", "acquire", "sleep", "queue.get", "queue.py")


class Host:
    """What launched an activity, and what its thread did before."""

    def __init__(self, events: Sequence[HostEvent]) -> None:
        self._launches = {each.correlation: each for each in events if each.call and each.correlation is not None}
        self._threads: dict[str, list[HostEvent]] = defaultdict(list)
        for each in events:
            self._threads[each.thread].append(each)
        self._starts = {name: [each.start for each in own] for name, own in self._threads.items()}
        self._outlasting = {name: _outlasting(own) for name, own in self._threads.items()}

    def cause(self, gap: Span, after: Activity) -> Cause:
        """Why nothing ran in `gap`, which ends as `after` starts."""
        launch = None if after.correlation is None else self._launches.get(after.correlation)
        if launch is None:
            return "unknown"
        if launch.start <= gap[0]:
            return "queued"
        until = (gap[0], min(launch.start, gap[1]))
        if until[1] <= until[0]:
            return "queued"
        seen = [each for each in self.under_way(launch.thread, until) if each is not launch]
        if _share(seen, until, _synchronises) >= 0.5:
            return "synchronisation"
        if _share(seen, until, _waits) >= 0.5:
            return "no work"
        return "host late" if seen else "host silent"

    def under_way(self, thread: str, window: Span) -> list[HostEvent]:
        """What began in the window, and what was under way as it begins. A trace has millions: none other is met."""
        own, starts = self._threads[thread], self._starts[thread]
        first, last = bisect_left(starts, window[0]), bisect_left(starts, window[1])
        found = [each for each in own[first:last] if each.end > window[0]]
        place = first - 1
        while place >= 0:
            if own[place].end > window[0]:
                found.append(own[place])
                place -= 1
            else:
                place = self._outlasting[thread][place]
        return found


def _outlasting(events: Sequence[HostEvent]) -> list[int]:
    """Of each the nearest one before it that ends later, -1 where there is none: all between have ended by its end."""
    found: list[int] = []
    open_ones: list[int] = []
    for place, event in enumerate(events):
        while open_ones and events[open_ones[-1]].end <= event.end:
            open_ones.pop()
        found.append(open_ones[-1] if open_ones else -1)
        open_ones.append(place)
    return found


def _share(events: Iterable[HostEvent], window: Span, wanted: Callable[[HostEvent], bool]) -> float:
    covered = length(within(union(each.span for each in events if wanted(each)), window))
    return covered / (window[1] - window[0])


def _synchronises(event: HostEvent) -> bool:
    name = event.name.lower()
    return event.call and _ASYNCHRONOUS not in name and any(word in name for word in _SYNCHRONISE)


def _waits(event: HostEvent) -> bool:
    return not event.call and any(word in event.name.lower() for word in _WAITS)
