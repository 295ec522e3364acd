"""The time budget of a step: all time of a window belongs to a group of kernels, or to the idle time before one.

The rows add up to the window exactly. Where kernels overlap, the time belongs to the one that began first, because the
others did not extend the step yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.gaps import COLLECTIVES, COPIES, BudgetRow
from meltcore.measure.trace.trace import Activity, HostEvent, Span, kernel_group

AFTER_LAST_KERNEL = "after the last kernel"
# Ranges that mark a step: ours, vLLM's, and those of torch.profiler's step().
_STEP_RANGES = ("step", "execute_", "profilerstep#")
_NS = 1000.0


@dataclass
class TimeBudget:
    """Nanoseconds by group: `ran` is its computing time, `idle_before` the idle time before its kernels."""

    count: Counter[str] = field(default_factory=Counter)
    kernel_counts: Counter[str] = field(default_factory=Counter)
    idle_before: Counter[str] = field(default_factory=Counter)

    def add_kernels(self, activities: Sequence[Activity], window: Span) -> None:
        """Add the computing time within `window`. `activities` overlap it and are sorted by start.

        Collectives and copies are only counted: the caller adds the time in which they ran alone.
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
        """Return the groups, longest first."""
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
    """Count the steps in `window`. Returns the number and the marker.

    Markers are kernels or ranges whose name begins with `name`, or known ranges.

    A mark counts where its middle lies: the range of the first step begins before its first kernel, where the window
    starts. Returns (None, "") for a trace without marks. Raises ConfigError for a `name` without a match.
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
