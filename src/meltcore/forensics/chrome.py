"""The torch profiler's traces: Chrome JSON, plain or gzipped.

Form: https://github.com/pytorch/kineto (libkineto's output_json.cpp): complete events ("ph": "X") with times in
microseconds; "cat" says what they are, "args" hold device, stream, the correlation of a launch with what it launched,
and for kernels of CUDA graphs the graph's id.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from meltcore.errors import ConfigError
from meltcore.forensics.groups import group_of
from meltcore.forensics.trace import Activity, HostEvent, Kind, Trace
from meltcore.results.gaps import COLLECTIVES

_GPU_KINDS: dict[str, Kind] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_CALLS = ("cuda_runtime", "cuda_driver")
_HOST = (*_CALLS, "cpu_op", "python_function", "user_annotation", "overhead")


def read_chrome(path: Path) -> Trace:
    """Raises ConfigError for a file that is no such trace."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = msgspec.json.decode(data)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise ConfigError(f"{path} is no Chrome trace: it has no traceEvents")
    try:
        return parse_events(events)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} holds an event that is not of a trace's form: {error}") from error


def parse_events(events: Iterable[Any]) -> Trace:
    """Events of other kinds, and those without a time or a duration, are left out."""
    activities: list[Activity] = []
    host: list[HostEvent] = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or not {"ts", "dur"} <= event.keys():
            continue
        kind, start = event.get("cat", ""), _ns(event["ts"])
        end, args, name = start + _ns(event["dur"]), event.get("args") or {}, str(event.get("name", ""))
        if kind in _GPU_KINDS:
            collective = kind == "kernel" and group_of(name) == COLLECTIVES
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
