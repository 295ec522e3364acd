"""Derives gap reports from a trace: the time in which a GPU did not compute, by cause and by size.

This time is cut into gaps in which only collectives ran, only copies ran, or nothing ran. If nothing ran, the cause
depends on how the kernel that ends the gap was launched.

The time budget of a step assigns all time of a window to a group of kernels, or to the idle time before a group. So its
rows add up to the window exactly. If kernels overlap, the time belongs to the kernel that began first, because the
other kernels do not make the step longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from meltcore.common.errors import ConfigError
from meltcore.common.options import option
from meltcore.measure.documents.gaps import (
    CAUSES,
    COLLECTIVES,
    COPIES,
    SIZES,
    BudgetRow,
    Cause,
    GapReport,
    GapTotal,
    KernelPair,
)
from meltcore.measure.trace.host import HostTimeline, graph_counts, trace_warnings
from meltcore.measure.trace.trace import (
    Activity,
    HostEvent,
    Span,
    Trace,
    clip_spans,
    gaps,
    kernel_group,
    merge_spans,
    total_length,
)

MAX_PAIRS = 10
_NS = 1000.0
_NS_PER_MS = 1e6
_GROUP = "trace"

AFTER_LAST_KERNEL = "after the last kernel"
# Ranges that mark a step: ours, vLLM's, and those of torch.profiler's step().
_STEP_RANGES = ("step", "execute_", "profilerstep#")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The GPU, the window and the step marker of an analysis.

    `device` is one GPU; None means all GPUs. Times are milliseconds from the first activity. `active_percent` is the SM
    activity of that GPU by its own counters (GPM), a check of the trace. `step` is the beginning of the name of a
    kernel or range that occurs once per step.
    """

    device: int | None = option(None, "One GPU of the trace (default: all).", group=_GROUP)
    from_ms: float | None = option(
        None, "Start, from the first activity.", group=_GROUP, flag="--from-ms", metavar="MS", limits={"minimum": 0}
    )
    to_ms: float | None = option(
        None, "End, from the first activity.", group=_GROUP, flag="--to-ms", metavar="MS", limits={"minimum": 0}
    )
    step: str | None = option(
        None, "Kernels or ranges that mark a step: the first letters of their name.", group=_GROUP, metavar="NAME"
    )
    active_percent: float | None = option(
        None,
        "SM activity by the GPU's own counters meanwhile, as --gpu reads it.",
        group=_GROUP,
        metavar="PERCENT",
        limits={"minimum": 0, "maximum": 100},
    )


@dataclass(frozen=True)
class Gap:
    """A time without computation. `before` and `after` name the activities around it, "" at the window's ends."""

    start: int
    end: int
    cause: Cause
    before: str = ""
    after: str = ""

    @property
    def ns(self) -> int:
        """The length in nanoseconds."""
        return self.end - self.start


def analyze_trace(trace: Trace, options: ProfileOptions) -> list[GapReport]:
    """Return the report of each GPU over the same window.

    Raises ConfigError for an empty window, and for activity of one GPU with a trace of several.
    """
    devices = trace_devices(trace) if options.device is None else [options.device]
    activity = None if options.active_percent is None else options.active_percent / 100
    if activity is not None and len(devices) > 1:
        raise ConfigError(f"activity is of one GPU, and the trace has {len(devices)}: choose one with --device")
    window = _window(trace, options)
    return [analyze(trace, device, window, activity, options.step) for device in devices]


