"""Reads a trace from a file of the torch profiler or of Nsight Systems.

The torch profiler writes Chrome JSON (https://github.com/pytorch/kineto, libkineto's output_json.cpp): complete events
("ph": "X") with times in microseconds. "cat" is the type of an event. "args" hold the device, the stream, and the
correlation id of a launch and its kernels. Kernels of CUDA graphs also have the id of the graph.

An export of Nsight Systems is SQLite: `nsys export --type sqlite REPORT.nsys-rep`. Tables and columns: "SQLite Schema
Reference" of the exporter, https://docs.nvidia.com/nsight-systems/UserGuide/index.html. A table exists only if it has
rows. Times are nanoseconds, names are ids of StringIds. A global id holds hardware, machine, process and thread in 8,
8, 24, 24 bits.
"""

from __future__ import annotations

import gzip
import shutil
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.process import describe_exit, run
from meltcore.measure.documents.gaps import COLLECTIVES
from meltcore.measure.trace.trace import Activity, ActivityType, HostEvent, Trace, kernel_group

_REPORT, _UNFINISHED_REPORT = ".nsys-rep", ".qdstrm"
_EXPORT_LIMIT_S = 600.0  # a minute of a busy GPU has millions of rows
_TYPES: dict[str, ActivityType] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_CHROME_CALLS = ("cuda_runtime", "cuda_driver")
_CHROME_HOST = (*_CHROME_CALLS, "cpu_op", "python_function", "user_annotation", "overhead")
MAGIC = b"SQLite format 3\0"
_KERNELS, _GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_COPIES, _SETS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_CALLS, _SYSTEM, _RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "OSRT_API", "NVTX_EVENTS"
_THREAD_BITS = 24  # the lowest bits of a global id; the process is above them
_CORRELATION_BITS = 32  # correlations are numbered per process
# CUpti_ActivityMemcpyKind, of cupti_activity.h.
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


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
    """Return the trace of Chrome events.

    Events of other categories, and events without time or duration, are skipped.
    """
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
        elif category in _CHROME_HOST:
            thread = f"{event.get('pid')}/{event.get('tid')}"
            host.append(HostEvent(name, thread, start, end, category in _CHROME_CALLS, args.get("correlation")))
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
    """Export a report of Nsight Systems to SQLite with the `nsys` of this machine. Raises ConfigError on failure."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ConfigError(
            f"{report} needs nsys, which is not installed here: export it elsewhere with `nsys export --type sqlite`"
        )
    command = [nsys, "export", "--type", "sqlite", "--output", str(target), str(report)]
    completed = run(command, limit_s=_EXPORT_LIMIT_S)
    if completed.returncode is None:
        raise ConfigError(f"nsys did not export {report} within {_EXPORT_LIMIT_S:.0f} s")
    if completed.returncode != 0 or not target.is_file():
        lines = (completed.stderr or completed.stdout).decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else describe_exit(completed.returncode)
        raise ConfigError(f"nsys could not export {report}: {reason}")


def _to_ns(microseconds: float) -> int:
    return round(float(microseconds) * 1000)


def read_nsight(path: Path) -> Trace:
    """Read an SQLite export of Nsight Systems.

    Raises ConfigError for another file, and if a documented column is missing.
    """
    try:
        with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True) as database:
            export = _Export(database)
            activities = sorted(export.activities(), key=lambda event: event.start)
            host = sorted(export.host(), key=lambda event: event.start)
        database.close()
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read {path} as an export of Nsight Systems: {error}") from error
    return Trace(activities, host)


class _Export:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        names = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._columns = {table: self._read_columns(table) for (table,) in names}
        self._strings: Mapping[int, str] = dict(self._rows("StringIds", ("id", "value")))

    def activities(self) -> Iterator[Activity]:
        """Yield kernels, copies, and graphs recorded as a whole (`--cuda-graph-trace=graph`)."""
        common_columns = ("start", "end", "deviceId", "streamId", "correlationId")
        for *span, name, process, graph in self._rows(
            _KERNELS, (*common_columns, "demangledName"), ("globalPid", "graphId")
        ):
            text = self._strings.get(name, f"kernel {name}")
            type_: ActivityType = "collective" if kernel_group(text) == COLLECTIVES else "kernel"
            yield _make_activity(text, type_, span, process, graph)
        for *span, graph, process in self._rows(_GRAPHS, (*common_columns, "graphId"), ("globalPid",)):
            yield _make_activity(f"whole graph {graph}", "kernel", span, process, graph)
        for *span, copy_kind, process in self._rows(_COPIES, (*common_columns, "copyKind"), ("globalPid",)):
            yield _make_activity(f"Memcpy {_COPY_KINDS.get(copy_kind, f'kind {copy_kind}')}", "copy", span, process)
        for *span, process in self._rows(_SETS, common_columns, ("globalPid",)):
            yield _make_activity("Memset", "copy", span, process)

    def host(self) -> Iterator[HostEvent]:
        """Yield CUDA calls, system calls such as waits, and NVTX ranges."""
        for start, end, thread, name, correlation in self._rows(
            _CALLS, ("start", "end", "globalTid", "nameId", "correlationId")
        ):
            key = _correlation_key(correlation, thread)
            yield HostEvent(self._strings.get(name, ""), str(thread), start, end, is_call=True, correlation=key)
        for start, end, thread, name in self._rows(_SYSTEM, ("start", "end", "globalTid", "nameId")):
            yield HostEvent(self._strings.get(name, ""), str(thread), start, end)
        for start, end, thread, text, name in self._rows(_RANGES, ("start", "end", "globalTid"), ("text", "textId")):
            if end is not None and end > start:  # NVTX marks have no end
                yield HostEvent(text or self._strings.get(name, ""), str(thread), start, end)

    def _read_columns(self, table: str) -> set[str]:
        return {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}

    def _rows(
        self, table: str, required_columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table, if it exists. Columns of `optional` that do not exist are None."""
        existing = self._columns.get(table)
        if existing is None:
            return
        missing_columns = [column for column in required_columns if column not in existing]
        if missing_columns:
            raise ConfigError(f"{table} has no column {', '.join(missing_columns)}: this is not a documented export")
        columns = [f'"{column}"' if column in existing else "NULL" for column in (*required_columns, *optional)]
        yield from self._database.execute(" ".join(("SELECT", ", ".join(columns), "FROM", f'"{table}"')))


def _make_activity(
    name: str, type_: ActivityType, span: Sequence[Any], process: int | None, graph: int | None = None
) -> Activity:
    start, end, device, stream, correlation = span
    return Activity(name, type_, device, stream, start, end, _correlation_key(correlation, process), graph or None)


def _correlation_key(correlation: int | None, global_id: int | None) -> int | None:
    """Return a correlation id that is unique over all processes of the report, or None without a correlation."""
    if correlation is None:
        return None
    return ((global_id or 0) >> _THREAD_BITS << _CORRELATION_BITS) + correlation
