"""Builds traces in the format of the torch profiler. Times are microseconds."""

import json
from pathlib import Path
from typing import Any

from meltcore.measure.trace.read import parse_events
from meltcore.measure.trace.trace import Trace

THREAD = 100


class TraceBuilder:
    """Adds events one by one; each launch gets the next correlation id."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def launch(self, start: float, dur: float = 2, name: str = "cudaLaunchKernel") -> int:
        self._correlation += 1
        self.host(start, dur, name, "cuda_runtime", correlation=self._correlation)
        return self._correlation

    def host(self, start: float, dur: float, name: str, kind: str = "cpu_op", **args: Any) -> None:
        self._add(kind, name, start, dur, pid=1, tid=THREAD, args=args)

    def kernel(
        self, start: float, dur: float, name: str, correlation: int | None = None, stream: int = 7, **args: Any
    ) -> None:
        self.gpu("kernel", start, dur, name, correlation, stream, **args)

    def gpu(
        self,
        kind: str,
        start: float,
        dur: float,
        name: str,
        correlation: int | None = None,
        stream: int = 7,
        **args: Any,
    ) -> None:
        fields = {
            "device": 0,
            "stream": stream,
            **({} if correlation is None else {"correlation": correlation}),
            **args,
        }
        self._add(kind, name, start, dur, pid=fields["device"], tid=stream, args=fields)

    def trace(self) -> Trace:
        return parse_events(self.events)

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return path

    def _add(self, kind: str, name: str, start: float, dur: float, **rest: Any) -> None:
        self.events.append({"ph": "X", "cat": kind, "name": name, "ts": start, "dur": dur, **rest})


def one_of_each() -> TraceBuilder:
    """A window of 1,000 us with a gap of every cause, each known to the nanosecond."""
    made = TraceBuilder()
    made.kernel(0, 100, "first", made.launch(-50))
    # kernel wait: launched long before; the GPU takes 5 us from one kernel to the next
    made.kernel(105, 95, "second", made.launch(-40))
    # late launch: an operator runs until the launch at 228
    made.host(190, 36, "aten::add")
    made.kernel(230, 70, "third", made.launch(228))
    # synchronization: the host waits from 290 to 345, launches at 348
    made.host(290, 55, "cudaStreamSynchronize", "cuda_runtime")
    made.kernel(350, 50, "fourth", made.launch(348))
    # exposed copy: 400 to 440 on another stream, then straight on
    made.gpu("gpu_memcpy", 400, 40, "Memcpy HtoD", made.launch(300, name="cudaMemcpyAsync"), stream=8)
    made.kernel(440, 60, "fifth", made.launch(310))
    # exposed communication: alone from 500 to 530, under a kernel until 560
    made.kernel(480, 80, "ncclDevKernel_AllReduce_Sum", made.launch(320), stream=9)
    made.kernel(530, 70, "sixth", made.launch(325))
    # no work: a recorded wait for a message
    made.host(595, 200, "zmq/poll.py(80): poll", "python_function")
    made.kernel(800, 50, "seventh", made.launch(798))
    # untraced host: nothing recorded from 850 to the launch at 960
    made.kernel(962, 18, "eighth", made.launch(960))
    # unknown: no launch recorded
    made.kernel(990, 10, "ninth")
    return made
