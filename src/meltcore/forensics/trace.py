"""A torch profiler's trace (Chrome JSON, plain or gzipped) as GPU activities and the host calls that caused them.

Form: https://github.com/pytorch/kineto (libkineto's output_json.cpp): complete events ("ph": "X") with times in
microseconds; "cat" says what they are, "args" hold device, stream, the correlation of a launch with what it launched,
and for kernels of CUDA graphs the graph's id.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from meltcore.errors import ConfigError
from meltcore.forensics.intervals import Span

Kind = Literal["kernel", "collective", "copy"]

_GPU_KINDS: dict[str, Kind] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_CALLS = ("cuda_runtime", "cuda_driver")
_HOST = (*_CALLS, "cpu_op", "python_function", "user_annotation", "overhead")
_COLLECTIVE = "nccl"


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


def read_trace(path: Path | str) -> Trace:
    """Raises ConfigError for a file that is no such trace, or holds nothing a GPU did."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = msgspec.json.decode(data)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise ConfigError(f"{path} is no Chrome trace: it has no traceEvents")
    trace = parse_events(events)
    if not trace.activities:
        raise ConfigError(f"{path} holds nothing that a GPU did: was it recorded on one, with CUDA activities?")
    return trace


def parse_events(events: Iterable[Any]) -> Trace:
    """Events of other kinds, and those without a duration, are left out."""
    activities: list[Activity] = []
    host: list[HostEvent] = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or "dur" not in event:
            continue
        kind, start = event.get("cat", ""), _ns(event["ts"])
        end, args, name = start + _ns(event["dur"]), event.get("args") or {}, str(event.get("name", ""))
        if kind in _GPU_KINDS:
            collective = kind == "kernel" and _COLLECTIVE in name.lower()
            activities.append(
                Activity(
                    name=name,
                    kind="collective" if collective else _GPU_KINDS[kind],
                    device=int(args.get("device", event.get("pid", 0)) or 0),
                    stream=int(args.get("stream", event.get("tid", 0)) or 0),
                    start=start,
                    end=end,
                    correlation=args.get("correlation"),
                    graph=args.get("graph id") or None,
                )
            )
        elif kind in _HOST:
            thread = f"{event.get('pid')}/{event.get('tid')}"
            host.append(HostEvent(name, thread, start, end, kind in _CALLS, args.get("correlation")))
    return Trace(sorted(activities, key=lambda each: each.start), sorted(host, key=lambda each: each.start))


def _ns(microseconds: float) -> int:
    return round(float(microseconds) * 1000)
