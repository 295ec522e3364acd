"""Builds SQLite exports after the documentation of the Nsight Systems exporter."""

import sqlite3
from pathlib import Path

PROCESS, THREAD = 4242, 17

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, graphNodeId INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL
);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL
);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER,
    nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER
);
CREATE TABLE OSRT_API (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER,
    nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, nestingLevel INTEGER, callchainId INTEGER NOT NULL
);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER
);
"""


class Export:
    """Adds rows one by one; times are microseconds, as in `traces`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = sqlite3.connect(path)
        self._database.executescript(SCHEMA)
        self._strings: dict[str, int] = {}
        self._correlation = 0

    def launch(self, start: float, dur: float = 2, name: str = "cudaLaunchKernel_v7000", process: int = PROCESS) -> int:
        self._correlation += 1
        row = (_ns(start), _ns(start + dur), 0, _tid(process), self._correlation, self._string(name), 0, None)
        self._add("CUPTI_ACTIVITY_KIND_RUNTIME", row)
        return self._correlation

    def kernel(
        self, start: float, dur: float, name: str, correlation: int, stream: int = 7, process: int = PROCESS
    ) -> None:
        text = self._string(name)
        where = (_ns(start), _ns(start + dur), 0, 1, None, stream, correlation, _pid(process))
        self._add("CUPTI_ACTIVITY_KIND_KERNEL", (*where, text, text, text, None))

    def graph(self, start: float, dur: float, correlation: int, graph: int) -> None:
        row = (_ns(start), _ns(start + dur), 0, 1, None, 7, correlation, _pid(PROCESS), graph, graph + 1)
        self._add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", row)

    def copy(self, start: float, dur: float, correlation: int, stream: int = 8) -> None:
        row = (_ns(start), _ns(start + dur), 0, 1, None, stream, correlation, _pid(PROCESS), 4096, 1)
        self._add("CUPTI_ACTIVITY_KIND_MEMCPY", row)

    def call(self, start: float, dur: float, name: str) -> None:
        """A CUDA call that launches nothing."""
        row = (_ns(start), _ns(start + dur), 0, _tid(PROCESS), None, self._string(name), 0, None)
        self._add("CUPTI_ACTIVITY_KIND_RUNTIME", row)

    def system(self, start: float, dur: float, name: str) -> None:
        row = (_ns(start), _ns(start + dur), 0, _tid(PROCESS), 1, self._string(name), 0, 0, 0)
        self._add("OSRT_API", row)

    def range(self, start: float, dur: float | None, name: str, *, registered: bool = False) -> None:
        """An NVTX range, or a mark without `dur`. `registered`: its text is in StringIds."""
        end = None if dur is None else _ns(start + dur)
        text, text_id = (None, self._string(name)) if registered else (name, None)
        row = (_ns(start), end, 59, None, None, None, text, _tid(PROCESS), None, text_id, 0)
        self._add("NVTX_EVENTS", row)

    def done(self) -> Path:
        self._database.commit()
        self._database.close()
        return self.path

    def drop(self, sql: str) -> None:
        self._database.execute(sql)

    def _string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self._add("StringIds", (self._strings[text], text))
        return self._strings[text]

    def _add(self, table: str, row: tuple[object, ...]) -> None:
        self._database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def one_of_each_exported(path: Path) -> Path:
    """The activities of `traces.one_of_each` as an export."""
    made = Export(path)
    made.kernel(0, 100, "first", made.launch(-50))
    made.kernel(105, 95, "second", made.launch(-40))
    made.range(190, 36, "prepare")
    made.kernel(230, 70, "third", made.launch(228))
    made.call(290, 55, "cudaStreamSynchronize_v3020")
    made.kernel(350, 50, "fourth", made.launch(348))
    made.copy(400, 40, made.launch(300, name="cudaMemcpyAsync_v3020"))
    made.kernel(440, 60, "fifth", made.launch(310))
    made.kernel(480, 80, "ncclDevKernel_AllReduce_Sum", made.launch(320), stream=9)
    made.kernel(530, 70, "sixth", made.launch(325))
    made.system(595, 200, "epoll_wait")
    made.kernel(800, 50, "seventh", made.launch(798))
    made.kernel(962, 18, "eighth", made.launch(960))
    made.kernel(990, 10, "ninth", 9999)
    return made.done()


def _ns(microseconds: float) -> int:
    return round((microseconds + 1000) * 1000)  # an export counts from its beginning, never below 0


def _pid(process: int) -> int:
    return 281474976710656 | process << 24


def _tid(process: int) -> int:
    return _pid(process) | THREAD
