"""How far a fleet scales: 64 nodes of 8 engines and 10,000 streams over HTTP, and a rack of 8 nodes lost.

`meltcore up` is real, with its plan, supervisor, API servers, queues, router and TCP links; `simulated_cluster.py` is
the cluster, with one process per rack. Load comes from the load generator: equal answers, asked for in one burst,
then answers of 32 to 1,024 tokens in Poisson arrivals, half of them without a limit. All of it is repeated; stated are
the median of the repeats, their lowest and highest value, and whether the worst meets the target.

    python benchmarks/fleet_scale.py --repeats 5          # and benchmarks/results/fleet_scale/cpu.json; 9 minutes each
    python benchmarks/fleet_scale.py --repeats 1 --racks 2 --nodes 2 --streams 208 --step-s 0.5 --check-only
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from bench_output import Row, Target, median_rows, write_result
from running_fleet import Fleet, running, script_command, serve, use_driver, wait, with_scripts, write_checkpoint
from simulated_cluster import OUTPUT_TOKENS, Step

from meltcore.fleet.plan.cluster import cluster_reader
from meltcore.fleet.plan.planned import FleetPlanner
from meltcore.fleet.run.start_gate import WAVE
from meltcore.fleet.run.supervised_model import REPLICA_DEAD
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import run_levels_async

START_LIMIT_S, READY_LIMIT_S = 60.0, 300.0
DEAD_AFTER_S = 10.0  # until the cluster knows that a rack is gone whose machines are silent
BALANCE, PLAN_S, ERROR_S = 0.05, 10.0, 5.0  # the goals
MEMORY = "12GiB"
DRIVER = "simulated_cluster"


def write_fleet(folder: Path, args: argparse.Namespace) -> Path:
    """Write a fleet whose replicas take every GPU of the cluster once."""
    load = f"checkpoint: {write_checkpoint(folder)}, load_format: dummy, memory: {MEMORY}, max_num_seqs: 256"
    replicas = args.racks * args.nodes * args.gpus // args.models
    models = "".join(f"  m{number}: {{{load}, replicas: {replicas}}}\n" for number in range(args.models))
    path = folder / "fleet.yaml"
    path.write_text(f"server: {{port: 0, api_server_count: {args.api_servers}}}\nmodels:\n{models}")
    return path


def equal_load(fleet: Fleet, args: argparse.Namespace, records: Path | None = None) -> list[LoadConfig]:
    """Equal answers, all asked for in one burst. records: the folder of a file per model."""
    streams = args.streams // args.models
    return [
        LoadConfig(
            url=fleet.url,
            model=f"m{number}",
            concurrency=(streams,),
            num_prompts=(streams,),
            num_warmups=0,
            workload=f"random:in=16,out={args.tokens},vocab=500",
            continuous_usage=False,
            seed=number,
            records_path=None if records is None else records / f"m{number}.jsonl",
        )
        for number in range(args.models)
    ]


class Mixed(NamedTuple):
    """When requests of different lengths arrive: at `rate` per second, so that as many are open as the streams."""

    rate: float
    ramp_s: float  # until as many are open, but for the longest answers
    window_s: float  # that is looked at: one and a half mean answers

    @classmethod
    def of(cls, args: argparse.Namespace) -> Mixed:
        """Return the times for an answer's mean time; a first token comes after half a step on average."""
        lengths = range(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1)
        mean_s = (statistics.mean(-(-length // args.step_tokens) for length in lengths) - 0.5) * args.step_s
        longest_s = lengths[-1] / args.step_tokens * args.step_s
        return cls(args.streams / mean_s, 0.8 * longest_s, 1.5 * mean_s)


def mixed_load(fleet: Fleet, args: argparse.Namespace) -> list[LoadConfig]:
    """Answers of 32 to 1,024 tokens at random, in Poisson arrivals. Half of the requests do not state a limit."""
    rate = Mixed.of(args).rate / args.models / 2
    num_prompts = round(rate * (Mixed.of(args).ramp_s + Mixed.of(args).window_s))
    length = "{}-{}".format(*OUTPUT_TOKENS)
    return [
        LoadConfig(
            url=fleet.url,
            model=f"m{number}",
            request_rate=(rate,),
            num_prompts=(num_prompts,),
            num_warmups=0,
            workload=f"random:in=16-128,out={length},vocab=500",
            extra_body={} if is_stated else {"max_tokens": None, "ignore_eos": False},
            continuous_usage=False,
            seed=2 * number + is_stated,
        )
        for number in range(args.models)
        for is_stated in (False, True)
    ]


async def load(configs: Sequence[LoadConfig], watch: Callable[[], None] = lambda: None) -> list[LevelResult]:
    """Send all loads concurrently, with `watch` on a thread beside."""
    watching = asyncio.create_task(asyncio.to_thread(watch))
    levels = await asyncio.gather(*(run_levels_async(config) for config in configs))
    await watching
    return [level for found in levels for level in found]


def gap_s(levels: list[LevelResult]) -> float:
    """The longest p99 of the time between two events of any model."""
    return max((level.event_gap_ms.p99 or 0.0) for level in levels) / 1e3


def failures(levels: list[LevelResult]) -> list[str]:
    return [f"{count} requests failed: {why}" for level in levels for why, count in level.failures.items()]


class Open:
    """Watches open requests per engine until all streams are open. A look costs an API server 40 ms of 512 engines."""

    def __init__(self, fleet: Fleet, streams: int) -> None:
        self._fleet, self._streams = fleet, streams
        self.most = self.least = 0
        self.full = 0.0  # streams that were open at a look

    def __call__(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and self.full < self._streams:
            time.sleep(1)
            counts = [value for _, value in self._fleet.samples().get("replica_requests", [])]
            self.full = max(self.full, sum(counts))
            self.most, self.least = round(max(counts)), round(min(counts))


class LostRack(Open):
    """Silences a rack while all streams are open, and watches how its engines come back."""

    def __init__(self, fleet: Fleet, streams: int, nodes: int, all_ready: str) -> None:
        super().__init__(fleet, streams)
        self._nodes, self._all_ready = nodes, all_ready
        self.lost = 0
        self.silent_s = self.back_s = 0.0

    def __call__(self) -> None:
        super().__call__()
        self.rack = min(self._fleet.children("--rack"))
        number = int(self._fleet.processes()[self.rack][-2])
        self.nodes = [f"n{node:02}" for node in range(number * self._nodes, (number + 1) * self._nodes)]
        on_rack = {(row["model"], str(row["replica"])) for row in self._fleet.rows() if row["pid"] == self.rack}
        for labels, value in self._fleet.samples()["replica_requests"]:
            found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            self.lost += round(value) if (found["model_name"], found["replica"]) in on_rack else 0
        os.kill(self.rack, signal.SIGSTOP)  # its machines say nothing any more, not even goodbye
        self.silent_s = time.monotonic()
        time.sleep(DEAD_AFTER_S)  # nothing is asked of the API servers: that would take of their time
        os.kill(self.rack, signal.SIGKILL)
        self.back_s = wait(
            lambda: self._fleet.health().get("replicas") == self._all_ready, "engines of the lost rack", READY_LIMIT_S
        )

    def errors(self, levels: list[LevelResult], records: Path) -> tuple[list[float], int]:
        """Return how long after the silence each request of the rack has failed, and how many others have."""
        own: list[float] = []
        others = 0
        texts = [REPLICA_DEAD, *(f"on {node} cannot be reached" for node in self.nodes)]
        for number, level in enumerate(levels):
            assert level.released_s is not None
            for line in (records / f"m{number}.jsonl").read_bytes().splitlines():
                record = msgspec.json.decode(line)
                if record["failure"] is None:
                    continue
                # An API server has lost the connection, or the supervisor has, and has told it.
                if any(text in (record["detail"] or "") for text in texts):
                    own.append(level.released_s + record["ended_s"] - self.silent_s)
                else:
                    others += 1
        return own, others


def balance_rows(work: str, folder: Path, engines: int, from_s: float, to_s: float) -> list[Row]:
    """How far engines are from the mean of their model, by what they found at their steps."""
    found: dict[tuple[str, int], list[Step]] = {}
    for path in folder.glob("rack-*.jsonl"):
        for line in path.read_bytes().splitlines():
            step = Step(*msgspec.json.decode(line))
            if from_s <= step.time_s < to_s:
                found.setdefault((step.model, step.engine), []).append(step)
    if len(found) != engines:
        raise SystemExit(f"{len(found)} of {engines} engines had work in {to_s - from_s:.0f} s")
    rows = []
    for what, field, target in (
        ("open requests", "requests", Target(BALANCE, better="lower")),
        ("tokens still to come", "left_tokens", None),
        ("tokens held", "held_tokens", None),
    ):
        means = {key: statistics.mean(getattr(step, field) for step in steps) for key, steps in found.items()}
        ideal = {
            name: statistics.mean(value for (model, _), value in means.items() if model == name)
            for name in {model for model, _ in means}
        }
        off = sorted(abs(value / ideal[model] - 1) for (model, _), value in means.items())
        at_steps = sorted(
            abs(getattr(step, field) / ideal[model] - 1) for (model, _), steps in found.items() for step in steps
        )
        of = f"{work}: {what} of an engine off the mean"
        rows += [
            Row(work=f"{of}, over {to_s - from_s:.0f} s, 95 % of engines", unit="share", value=p95(off), target=target),
            Row(work=f"{of}, over {to_s - from_s:.0f} s, worst engine", unit="share", value=off[-1]),
            Row(work=f"{of}, at a step, 95 % of steps", unit="share", value=p95(at_steps)),
        ]
    return rows


def p95(values: Sequence[float]) -> float:
    """The smallest of sorted values that 95 % do not exceed."""
    return values[-(-95 * len(values) // 100) - 1]


def measure_equal(fleet: Fleet, args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    engines = args.racks * args.nodes * args.gpus
    before_s = fleet.api_cpu_s()
    watch = Open(fleet, args.streams)
    levels = uvloop.run(load(equal_load(fleet, args), watch))
    spent_us = (fleet.api_cpu_s() - before_s) / max(1, sum(level.output_tokens for level in levels)) * 1e6
    work = f"{args.streams:,} streams of {args.tokens} tokens in one burst"
    ideal = -(-args.streams // engines)
    over = Row(
        work=f"{work}: most on one engine, over the ideal {ideal}",
        unit="share",
        value=watch.most / ideal - 1,
        target=Target(BALANCE, better="lower"),
    )
    rows = [
        Row(work=f"{work}: finished", unit="requests", value=succeeded_of(levels), target=Target(args.streams)),
        Row(work=f"{work}: open at the same time", unit="requests", value=watch.full, target=Target(args.streams)),
        over,
        Row(work=f"{work}: least on one engine", unit="requests", value=watch.least),
        Row(work=f"{work}: API servers, CPU per token, requests included", unit="us", value=spent_us),
        Row(work=f"{work}: p99 between two events, step {args.step_s:g} s", unit="s", value=gap_s(levels)),
    ]
    return rows, failures(levels)


def measure_mixed(fleet: Fleet, args: argparse.Namespace, steps: Path) -> tuple[list[Row], list[str]]:
    levels = uvloop.run(load(mixed_load(fleet, args)))
    times = Mixed.of(args)
    released_s = max(level.released_s or 0.0 for level in levels)
    from_s, to_s = released_s + times.ramp_s, released_s + times.ramp_s + times.window_s
    work = f"{OUTPUT_TOKENS[0]} to {OUTPUT_TOKENS[1]:,} tokens, Poisson"
    late = max(level.queue_delay_ms.p99 or 0.0 for level in levels) / 1e3
    found = balance_rows(work, steps, args.racks * args.nodes * args.gpus, from_s, to_s)
    if late > args.step_s:
        invalid = f"the client was too slow for these arrivals: {late:.0f} s late"
        found = [replace(row, invalid=invalid) for row in found]
    rows = [
        Row(work=f"{work}, {times.rate:.0f} requests/s: finished", unit="requests", value=succeeded_of(levels)),
        Row(work=f"{work}: sent late, p99", unit="s", value=late),
        *found,
    ]
    return rows, failures(levels)


def measure_rack(fleet: Fleet, args: argparse.Namespace, folder: Path) -> tuple[list[Row], list[str]]:
    engines = args.racks * args.nodes * args.gpus
    rack = LostRack(fleet, args.streams, args.nodes, f"{engines} of {engines}")
    levels = uvloop.run(load(equal_load(fleet, args, folder), rack))
    own_s, others = rack.errors(levels, folder)
    work = f"a rack of {args.nodes} nodes is silent"
    last = Row(
        work=f"{work}: last error of its {rack.lost:,} requests",
        unit="s",
        value=max(own_s, default=0.0),
        target=Target(ERROR_S, better="lower"),
    )
    finish = Row(
        work=f"{work}: all others finish",
        unit="requests",
        value=succeeded_of(levels),
        target=Target(args.streams - rack.lost),
    )
    rows = [
        Row(work=f"{work}: first error", unit="s", value=min(own_s, default=0.0)),
        last,
        Row(work=f"{work}: its requests that fail", unit="requests", value=len(own_s)),
        Row(work=f"{work}: others that fail", unit="requests", value=others, target=Target(0, better="lower")),
        finish,
        Row(work=f"{work}: p99 between two events, step {args.step_s:g} s", unit="s", value=gap_s(levels)),
        Row(work=f"{work}: its engines run elsewhere, after the cluster knows", unit="s", value=rack.back_s),
    ]
    return rows, []


def succeeded_of(levels: list[LevelResult]) -> int:
    return sum(level.succeeded for level in levels)


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Row], list[str]]:
    """Run everything once; returns the rows and what went wrong."""
    address = f"{args.racks}x{args.nodes}x{args.gpus}"
    engines = args.racks * args.nodes * args.gpus
    path = write_fleet(folder, args)
    use_driver(DRIVER)
    planner = FleetPlanner(path, cluster_reader(address))
    started_s = time.monotonic()
    planner.config()
    plan_s = time.monotonic() - started_s
    plan = Row(work=f"plan of {engines} engines", unit="s", value=plan_s, target=Target(PLAN_S, better="lower"))

    log = folder / "server.log"
    environment = {
        "SIMULATED_STEP_S": str(args.step_s),
        "SIMULATED_STEP_TOKENS": str(args.step_tokens),
        "SIMULATED_STEPS": str(folder),
        "XDG_STATE_HOME": str(folder),
    }
    os.environ["XDG_STATE_HOME"] = str(folder)
    with running(script_command("--serve", str(path), address), log, environment) as fleet:
        all_ready = f"{engines} of {engines}"
        took_s = wait(lambda: fleet.health().get("replicas") == all_ready, f"{engines} engines", READY_LIMIT_S)
        work = f"start of {engines} engines that load for 1 s, in waves of {WAVE}"
        rows, problems = [plan, Row(work=work, unit="s", value=took_s)], []
        for part in (
            lambda: measure_equal(fleet, args),
            lambda: measure_mixed(fleet, args, folder),
            lambda: measure_rack(fleet, args, folder),
        ):
            found, wrong = part()
            rows += found
            problems += wrong
            print(*map(row_text, found), *wrong, sep="\n", file=sys.stderr, flush=True)
        moved = log.read_text().count("is started on n")
        own = engines // args.racks
        if moved != own:
            problems.append(f"{moved} engines were started elsewhere, not {own}")
        fleet.process.send_signal(signal.SIGTERM)
        if fleet.process.wait(60):
            problems.append(f"the server ended with status {fleet.process.returncode}")
    return rows, problems


def measure_repeats(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Run everything several times; returns the rows of all runs as one list, and what went wrong."""
    runs, problems = [], []
    for number in range(1, args.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows, found = measure(args, Path(folder))
            finally:
                if args.log:
                    args.log.write_bytes((Path(folder) / "server.log").read_bytes())
        runs.append(rows)
        problems += [f"run {number} of {args.repeats}: {problem}" for problem in found]
    rows = median_rows(runs)
    return rows, problems + [row_text(row) for row in rows if row.met is False]


def row_text(row: Row) -> str:
    span = "" if row.span is None else f" ({row.span[0]:g} to {row.span[1]:g})"
    return f"{row.work}: {row.value:g}{span} {row.unit}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of everything (default: 5)")
    parser.add_argument("--racks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=8, help="per rack")
    parser.add_argument("--gpus", type=int, default=8, help="per node, an engine on each")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=640, help="of an answer, where all have the same")
    parser.add_argument("--step-s", type=float, default=8.0)
    parser.add_argument("--step-tokens", type=int, default=64, help="per request")
    parser.add_argument("--api-servers", type=int, default=2)
    parser.add_argument("--check-only", action="store_true", help="Do not write the result file.")
    parser.add_argument("--log", type=Path, help="keep the log of the last run's server here")
    parser.add_argument("--serve", nargs=2, metavar=("FILE", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        use_driver(DRIVER)
        return serve(Path(args.serve[0]), args.serve[1])
    with_scripts()
    if args.streams % args.models:
        parser.error(f"--streams {args.streams}: must be a multiple of the {args.models} models")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    rows, problems = measure_repeats(args)
    if not args.check_only:
        write_result(rows, {name: metadata.version(name) for name in ("pyzmq", "uvloop")}, problems)
    for row in rows if args.check_only else ():
        print(row_text(row))
    for problem in problems:
        print(f"FAIL: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
