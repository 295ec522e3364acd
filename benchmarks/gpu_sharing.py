"""How two kinds of work share one GPU in time: latency of interactive work and throughput of busy work, by means.

Two synthetic kernels stand for engines: `decode` reads and writes 64 MB per launch in many short launches, `gemm`
multiplies 8192 x 8192 matrices in few long ones. Interactive requests of one arrive at random (20 % of the GPU's time)
while the other runs without a pause; then the other way round. A latency begins at the arrival. A row's peer is the
same work alone in a process. The means:

- time-slicing: two processes; the driver lets them take turns.
- pacing: the same, and the busy process waits between steps for marks of the interactive one, as engines do
  (`engine/host/step_pacing.py`), with long steps and with steps of 10 ms while the other works.
- streams: two threads of one process, streams alike or with priorities.
- green: two threads, each with SMs of its own.
- MPS: two processes with a daemon of our own, which is ended afterwards; plain, with 75 % of the SMs for the busy
  process, with a lower priority for it, and with pacing.

    python benchmarks/gpu_sharing.py --budget 125 --out OUT
    python benchmarks/gpu_sharing.py --device cpu --small
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import sharing_work
from bench_output import Row, need_gpu, write_result
from sharing_work import FULL, SMALL, Kind, Order, Outcome, PairOrder, Sizes

from meltcore.common.errors import MeltcoreError
from meltcore.common.process import ProcessError, describe_exit, end_group, start
from meltcore.fleet.processes.mps import MpsDaemon
from meltcore.protocol.step_marks import make_marks_file
from meltcore.settings.config import EngineSharing

LOAD = 0.2  # of the GPU's time, by interactive requests alone
INTERACTIVE_STEPS: dict[Kind, int] = {"decode": 4, "gemm": 1}  # of a request, one unit each
BUSY_UNITS = 8  # of a busy step
SHORT_STEP_MS = 10.0
START_LIMIT_S, MAKE_LIMIT_S = 40.0, 10.0
Works: TypeAlias = tuple[Kind, Kind]  # interactive, busy
PAIRS: tuple[Works, ...] = (("decode", "gemm"), ("gemm", "decode"))
PROCESSES = {"time-slicing": None, "pacing": 1e6, "pacing, short steps": SHORT_STEP_MS}  # the limit of steps, by means
THREADS: dict[str, dict[str, Any]] = {  # PairOrder's fields, by means
    "streams": {"means": "streams"},
    "streams, priority": {"means": "priority"},
    **{f"green, {num_sms} SMs": {"means": "green", "num_sms": num_sms} for num_sms in (16, 32, 64)},
}
MPS: dict[str, dict[str, str]] = {  # the busy process's environment, by means
    "MPS": {},
    "MPS, busy at 75 %": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "75"},
    "MPS, busy at low priority": {"CUDA_MPS_CLIENT_PRIORITY": "1"},
}
NUM_ALONE = 4  # results to which the others are compared
FAILURES = (MeltcoreError, OSError, msgspec.MsgspecError)
WORKER = [sys.executable, __file__]


class Side:
    """A process with one or both sides of the work, which answers each order with one line of JSON."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Start the process, without waiting for it. environment: added to ours."""
        self._process = start(
            [*WORKER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            environment=os.environ | environment,
        )

    def send(self, order: Order | PairOrder) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    def read(self, limit_s: float) -> dict[str, Any]:
        """The next line. Raises ProcessError where none comes in time, or one that says why there is no result."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line, deadline_s = b"", time.monotonic() + limit_s
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise ProcessError(f"a worker gave no answer within {limit_s:.0f} s")
                data = os.read(self._process.stdout.fileno(), 65_536)
                if not data:
                    raise ProcessError(f"a worker ended: {describe_exit(self._process.wait(10))}")
                line += data
        found: dict[str, Any] = msgspec.json.decode(line)
        if "error" in found:
            raise ProcessError(str(found["error"]))
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        end_group(self._process, 1.0)


class Workers:
    """The processes of some means, which are started when the first needs them, and again after a failure."""

    def __init__(self, *commands: tuple[list[str], Mapping[str, str]]) -> None:
        """Name arguments and environment of each."""
        self._commands = commands
        self._sides: list[Side] = []

    def sides(self, left_s: float) -> list[Side]:
        """The processes, ready for orders. Raises ProcessError where one does not start in time."""
        if not self._sides:
            for arguments, environment in self._commands:
                self._sides.append(Side(arguments, environment))
            deadline_s = time.monotonic() + min(START_LIMIT_S, max(1.0, left_s))
            for side in self._sides:
                side.read(max(0.0, deadline_s - time.monotonic()))
        return self._sides

    def end(self) -> None:
        """End all: after a failure a late answer would be taken for that of a later order."""
        for side in self._sides:
            side.end()
        self._sides = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Result(NamedTuple):
    """One means on one pair of works. The latencies of interactive requests, in ms, and the busy units/s."""

    means: str
    interactive: Kind
    busy: Kind
    latencies_ms: list[float]
    busy_rate: float
    waited: float  # share of the busy side's time that it waited in step pacing
    facts: dict[str, Any]

    def percentile(self, percent: int) -> float:
        """A percentile by nearest rank."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Bench:
    """Runs the means one after the other while there is time, and keeps what has been measured in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.seconds: float = options.seconds
        self.on_gpu = options.device == "cuda"
        self.results: list[Result] = []
        self.notes: list[str] = []
        self.alone: dict[tuple[str, Kind], Result] = {}
        self._only_mps = options.only == "mps"
        self._budget_s: float = options.budget
        self._began_s = time.monotonic()
        self._out: Path | None = options.out
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
        self._marks: Path | None = None
        small = ["--small"] if options.small else []
        self._one = ["--worker", "one", "--device", options.device, *small]
        self._pair = ["--worker", "pair", *small]

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget_s - (time.monotonic() - self._began_s)

    def note(self, text: str) -> None:
        print(f"note: {text}", flush=True)
        self.notes.append(text)
        self._write()

    def add(self, result: Result) -> None:
        """Keep a result and write all of them."""
        self.results.append(result)
        if result.means in ("alone interactive", "alone busy"):
            self.alone[result.means, result.interactive] = result
        tail = f"{result.percentile(95):.2f} ms p95" if result.latencies_ms else ""
        print(
            f"{result.means:22} {result.interactive}/{result.busy}: {tail} {result.busy_rate:.1f} units/s", flush=True
        )
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            rows = [each._asdict() for each in self.results]
            (self._out / "results.json").write_text(json.dumps({"notes": self.notes, "results": rows}))

    def config(self, priority_class: str, step_ms: float) -> EngineSharing | None:
        assert self._marks is not None
        return EngineSharing(priority_class=priority_class, marks=(str(self._marks),), step_ms=step_ms)  # type: ignore[arg-type]

    def orders(self, pair: Works, step_ms: float | None = None) -> tuple[Order, Order]:
        """Orders for both sides. step_ms: of the busy side's steps under step pacing; None: without it."""
        start_s = time.monotonic() + 0.1
        alone = self.alone["alone interactive", pair[0]]
        common: dict[str, Any] = {"start_s": start_s, "seconds": self.seconds}
        configs = (None, None)
        if step_ms is not None:
            configs = (self.config("interactive", step_ms), self.config("standard", step_ms))
        return (
            Order(
                role="interactive",
                kind=pair[0],
                steps=INTERACTIVE_STEPS[pair[0]],
                rate=LOAD / alone.facts["request_s"],
                sharing=configs[0],
                **common,
            ),
            Order(role="busy", kind=pair[1], units=BUSY_UNITS, sharing=configs[1], **common),
        )

    # --- means

    def run(self) -> None:
        """Measure all means that the machine has."""
        with ExitStack() as stack:
            folder = sharing_work.new_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._marks = folder / "marks"
            make_marks_file(self._marks)
            with Workers((self._one, {}), (self._one, {})) as workers:
                self.measure_alone(workers.sides(self.left_s)[0])
                for means, step_ms in ({} if self._only_mps else PROCESSES).items():
                    self.attempt(means, workers, partial(self.two_processes, means, step_ms))
            if not self.on_gpu:
                self.note("streams, green contexts and MPS: not measured: they need a GPU")
                return
            with Workers((self._pair, {})) as workers:
                for means, settings in ({} if self._only_mps else THREADS).items():
                    self.attempt(means, workers, partial(self.two_threads, means, settings))
            self.measure_mps(folder / "mps")

    def attempt(self, means: str, workers: Workers, measure: Callable[[Workers, Works], Result]) -> None:
        """Measure one means. Where it fails, a note says why, its processes are ended, and the next is measured."""
        for works in PAIRS:
            name = means if works == PAIRS[0] else f"{means}, {works[0]} beside {works[1]}"
            if self.left_s < 3 * self.seconds:
                self.note(f"{name}: not measured: the time was over")
                return
            try:
                self.add(measure(workers, works))
            except FAILURES as error:
                self.note(f"{name}: not measured: {' '.join(str(error).split())[:400]}")
                workers.end()
                return

    def read(self, side: Side) -> dict[str, Any]:
        """An answer to an order. It has the time for twice the measurement, and for kernels that are made first."""
        return side.read(min(2 * self.seconds + MAKE_LIMIT_S, max(1.0, self.left_s)))

    def measure_alone(self, side: Side) -> None:
        for kind in ("decode", "gemm"):
            order = Order(role="busy", kind=kind, units=BUSY_UNITS, start_s=time.monotonic(), seconds=self.seconds / 2)
            side.send(order)
            outcome = msgspec.convert(self.read(side), Outcome)
            self.add(Result("alone busy", kind, kind, [], rate_of(outcome), 0.0, {"unit_ms": 1000 * outcome.unit_s}))
            request_s = INTERACTIVE_STEPS[kind] / rate_of(outcome)
            self.alone["alone interactive", kind] = Result("", kind, kind, [], 0, 0, {"request_s": request_s})
            order = self.orders((kind, kind))[0]
            side.send(order)
            latencies = [1000 * each for each in msgspec.convert(self.read(side), Outcome).latencies_s]
            self.add(Result("alone interactive", kind, kind, latencies, 0.0, 0.0, {"request_s": request_s}))

    def two_processes(self, means: str, step_ms: float | None, workers: Workers, works: Works) -> Result:
        """Measure two processes. step_ms: see `orders`."""
        sides = workers.sides(self.left_s)
        for side, order in zip(sides, self.orders(works, step_ms), strict=True):
            side.send(order)
        outcomes = [msgspec.convert(self.read(side), Outcome) for side in sides]
        return result_of(means, works, outcomes[0], outcomes[1], {})

    def two_threads(self, means: str, settings: dict[str, Any], workers: Workers, works: Works) -> Result:
        """Measure two threads of one process."""
        (side,) = workers.sides(self.left_s)
        interactive, busy = self.orders(works)
        side.send(PairOrder(interactive=interactive, busy=busy, **settings))
        found = self.read(side)
        sides = [msgspec.convert(found[role], Outcome) for role in ("interactive", "busy")]
        return result_of(means, works, sides[0], sides[1], {"sms": found["sms"]})

    def measure_mps(self, folder: Path) -> None:
        """Measure two processes under an MPS daemon of our own."""
        if self.left_s < 6 * self.seconds:
            self.note("MPS: not measured: the time was over")
            return
        try:
            with ExitStack() as stack:
                daemon = MpsDaemon(folder)
                stack.callback(daemon.stop)
                daemon.start()
                self.note(f"MPS: a daemon of user id {os.getuid()} with folders of its own")
                for means, extra in MPS.items():
                    environment = daemon.environment
                    with Workers((self._one, environment), (self._one, environment | extra)) as workers:
                        self.attempt(means, workers, partial(self.two_processes, means, None))
                        if not extra:
                            self.attempt(
                                "MPS and pacing", workers, partial(self.two_processes, "MPS and pacing", SHORT_STEP_MS)
                            )
                print(f"MPS servers: {daemon.servers() or 'none'}", flush=True)
        except FAILURES as error:
            self.note(f"MPS: not measured: {' '.join(str(error).split())[:400]}")

    # --- rows

    def rows(self) -> list[Row]:
        """Rows of the result file: percentiles beside those alone, and the busy side's share of its rate alone."""
        rows = []
        for result in self.results:
            if result.means == "alone busy":
                continue
            alone = self.alone["alone interactive", result.interactive]
            is_alone = result is alone
            beside = "" if is_alone else f" beside {result.busy}"
            work = f"{'alone' if is_alone else result.means}: {result.interactive}{beside}"
            for percent in (50, 95, 99):
                value, peer = result.percentile(percent), alone.percentile(percent)
                peer_part: dict[str, Any] = (
                    {} if is_alone else {"peer": "alone", "peer_value": peer, "ratio": peer / value}
                )
                rows.append(Row(work=work, unit=f"p{percent} ms", value=value, **peer_part))
            rows.append(Row(work=work, unit="requests", value=len(result.latencies_ms)))
            if not is_alone:
                share = result.busy_rate / self.alone["alone busy", result.busy].busy_rate
                rows.append(Row(work=work, unit="busy share of alone", value=share))
            if "sms" in result.facts:
                # Only with the SMs of its side: shows whether a partition has an effect.
                unit_ms = result.facts["unit_ms"][0]
                rows.append(Row(work=work, unit="unit ms of the interactive side, without the other", value=unit_ms))
        return rows

    def print_summary(self) -> None:
        """Print one line per means and pair: latencies over alone, and the busy share."""
        heads = " ".join(f"{f'p{percent} ms':>8}" for percent in (50, 95, 99))
        print(f"\n{'means':26} {'works':14} {'n':>5} {heads} {'p95/alone':>9} {'busy':>6}")
        for result in self.results:
            if not result.latencies_ms:
                continue
            alone = self.alone["alone interactive", result.interactive]
            busy = result.busy_rate / self.alone["alone busy", result.busy].busy_rate if result.busy_rate else 0.0
            values = [result.percentile(percent) for percent in (50, 95, 99)]
            print(
                f"{result.means:26} {result.interactive + '/' + result.busy:14} {len(result.latencies_ms):5d} "
                + " ".join(f"{value:8.2f}" for value in values)
                + f" {values[1] / alone.percentile(95):9.2f} {busy:6.2f}"
            )
        for note in self.notes:
            print(f"note: {note}")


def result_of(means: str, works: Works, interactive: Outcome, busy: Outcome, facts: dict[str, Any]) -> Result:
    """Put both sides' outcomes together. Raises ProcessError where no request ended."""
    latencies = [1000 * each for each in interactive.latencies_s]
    if not latencies:
        raise ProcessError("no interactive request ended")
    facts = facts | {"unit_ms": [1000 * interactive.unit_s, 1000 * busy.unit_s]}
    waited = busy.waited_s / busy.elapsed_s if busy.elapsed_s else 0.0
    return Result(means, *works, latencies, rate_of(busy), waited, facts)


def rate_of(outcome: Outcome) -> float:
    """Units per second."""
    return outcome.units / outcome.elapsed_s


def serve_worker(worker: Literal["one", "pair"], device: str, sizes: Sizes) -> int:
    """Serve orders; an error of torch or the driver, or a lack of cuda.bindings, is the last answer."""
    try:
        if worker == "one":
            sharing_work.serve_one(device, sizes)
        else:
            sharing_work.serve_pair(sizes)
    except Exception as error:
        sharing_work.answer({"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


def main() -> int:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="Small kernels, for a CPU or a quick look.")
    parser.add_argument("--seconds", type=float, default=2.5, help="Of each measurement (default: 2.5).")
    parser.add_argument("--budget", type=float, default=600.0, help="Seconds; later measurements are left out.")
    parser.add_argument("--out", type=Path, help="Folder for results.json, written as they come.")
    parser.add_argument("--only", choices=("mps",), help="Measure only these means, and the works alone.")
    parser.add_argument("--no-result-file", action="store_true", help="Print only.")
    parser.add_argument("--worker", choices=("one", "pair"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes: Sizes = SMALL if options.small else FULL
    if options.device == "cuda":
        need_gpu()
    if options.worker is not None:
        return serve_worker(options.worker, options.device, sizes)
    # The end of this process by `timeout` shall end the workers and the MPS daemon too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    bench = Bench(options)
    try:
        bench.run()
    except FAILURES as error:
        raise SystemExit(f"not measured: alone: {error}") from error
    finally:
        if len(bench.results) >= NUM_ALONE:
            if not options.no_result_file:
                versions = {"torch": metadata.version("torch")}
                write_result(bench.rows(), versions, bench.notes, gpus=1 if bench.on_gpu else 0)
            bench.print_summary()
    return 0


if __name__ == "__main__":
    sys.exit(main())
