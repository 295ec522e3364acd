"""Read an Nsight Systems report that was exported to SQLite: `nsys export --type sqlite REPORT.nsys-rep`.

Tables and columns: "SQLite Schema Reference" in the documentation of the Nsight Systems exporter,
https://docs.nvidia.com/nsight-systems/UserGuide/index.html. A table exists only where something was recorded. Times are
nanoseconds, names are ids of StringIds. A global id holds hardware, machine, process and thread in 8, 8, 24, 24 bits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.gaps import COLLECTIVES
from meltcore.measure.trace.trace import Activity, ActivityType, HostEvent, Trace, kernel_group

MAGIC = b"SQLite format 3\0"
_KERNELS, _GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_COPIES, _SETS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_CALLS, _SYSTEM, _RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "OSRT_API", "NVTX_EVENTS"
_THREAD_BITS = 24  # the lowest bits of a global id; the process is above them
_CORRELATION_BITS = 32  # correlations are numbered per process
# CUpti_ActivityMemcpyKind, of cupti_activity.h.
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


def read_nsight(path: Path) -> Trace:
    """Read an export. Raises ConfigError for another file, and for one that lacks a documented column."""
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
        """Yield the rows of a table, if it exists; columns of `optional` that do not exist are None."""
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
    """Return a correlation id that is unique over all processes of the report."""
    if correlation is None:
        return None
    return ((global_id or 0) >> _THREAD_BITS << _CORRELATION_BITS) + correlation
