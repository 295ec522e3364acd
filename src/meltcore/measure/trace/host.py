"""Finds why a GPU was idle before a launch, from the host events of a trace, and checks that launches have kernels.

CUDA graphs hide kernels from profilers: other tools reported 26 % idle time for a GPU that was 99 % busy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from meltcore.measure.documents.gaps import Cause
from meltcore.measure.trace.trace import Activity, HostEvent, Span, Trace, clip_spans, merge_spans, total_length

# Calls that return only when the GPU has finished earlier work.
_SYNCHRONIZING = ("synchronize", "cudamemcpy", "cumemcpy")
_ASYNCHRONOUS = "async"
_WAIT_NAMES = ("poll", "select", "epoll", "recv", "wait", "acquire", "sleep", "queue.get", "queue.py")

_GRAPH_LAUNCH = "graphlaunch"
_KERNEL_LAUNCH = "launchkernel"
_CAPTURE_BEGINS, _CAPTURE_ENDS = "streambegincapture", "streamendcapture"
MAX_LOST_SHARE = 0.01  # of launches without a kernel: those at the ends of a recording
ACTIVITY_MARGIN = 0.10


class HostTimeline:
    """Finds the host events of a thread, and the host event that launched an activity."""

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
        """Return the events of a thread that overlap `window`, by binary search: a trace has millions of events."""
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


def graph_counts(trace: Trace, device: int) -> tuple[int, int]:
    """Return the number of graph launches on this GPU, and the number of kernels from graphs.

    A launch counts if its kernels ran on this GPU, or if the trace has no kernels of the launch.
    """
    graph_launch_ids = {
        record.correlation for record in trace.host if record.is_call and _GRAPH_LAUNCH in record.name.lower()
    }
    other_device_ids = {record.correlation for record in trace.activities if record.device != device}
    graph_activities = [
        record for record in trace.activities if record.device == device and record.correlation in graph_launch_ids
    ]
    device_ids = {record.correlation for record in graph_activities}
    kernels = sum(record.type != "copy" for record in graph_activities)
    return len(
        {record for record in graph_launch_ids if record in device_ids or record not in other_device_ids}
    ), kernels


def trace_warnings(trace: Trace, device: int, busy_share: float, activity_share: float | None) -> list[str]:
    """Return reasons why the trace may be incomplete, or an empty list.

    `busy_share` is the busy fraction of the window by the trace, and `activity_share` by the GPU's own counters (GPM).
    """
    activity_counts: Counter[int | None] = Counter(record.correlation for record in trace.activities)
    graph_launches = [record for record in trace.host if record.is_call and _GRAPH_LAUNCH in record.name.lower()]
    reasons = []
    num_empty = sum(activity_counts[record.correlation] == 0 for record in graph_launches)
    if num_empty:
        reasons.append(f"{num_empty:,} of {len(graph_launches):,} graph launches have no kernel in the trace")
    graph_launch_ids = {record.correlation for record in graph_launches}
    # A launch before the recording began may be cut, which is no loss: only launches in the trace count.
    graph_activities = [
        record for record in trace.activities if record.device == device and record.correlation in graph_launch_ids
    ]
    reasons += _incomplete_graphs(graph_activities)
    kernel_launches = _plain_launches(trace.host)
    num_lost = sum(activity_counts[record.correlation] == 0 for record in kernel_launches)
    if kernel_launches and num_lost / len(kernel_launches) > MAX_LOST_SHARE:
        reasons.append(f"{num_lost:,} of {len(kernel_launches):,} kernel launches have no kernel in the trace")
    if activity_share is not None and activity_share - busy_share > ACTIVITY_MARGIN:
        reasons.append(
            f"the GPU's own counters say it was active {100 * activity_share:.0f} % of the time, "
            f"the trace {100 * busy_share:.0f} %"
        )
    return reasons


def _plain_launches(host: list[HostEvent]) -> list[HostEvent]:
    """Return the kernel launches outside of graph captures; captured kernels run only with their graph."""
    capturing: set[str] = set()
    launches = []
    for event in host:  # sorted by start
        name = event.name.lower()
        if _CAPTURE_BEGINS in name:
            capturing.add(event.thread)
        elif _CAPTURE_ENDS in name:
            capturing.discard(event.thread)
        elif event.is_call and _KERNEL_LAUNCH in name and event.thread not in capturing:
            launches.append(event)
    return launches


def _incomplete_graphs(activities: list[Activity]) -> list[str]:
    """Return one line for each graph whose launches have different numbers of kernels.

    The trace has lost records of such a graph.
    """
    by_graph: dict[int, Counter[int | None]] = defaultdict(Counter)
    for activity in activities:
        if activity.graph is not None:
            by_graph[activity.graph][activity.correlation] += 1
    reasons = []
    for graph, counts in sorted(by_graph.items()):
        max_kernels = max(counts.values())
        num_fewer = sum(count < max_kernels for count in counts.values())
        if num_fewer:
            reasons.append(
                f"graph {graph}: {num_fewer:,} of {len(counts):,} launches have fewer than its {max_kernels:,} kernels"
            )
    return reasons