def analyze(
    trace: Trace,
    device: int,
    window: Span | None = None,
    activity_share: float | None = None,
    step: str | None = None,
) -> GapReport:
    """Return the report of one GPU. `window` is in nanoseconds of the trace. By default it spans all activities.

    `activity_share` and `step` are as in `ProfileOptions`. Raises ConfigError if the GPU has no activity in the window,
    or if no name in the window begins with `step`.
    """
    gpu_activities = [activity for activity in trace.activities if activity.device == device]
    window = window or (
        min((a.start for a in gpu_activities), default=0),
        max((a.end for a in gpu_activities), default=0),
    )
    neighbors = _Neighbors(gpu_activities)  # of all activities: the one that ends a gap may begin after the window
    gpu_activities = [
        activity for activity in gpu_activities if activity.end > window[0] and activity.start < window[1]
    ]
    if not gpu_activities:
        raise ConfigError(f"GPU {device} has no activity in the window")
    spans = {
        type_: merge_spans((a.start, a.end) for a in gpu_activities if a.type == type_)
        for type_ in ("kernel", "collective", "copy")
    }
    gap_list = list(_gaps(neighbors, spans, window, HostTimeline(trace.host)))
    busy_ns = total_length(
        clip_spans(merge_spans(span for type_spans in spans.values() for span in type_spans), window)
    )
    window_ns = window[1] - window[0]
    launches, num_graph_kernels = graph_counts(trace, device)
    steps, step_marker = count_steps(gpu_activities, trace.host, window, step)
    return GapReport(
        device=device,
        window_us=window_ns / _NS,
        computing_us=total_length(clip_spans(spans["kernel"], window)) / _NS,
        busy_us=busy_ns / _NS,
        kernels=sum(activity.type != "copy" for activity in gpu_activities),
        streams=len({activity.stream for activity in gpu_activities}),
        by_cause=_sum_by_cause(gap_list),
        by_size=_sum_by_size(gap_list),
        pairs=_largest_pairs(gap_list),
        recoverable_share=sum(gap.ns for gap in gap_list if gap.cause != "no work") / window_ns,
        graph_launches=launches,
        graph_kernels=num_graph_kernels,
        budget=_budget(gpu_activities, gap_list, window),
        steps=steps,
        step_marker=step_marker,
        untrusted=trace_warnings(trace, device, busy_ns / window_ns, activity_share),
    )


def trace_devices(trace: Trace) -> list[int]:
    """Return the GPUs of a trace."""
    return sorted({activity.device for activity in trace.activities})


def _window(trace: Trace, options: ProfileOptions) -> Span | None:
    if options.from_ms is None and options.to_ms is None:
        return None
    first = min(activity.start for activity in trace.activities)
    last = max(activity.end for activity in trace.activities)
    start = first + round((options.from_ms or 0.0) * _NS_PER_MS)
    end = last if options.to_ms is None else first + round(options.to_ms * _NS_PER_MS)
    if start >= end:
        end_note = "the last activity at" if options.to_ms is None else "--to-ms"
        raise ConfigError(
            f"--from-ms {(start - first) / _NS_PER_MS:g} is not before {end_note} {(end - first) / _NS_PER_MS:g}"
        )
    return start, end


def _gaps(neighbors: _Neighbors, spans: dict[str, list[Span]], window: Span, host: HostTimeline) -> Iterable[Gap]:
    """Yield gaps that together cover all time of the window without computation, without overlap."""
    collective_or_copy = merge_spans([*spans["collective"], *spans["copy"]])
    for gap in gaps(spans["kernel"], window):
        for span in clip_spans(spans["collective"], gap):
            yield Gap(*span, "exposed communication", *neighbors.names(gap))
        for uncovered in gaps(clip_spans(spans["collective"], gap), gap):
            for span in clip_spans(spans["copy"], uncovered):
                yield Gap(*span, "exposed copy", *neighbors.names(gap))
        for span in gaps(clip_spans(collective_or_copy, gap), gap):
            after = neighbors.next(span[1])
            cause: Cause = "unknown" if after is None else host.cause(span, after)
            yield Gap(*span, cause, *neighbors.names(span))


class _Neighbors:
    """Finds the activity that ended last before a time, and the one that starts first at or after it."""

    def __init__(self, activities: Sequence[Activity]) -> None:
        self._activities_by_start = sorted(activities, key=lambda activity: (activity.start, activity.end))
        self._activities_by_end = sorted(activities, key=lambda activity: (activity.end, activity.start))
        self._starts = [activity.start for activity in self._activities_by_start]
        self._ends = [activity.end for activity in self._activities_by_end]

    def next(self, moment: int) -> Activity | None:
        index = bisect_left(self._starts, moment)
        return self._activities_by_start[index] if index < len(self._starts) else None

    def names(self, gap: Span) -> tuple[str, str]:
        index = bisect_right(self._ends, gap[0]) - 1
        after = self.next(gap[1])
        return self._activities_by_end[index].name if index >= 0 else "", after.name if after else ""


def _budget(activities: Sequence[Activity], gap_list: Sequence[Gap], window: Span) -> list[BudgetRow]:
    budget = TimeBudget()
    budget.add_kernels(activities, window)
    for gap in gap_list:
        group = {"exposed copy": COPIES, "exposed communication": COLLECTIVES}.get(gap.cause)
        if group is not None:
            budget.kernel_counts[group] += gap.ns
        else:
            budget.idle_before[kernel_group(gap.after) if gap.after else AFTER_LAST_KERNEL] += gap.ns
    return budget.rows()


