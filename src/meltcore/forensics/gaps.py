"""From a trace to a GapReport: what the GPU did not compute in, split without remainder by cause and by size. Pure.

Time not computing is cut into stretches: those in which only collectives ran, those in which only copies ran, and those
in which nothing did. The last kind is blamed by how the kernel that ends it was launched.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from meltcore.errors import ConfigError
from meltcore.forensics.budget import AT_THE_END, Spent, count_steps, spend_kernels
from meltcore.forensics.groups import group_of
from meltcore.forensics.host import Host
from meltcore.forensics.intervals import Span, gaps, length, union, within
from meltcore.forensics.trace import Activity, Trace
from meltcore.forensics.trust import graph_counts, reasons_to_distrust
from meltcore.results.gaps import CAUSES, COLLECTIVES, COPIES, SIZES, BudgetRow, Cause, GapReport, Pair, Part

MOST_PAIRS = 10
_NS = 1000.0


@dataclass(frozen=True)
class Stretch:
    """A part of the window in which nothing computed. `before` and `after` are names, "" at the window's ends."""

    start: int
    end: int
    cause: Cause
    before: str = ""
    after: str = ""

    @property
    def us(self) -> float:
        return (self.end - self.start) / _NS


def analyse(
    trace: Trace,
    device: int,
    window: Span | None = None,
    activity_share: float | None = None,
    step: str | None = None,
) -> GapReport:
    """One GPU. `window` in nanoseconds of the trace; None: from its first to its last activity.

    `activity_share`: what the GPU's own counters (GPM) say of the same window, a cross-check of the trace. `step`: how
    the name of a kernel or range begins that there is one of a step.
    Raises ConfigError where the GPU did nothing in the window, or nothing in it is named as `step` says.
    """
    mine = [each for each in trace.activities if each.device == device]
    window = window or (min((a.start for a in mine), default=0), max((a.end for a in mine), default=0))
    edges = _Edges(mine)  # of all it did: what ends a stretch may lie past the window
    mine = [each for each in mine if each.end > window[0] and each.start < window[1]]
    if not mine:
        raise ConfigError(f"GPU {device} did nothing in the window")
    spans = {kind: union((a.start, a.end) for a in mine if a.kind == kind) for kind in ("kernel", "collective", "copy")}
    stretches = list(_stretches(edges, spans, window, Host(trace.host)))
    computing = length(within(spans["kernel"], window))
    busy = union(span for each in spans.values() for span in each)
    whole = window[1] - window[0]
    lost = sum(stretch.end - stretch.start for stretch in stretches if stretch.cause != "no work")
    launches, recorded = graph_counts(trace, device)
    busy_ns = length(within(busy, window))
    steps, steps_by = count_steps(mine, trace.host, window, step)
    return GapReport(
        device=device,
        window_us=whole / _NS,
        computing_us=computing / _NS,
        busy_us=busy_ns / _NS,
        kernels=sum(each.kind != "copy" for each in mine),
        streams=len({each.stream for each in mine}),
        by_cause=_by_cause(stretches),
        by_size=_by_size(stretches),
        pairs=_pairs(stretches),
        recoverable_share=lost / whole,
        graph_launches=launches,
        graph_kernels=recorded,
        budget=_budget(mine, stretches, window),
        steps=steps,
        steps_by=steps_by,
        untrusted=reasons_to_distrust(trace, device, busy_ns / whole, activity_share),
    )


def devices(trace: Trace) -> list[int]:
    return sorted({each.device for each in trace.activities})


def _stretches(edges: _Edges, spans: dict[str, list[Span]], window: Span, host: Host) -> Iterable[Stretch]:
    """All time not computing, without overlap or remainder."""
    busy_else = union([*spans["collective"], *spans["copy"]])
    for gap in gaps(spans["kernel"], window):
        for part in within(spans["collective"], gap):
            yield Stretch(*part, "collective wait", *edges.names(gap))
        for without in gaps(within(spans["collective"], gap), gap):
            for part in within(spans["copy"], without):
                yield Stretch(*part, "copy", *edges.names(gap))
        for part in gaps(within(busy_else, gap), gap):
            after = edges.next(part[1])
            cause: Cause = "unknown" if after is None else host.cause(part, after)
            yield Stretch(*part, cause, *edges.names(part))


class _Edges:
    """Which activity ended last before a moment, and which starts first at or after it."""

    def __init__(self, activities: Sequence[Activity]) -> None:
        self._by_start = sorted(activities, key=lambda each: (each.start, each.end))
        self._by_end = sorted(activities, key=lambda each: (each.end, each.start))
        self._starts = [each.start for each in self._by_start]
        self._ends = [each.end for each in self._by_end]

    def next(self, moment: int) -> Activity | None:
        at = bisect_left(self._starts, moment)
        return self._by_start[at] if at < len(self._starts) else None

    def names(self, gap: Span) -> tuple[str, str]:
        at = bisect_right(self._ends, gap[0]) - 1
        after = self.next(gap[1])
        return self._by_end[at].name if at >= 0 else "", after.name if after else ""


def _budget(activities: Sequence[Activity], stretches: Sequence[Stretch], window: Span) -> list[BudgetRow]:
    spent = Spent()
    spend_kernels(spent, activities, window)
    for each in stretches:
        alone = {"copy": COPIES, "collective wait": COLLECTIVES}.get(each.cause)
        if alone is not None:
            spent.ran[alone] += each.end - each.start
        else:
            spent.before[group_of(each.after) if each.after else AT_THE_END] += each.end - each.start
    return spent.rows()


def _by_cause(stretches: Sequence[Stretch]) -> list[Part]:
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for stretch in stretches:
        totals[stretch.cause] += stretch.end - stretch.start
        counts[stretch.cause] += 1
    found = [Part(name=cause, count=counts[cause], total_us=totals[cause] / _NS) for cause in CAUSES if counts[cause]]
    return sorted(found, key=lambda part: -part.total_us)


def _by_size(stretches: Sequence[Stretch]) -> list[Part]:
    """Each stretch by its own length."""
    parts = [Part(name=name, count=0, total_us=0.0) for name, _ in SIZES]
    for stretch in stretches:
        place = next(place for place, (_, limit) in enumerate(SIZES) if stretch.us < limit)
        parts[place].count += 1
        parts[place].total_us += stretch.us
    return parts


def _pairs(stretches: Sequence[Stretch]) -> list[Pair]:
    """The kernels around the gaps that cost most together."""
    held: dict[tuple[str, str], list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        if stretch.before and stretch.after and stretch.cause not in ("copy", "collective wait"):
            held[stretch.before, stretch.after].append(stretch)
    found = [
        Pair(
            before=before,
            after=after,
            count=len(own),
            total_us=sum(each.end - each.start for each in own) / _NS,
            median_us=median(each.us for each in own),
            cause=Counter({c: sum(e.end - e.start for e in own if e.cause == c) for c in CAUSES}).most_common(1)[0][0],
        )
        for (before, after), own in held.items()
    ]
    return sorted(found, key=lambda pair: -pair.total_us)[:MOST_PAIRS]
