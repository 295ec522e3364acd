"""A whole trace to its reports: one a GPU, all over the same window."""

from __future__ import annotations

from dataclasses import dataclass

from meltcore.errors import ConfigError
from meltcore.forensics.gaps import analyse, devices
from meltcore.forensics.intervals import Span
from meltcore.forensics.trace import Trace
from meltcore.results.gaps import GapReport

_NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a trace is looked at. `device`: one GPU (None: all); times in milliseconds from the first activity on.

    `activity_share`: how active that GPU was by its own counters meanwhile; `step`: how the name of what marks a step
    begins.
    """

    device: int | None = None
    from_ms: float | None = None
    to_ms: float | None = None
    activity_share: float | None = None
    step: str | None = None


def profile(trace: Trace, wanted: Wanted) -> list[GapReport]:
    """Raises ConfigError for a window without time in it, and for activity of one GPU beside a trace of several."""
    chosen = devices(trace) if wanted.device is None else [wanted.device]
    if wanted.activity_share is not None and len(chosen) > 1:
        raise ConfigError(f"activity is of one GPU, and the trace has {len(chosen)}: say which with --device")
    window = _window(trace, wanted)
    return [analyse(trace, device, window, wanted.activity_share, wanted.step) for device in chosen]


def _window(trace: Trace, wanted: Wanted) -> Span | None:
    if wanted.from_ms is None and wanted.to_ms is None:
        return None
    first = min(each.start for each in trace.activities)
    last = max(each.end for each in trace.activities)
    start = first + round((wanted.from_ms or 0.0) * _NS_PER_MS)
    end = last if wanted.to_ms is None else first + round(wanted.to_ms * _NS_PER_MS)
    if start >= end:
        until = "the last activity at" if wanted.to_ms is None else "--to-ms"
        raise ConfigError(
            f"--from-ms {(start - first) / _NS_PER_MS:g} is not before {until} {(end - first) / _NS_PER_MS:g}"
        )
    return start, end
