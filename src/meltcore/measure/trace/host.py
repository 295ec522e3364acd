"""The host's activity while a GPU was idle: the thread that launched the next kernel, and its delay."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from meltcore.measure.documents.gaps import Cause
from meltcore.measure.trace.trace import Activity, HostEvent, Span, clip_spans, merge_spans, total_length

# Calls that return only when the GPU has finished earlier work.
_SYNCHRONIZING = ("synchronize", "cudamemcpy", "cumemcpy")
_ASYNCHRONOUS = "async"
_WAIT_NAMES = ("poll", "select", "epoll", "recv", "wait", "acquire", "sleep", "queue.get", "queue.py")


class HostTimeline:
    """Host events by thread, and the launch of each activity."""

    def __init__(self, events: Sequence[HostEvent]) -> None:
        self._launches = {
            event.correlation: event for event in events if event.is_call and event.correlation is not None
        }
        self._threads: dict[str, list[HostEvent]] = defaultdict(list)
        for event in events:
            self._threads[event.thread].append(event)
        self._starts = {name: [event.start for event in thread_events] for name, thread_events in self._threads.items()}
        self._enclosing_indices = {
            name: _enclosing_indices(thread_events) for name, thread_events in self._threads.items()
        }

    def cause(self, gap: Span, after: Activity) -> Cause:
        """Return the cause of `gap`, which ends where `after` starts."""
        launch = None if after.correlation is None else self._launches.get(after.correlation)
        if launch is None:
            return "unknown"
        before_launch = (gap[0], min(launch.start, gap[1]))
        if before_launch[1] <= before_launch[0]:
            return "kernel wait"
        active = [event for event in self.active_events(launch.thread, before_launch) if event is not launch]
        if _overlap_fraction(active, before_launch, _synchronizes) >= 0.5:
            return "synchronization"
        if _overlap_fraction(active, before_launch, _is_wait) >= 0.5:
            return "no work"
        return "late launch" if active else "untraced host"

    def active_events(self, thread: str, window: Span) -> list[HostEvent]:
        """Return the events of a thread that overlap `window`, without a scan of the trace, which has millions."""
        thread_events, starts = self._threads[thread], self._starts[thread]
        first, end = bisect_left(starts, window[0]), bisect_left(starts, window[1])
        overlapping = [event for event in thread_events[first:end] if event.end > window[0]]
        index = first - 1
        while index >= 0:
            if thread_events[index].end > window[0]:
                overlapping.append(thread_events[index])
                index -= 1
            else:
                index = self._enclosing_indices[thread][index]
        return overlapping


def _enclosing_indices(events: Sequence[HostEvent]) -> list[int]:
    """Return per event the index of the nearest earlier event that ends later, or -1.

    All events in between end before this event does.
    """
    indices: list[int] = []
    stack: list[int] = []
    for index, event in enumerate(events):
        while stack and events[stack[-1]].end <= event.end:
            stack.pop()
        indices.append(stack[-1] if stack else -1)
        stack.append(index)
    return indices


def _overlap_fraction(events: Iterable[HostEvent], window: Span, matches: Callable[[HostEvent], bool]) -> float:
    covered = total_length(clip_spans(merge_spans(event.span for event in events if matches(event)), window))
    return covered / (window[1] - window[0])


def _synchronizes(event: HostEvent) -> bool:
    name = event.name.lower()
    return event.is_call and _ASYNCHRONOUS not in name and any(pattern in name for pattern in _SYNCHRONIZING)


def _is_wait(event: HostEvent) -> bool:
    return not event.is_call and any(pattern in event.name.lower() for pattern in _WAIT_NAMES)
