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

    python benchmarks/gpu_sharing.py --budget 140 --out OUT
    python benchmarks/gpu_sharing.py --device cpu --small
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sharing_work
from bench_output import Row, need_gpu, write_result
from sharing_work import FULL, SMALL, Kind, Order, Outcome, PairOrder, Sizes

from meltcore.config import SharingConfig
from meltcore.errors import ConfigError
from meltcore.fleet.mps import MpsDaemon
from meltcore.process import ProcessError, end_group, start
from meltcore.protocol.step_marks import make_marks_file

LOAD = 0.2  # of the GPU's time, by interactive requests alone
INTERACTIVE_STEPS: dict[Kind, int] = {"decode": 4, "gemm": 1}  # of a request, one unit each
BUSY_UNITS = 8  # of a busy step
SHORT_STEP_MS = 10.0
START_LIMIT_S, ANSWER_LIMIT_S, MPS_LIMIT_S = 60.0, 30.0, 10.0
GREEN_SMS = (16, 32, 64)  # of the interactive side
BUSY_PERCENT = 75  # CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
PAIRS: tuple[tuple[Kind, Kind], ...] = (("decode", "gemm"), ("gemm", "decode"))  # interactive, busy


class Side:
    """A process with one or both sides of the work, which answers each order with one line of JSON."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
        """Start the process; `wait_ready` waits for it."""
        self._process = start(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            environment=os.environ | (environment or {}),
        )

    def wait_ready(self) -> None:
        self.read(START_LIMIT_S)

    def send(self, order: Order | PairOrder) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    def read(self, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """The next line. Raises ProcessError where none comes in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line, deadline_s = b"", time.monotonic() + limit_s
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise ProcessError(f"a worker gave no answer within {limit_s:g} s")
                data = os.read(self._process.stdout.fileno(), 65_536)
                if not data:
                    raise ProcessError(f"a worker ended with code {self._process.wait(10)}")
                line += data
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        end_group(self._process, 2.0)


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

    def __init__(self, options: argparse.Namespace, out: Path | None) -> None:
        self.options = options
        self.seconds: float = options.seconds
        self.results: list[Result] = []
        self.notes: list[str] = []
        self.alone: dict[tuple[str, Kind], Result] = {}
        self._began_s = time.monotonic()
        self._out = out
        self._marks: Path | None = None
        self._worker = ["--worker", "one", "--device", options.device, *(["--small"] if options.small else [])]

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.options.budget - (time.monotonic() - self._began_s))

    def note(self, text: str) -> None:
        print(f"note: {text}", flush=True)
        self.notes.append(text)

    def add(self, result: Result) -> None:
        """Keep a result and write all of them."""
        self.results.append(result)
        if result.means in ("alone interactive", "alone busy"):
            kind = result.interactive if result.latencies_ms else result.busy
            self.alone[result.means, kind] = result
        tail = f"{result.percentile(95):.2f} ms p95" if result.latencies_ms else ""
        print(
            f"{result.means:22} {result.interactive}/{result.busy}: {tail} {result.busy_rate:.1f} units/s", flush=True
        )
        if self._out is not None:
            rows = [each._asdict() for each in self.results]
            (self._out / "results.json").write_text(json.dumps({"notes": self.notes, "results": rows}))

    def config(self, priority_class: str, step_ms: float) -> SharingConfig | None:
        assert self._marks is not None
        return SharingConfig(priority_class=priority_class, marks=(str(self._marks),), step_ms=step_ms)  # type: ignore[arg-type]

    def orders(self, pair: tuple[Kind, Kind], step_ms: float | None = None) -> tuple[Order, Order]:
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
        folder = sharing_work.new_folder()
        try:
            self._marks = folder / "marks"
            make_marks_file(self._marks)
            self.measure_processes()
            if self.options.device != "cpu":
                self.measure_mps()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def measure_processes(self) -> None:
        """Measure two processes without MPS, and two threads of one."""
        with ExitStack() as stack:
            first, second = (stack.enter_context(Side(self._worker)) for _ in range(2))
            pair: Side | None = None
            if self.options.device != "cpu":
                pair = stack.enter_context(Side(["--worker", "pair", *(["--small"] if self.options.small else [])]))
            for side in filter(None, (first, second, pair)):
                side.wait_ready()
            self.measure_alone(first)
            if self.options.only == "mps":
                return
            for works in PAIRS:
                self.measure_two("time-slicing", first, second, works)
                self.measure_two("pacing", first, second, works, step_ms=1e6)
                self.measure_two("pacing, short steps", first, second, works, step_ms=SHORT_STEP_MS)
            if pair is not None:
                try:
                    self.measure_threads(pair)
                except ProcessError as error:
                    self.note(f"streams and green contexts: not measured further: {error}")
            else:
                self.note("streams, green contexts and MPS: not measured, they need a GPU")

    def measure_alone(self, side: Side) -> None:
        for kind in ("decode", "gemm"):
            order = Order(role="busy", kind=kind, units=BUSY_UNITS, start_s=time.monotonic(), seconds=self.seconds / 2)
            side.send(order)
            outcome = msgspec.convert(side.read(), Outcome)
            self.add(Result("alone busy", kind, kind, [], rate_of(outcome), 0.0, {"unit_ms": 1000 * outcome.unit_s}))
            request_s = INTERACTIVE_STEPS[kind] / rate_of(outcome)
            self.alone["alone interactive", kind] = Result("", kind, kind, [], 0, 0, {"request_s": request_s})
            order = self.orders((kind, kind))[0]
            side.send(order)
            latencies = [1000 * each for each in msgspec.convert(side.read(), Outcome).latencies_s]
            self.add(Result("alone interactive", kind, kind, latencies, 0.0, 0.0, {"request_s": request_s}))

    def measure_two(
        self, means: str, first: Side, second: Side, pair: tuple[Kind, Kind], step_ms: float | None = None
    ) -> None:
        """Measure two processes on one pair of works."""
        if self.left_s < 3 * self.seconds:
            self.note(f"{means}, {pair[0]} beside {pair[1]}: not measured, the time was over")
            return
        orders = self.orders(pair, step_ms)
        first.send(orders[0])
        second.send(orders[1])
        outcomes = [msgspec.convert(side.read(), Outcome) for side in (first, second)]
        self.keep(means, pair, outcomes[0], outcomes[1], {})

    def measure_threads(self, side: Side) -> None:
        """Measure two threads of one process."""
        plans: list[tuple[str, dict[str, Any]]] = [
            ("streams", {"means": "streams"}),
            ("streams, priority", {"means": "priority"}),
            *((f"green, {num_sms} SMs", {"means": "green", "num_sms": num_sms}) for num_sms in GREEN_SMS),
        ]
        for means, settings in plans:
            for pair in PAIRS:
                if self.left_s < 4 * self.seconds:
                    self.note(f"{means}, {pair[0]} beside {pair[1]}: not measured, the time was over")
                    continue
                interactive, busy = self.orders(pair)
                side.send(PairOrder(interactive=interactive, busy=busy, **settings))
                found = side.read()
                if "error" in found:
                    self.note(f"{means}: not measured: {found['error']}")
                    break
                sides = [msgspec.convert(found[role], Outcome) for role in ("interactive", "busy")]
                facts = {"sms": found["sms"], "units_ms": {k: 1000 * v for k, v in found["units_s"].items()}}
                self.keep(means, pair, sides[0], sides[1], facts)

    def measure_mps(self) -> None:
        """Measure two processes under an MPS daemon of our own."""
        assert self._marks is not None
        try:
            daemon = MpsDaemon(self._marks.parent / "mps")
            with ExitStack() as stack:
                stack.callback(daemon.stop)
                daemon.start()
                environment = daemon.environment
                interactive = stack.enter_context(Side(self._worker, environment))
                plans: list[tuple[str, dict[str, str]]] = [
                    ("MPS", {}),
                    (f"MPS, busy at {BUSY_PERCENT} %", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(BUSY_PERCENT)}),
                    ("MPS, busy at low priority", {"CUDA_MPS_CLIENT_PRIORITY": "1"}),
                ]
                for means, extra in plans:
                    if self.left_s < 6 * self.seconds:
                        self.note(f"{means}: not measured, the time was over")
                        continue
                    with Side(self._worker, environment | extra) as busy:
                        if not extra:
                            interactive.wait_ready()
                        busy.wait_ready()
                        for pair in PAIRS:
                            self.measure_two(means, interactive, busy, pair)
                            if not extra:
                                self.measure_two("MPS and pacing", interactive, busy, pair, step_ms=SHORT_STEP_MS)
                print(f"MPS servers: {daemon.servers() or 'none'}", flush=True)
        except (ConfigError, ProcessError, OSError) as error:
            self.note(f"MPS: not measured further: {' '.join(str(error).split())[:400]}")

    def keep(
        self, means: str, pair: tuple[Kind, Kind], interactive: Outcome, busy: Outcome, facts: dict[str, Any]
    ) -> None:
        latencies = [1000 * each for each in interactive.latencies_s]
        if not latencies:
            raise SystemExit(f"{means}: no interactive request ended")
        waited = busy.waited_s / busy.elapsed_s if busy.elapsed_s else 0.0
        self.add(Result(means, *pair, latencies, rate_of(busy), waited, facts))

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


def rate_of(outcome: Outcome) -> float:
    """Units per second."""
    return outcome.units / outcome.elapsed_s


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
    if options.worker == "one":
        sharing_work.serve_one(options.device, sizes)
        return 0
    if options.worker == "pair":
        sharing_work.serve_pair(sizes)
        return 0
    bench = Bench(options, options.out)
    try:
        bench.run()
    finally:
        if bench.results:
            bench.print_summary()
    if not options.no_result_file:
        import torch

        kinds = statistics.fmean(len(result.latencies_ms) for result in bench.results if result.latencies_ms)
        notes = [f"on average {kinds:.0f} requests per row", *bench.notes]
        write_result(bench.rows(), {"torch": str(torch.__version__)}, notes, gpus=0 if options.device == "cpu" else 1)
        bench.print_summary()
    return 0


if __name__ == "__main__":
    sys.exit(main())