def _sum_by_cause(gap_list: Sequence[Gap]) -> list[GapTotal]:
    by_cause: dict[str, list[int]] = defaultdict(list)
    for gap in gap_list:
        by_cause[gap.cause].append(gap.ns)
    totals = [GapTotal(name=c, count=len(by_cause[c]), total_us=sum(by_cause[c]) / _NS) for c in CAUSES if by_cause[c]]
    return sorted(totals, key=lambda total: -total.total_us)


def _sum_by_size(gap_list: Sequence[Gap]) -> list[GapTotal]:
    totals = [GapTotal(name=name, count=0, total_us=0.0) for name, _ in SIZES]
    for gap in gap_list:
        us = gap.ns / _NS
        total = next(total for total, (_, limit) in zip(totals, SIZES, strict=True) if us < limit)
        total.count += 1
        total.total_us += us
    return totals


def _largest_pairs(gap_list: Sequence[Gap]) -> list[KernelPair]:
    """Return the pairs of kernels with the largest total gaps."""
    by_names: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in gap_list:
        if gap.before and gap.after and gap.cause not in ("exposed copy", "exposed communication"):
            by_names[gap.before, gap.after].append(gap)
    pairs = [
        KernelPair(
            before=before,
            after=after,
            count=len(pair_gaps),
            total_us=sum(gap.ns for gap in pair_gaps) / _NS,
            median_us=median(gap.ns / _NS for gap in pair_gaps),
            cause=Counter({c: sum(gap.ns for gap in pair_gaps if gap.cause == c) for c in CAUSES}).most_common(1)[0][0],
        )
        for (before, after), pair_gaps in by_names.items()
    ]
    return sorted(pairs, key=lambda pair: -pair.total_us)[:MAX_PAIRS]


@dataclass
class TimeBudget:
    """Nanoseconds by group: `ran` is its computing time, `idle_before` the idle time before its kernels."""

    count: Counter[str] = field(default_factory=Counter)
    kernel_counts: Counter[str] = field(default_factory=Counter)
    idle_before: Counter[str] = field(default_factory=Counter)

    def add_kernels(self, activities: Sequence[Activity], window: Span) -> None:
        """Add the computing time within `window`. `activities` overlap it and are sorted by start.

        Collectives and copies are only counted, because the caller adds their time.
        """
        position = window[0]
        for activity in activities:
            group = {"kernel": kernel_group(activity.name), "collective": COLLECTIVES, "copy": COPIES}[activity.type]
            self.count[group] += 1
            if activity.type != "kernel":
                continue
            end = min(activity.end, window[1])
            self.kernel_counts[group] += max(0, end - max(activity.start, position))
            position = max(position, end)

    def rows(self) -> list[BudgetRow]:
        """Return one row per group of kernels, the longest time first."""
        rows = [
            BudgetRow(
                name=name,
                count=self.count[name],
                ran_us=self.kernel_counts[name] / _NS,
                idle_before_us=self.idle_before[name] / _NS,
            )
            for name in self.count.keys() | self.kernel_counts.keys() | self.idle_before.keys()
        ]
        return sorted(rows, key=lambda row: (-row.ran_us - row.idle_before_us, row.name))


def count_steps(
    activities: Sequence[Activity], host: Sequence[HostEvent], window: Span, name: str | None
) -> tuple[int | None, str]:
    """Return the number of steps in `window`, and the name of the marker that was counted.

    Markers are kernels or ranges whose name begins with `name`, or known ranges.

    A marker counts if its middle is in the window. The range of the first step may begin before the window, which
    starts at the first kernel. Returns (None, "") for a trace without markers. Raises ConfigError for a `name` without
    a match.
    """
    marks: list[HostEvent | Activity] = [event for event in host if not event.is_call]
    marks += activities if name is not None else ()
    prefixes = _STEP_RANGES if name is None else (name.lower(),)
    step_ranges = Counter(
        event.name
        for event in marks
        if event.name.lower().startswith(prefixes) and window[0] <= (event.start + event.end) // 2 < window[1]
    )
    if name is not None and not step_ranges:
        raise ConfigError(f"no kernel and no range within the window has a name that begins with {name!r}")
    if not step_ranges:
        return None, ""
    return step_ranges.total(), next(iter(step_ranges)) if len(
        step_ranges
    ) == 1 else f"{len(step_ranges)} names, such as {min(step_ranges)}"
