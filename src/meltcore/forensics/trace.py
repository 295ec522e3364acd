"""A trace: what GPUs did, and the host calls that caused it. Read by chrome.py or nsight.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meltcore.forensics.intervals import Span

Kind = Literal["kernel", "collective", "copy"]


@dataclass(frozen=True)
class Activity:
    """Something a GPU did. Times in nanoseconds. `correlation` names the call that launched it, `graph` its graph."""

    name: str
    kind: Kind
    device: int
    stream: int
    start: int
    end: int
    correlation: int | None = None
    graph: int | None = None


@dataclass(frozen=True)
class HostEvent:
    """Something a host thread did. `call`: it is a call into CUDA, with `correlation`."""

    name: str
    thread: str
    start: int
    end: int
    call: bool = False
    correlation: int | None = None

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True)
class Trace:
    """Both lists in order of their starts."""

    activities: list[Activity]
    host: list[HostEvent]
