"""A step's budget: every moment of a window given to a group of kernels, or to the idle time in front of one. Pure.

The rows add up to the window without remainder. Where kernels overlap, a moment belongs to the one that began first:
the others had not yet made the step longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from meltcore.errors import ConfigError
from meltcore.forensics.groups import group_of
from meltcore.forensics.intervals import Span
from meltcore.forensics.trace import Activity, HostEvent
from meltcore.results.gaps import COLLECTIVES, COPIES, BudgetRow

AT_THE_END = "nothing after"
# Ranges that mark a step: ours and vLLM's, those of torch.profiler's step().
_STEP_RANGES = ("step", "execute_", "profilerstep#")
_NS = 1000.0


@dataclass
class Spent:
    """Nanoseconds by group: in which it ran (`ran`), and in which nothing did until it began (`before`)."""

    count: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    before: Counter[str] = field(default_factory=Counter)

    def rows(self) -> list[BudgetRow]:
        """What took longest comes first."""
        names = self.count.keys() | self.ran.keys() | self.before.keys()
        found = [
            BudgetRow(
                name=name,
                count=self.count[name],
                ran_us=self.ran[name] / _NS,
                before_us=self.before[name] / _NS,
            )
            for name in names
        ]
        return sorted(found, key=lambda row: (-row.ran_us - row.before_us, row.name))


def spend_kernels(spent: Spent, activities: Sequence[Activity], window: Span) -> None:
    """Give the computing time within `window` to groups. `activities`: those that touch it, in order of their starts.

    Collectives and copies are counted here; their time counts where they ran alone, which is not known here.
    """
    at = window[0]
    for each in activities:
        group = {"kernel": group_of(each.name), "collective": COLLECTIVES, "copy": COPIES}[each.kind]
        spent.count[group] += 1
        if each.kind != "kernel":
            continue
        end = min(each.end, window[1])
        spent.ran[group] += max(0, end - max(each.start, at))
        at = max(at, end)


def count_steps(
    activities: Sequence[Activity], host: Sequence[HostEvent], window: Span, name: str | None
) -> tuple[int | None, str]:
    """(steps in `window`, what was counted): kernels or ranges of `name`, or ranges that servers mark steps with.

    One counts where its middle lies: the first one's range begins before the first kernel, which is the window's start.

    (None, "") where nothing in the trace marks a step. Raises ConfigError for a `name` that nothing has.
    """
    marks: list[HostEvent | Activity] = [each for each in host if not each.call]
    marks += activities if name is not None else ()
    words = _STEP_RANGES if name is None else (name.lower(),)
    seen = Counter(
        each.name
        for each in marks
        if each.name.lower().startswith(words) and window[0] <= (each.start + each.end) // 2 < window[1]
    )
    if name is not None and not seen:
        raise ConfigError(f"no kernel and no range begins with {name!r} within the window")
    if not seen:
        return None, ""
    return seen.total(), next(iter(seen)) if len(seen) == 1 else f"{len(seen)} names, such as {min(seen)}"
