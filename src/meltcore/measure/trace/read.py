"""Reads a trace from a file of the torch profiler or of Nsight Systems.

The torch profiler writes Chrome JSON (https://github.com/pytorch/kineto, libkineto's output_json.cpp): complete events
("ph": "X") with times in microseconds. "cat" says what they are; "args" hold device, stream, the correlation of a
launch with what it launched and, for kernels of CUDA graphs, the id of the graph.
"""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from meltcore.common import process
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.gaps import COLLECTIVES
from meltcore.measure.trace.nsight import MAGIC, read_nsight
from meltcore.measure.trace.trace import Activity, ActivityType, HostEvent, Trace, kernel_group

_REPORT, _UNFINISHED_REPORT = ".nsys-rep", ".qdstrm"
_EXPORT_LIMIT_S = 600.0  # a minute of a busy GPU has millions of rows
_TYPES: dict[str, ActivityType] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_CALLS = ("cuda_runtime", "cuda_driver")
_HOST = (*_CALLS, "cpu_op", "python_function", "user_annotation", "overhead")


def read_trace(path: Path | str) -> Trace:
    """Read a trace of the torch profiler, an SQLite export of Nsight Systems, or its report, which is exported first.

    Raises ConfigError for another file, one without GPU activity, or a report that cannot be exported here.
    """
    path = Path(path)
    if path.suffix == _UNFINISHED_REPORT:
        raise ConfigError(f"{path} is not a report yet: Nsight Systems' QdstrmImporter makes a {_REPORT} file of it")
    if path.suffix != _REPORT:
        return _read(path)
    with TemporaryDirectory() as folder:
        target = Path(folder) / "report.sqlite"
        export(path, target)
        return _read(target)


def read_chrome(path: Path) -> Trace:
    """Read Chrome JSON, plain or gzipped. Raises ConfigError for another file."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        content = msgspec.json.decode(data)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ConfigError(f"{path} is not a Chrome trace: it has no traceEvents")
    try:
        return parse_events(events)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} holds an event with invalid fields: {error}") from error


def parse_events(events: Iterable[Any]) -> Trace:
    """Make a trace of Chrome events. Events of other categories, and events without time or duration, are skipped."""
    activities: list[Activity] = []
    host: list[HostEvent] = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or not {"ts", "dur"} <= event.keys():
            continue
        category, start = event.get("cat", ""), _to_ns(event["ts"])
        end, args, name = start + _to_ns(event["dur"]), event.get("args") or {}, str(event.get("name", ""))
        if category in _TYPES:
            is_collective = category == "kernel" and kernel_group(name) == COLLECTIVES
            activities.append(
                Activity(
                    name=name,
                    type="collective" if is_collective else _TYPES[category],
                    device=int(args.get("device", event.get("pid", 0)) or 0),
                    stream=int(args.get("stream", event.get("tid", 0)) or 0),
                    start=start,
                    end=end,
                    correlation=args.get("correlation"),
                    graph=args.get("graph id") or None,
                )
            )
        elif category in _HOST:
            thread = f"{event.get('pid')}/{event.get('tid')}"
            host.append(HostEvent(name, thread, start, end, category in _CALLS, args.get("correlation")))
    return Trace(sorted(activities, key=lambda record: record.start), sorted(host, key=lambda record: record.start))


def _read(path: Path) -> Trace:
    try:
        with path.open("rb") as file:
            is_sqlite = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    trace = read_nsight(path) if is_sqlite else read_chrome(path)
    if not trace.activities:
        raise ConfigError(f"{path} holds no GPU activity: was it recorded on a GPU, with CUDA activities?")
    return trace


def export(report: Path, target: Path) -> None:
    """Export a report of Nsight Systems to SQLite with the `nsys` of this machine. Raises ConfigError."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ConfigError(
            f"{report} needs nsys, which is not installed here: export it elsewhere with `nsys export --type sqlite`"
        )
    command = [nsys, "export", "--type", "sqlite", "--output", str(target), str(report)]
    completed = process.run(command, limit_s=_EXPORT_LIMIT_S)
    if completed.returncode is None:
        raise ConfigError(f"nsys did not export {report} within {_EXPORT_LIMIT_S:.0f} s")
    if completed.returncode != 0 or not target.is_file():
        lines = (completed.stderr or completed.stdout).decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else process.describe_exit(completed.returncode)
        raise ConfigError(f"nsys could not export {report}: {reason}")


def _to_ns(microseconds: float) -> int:
    return round(float(microseconds) * 1000)
