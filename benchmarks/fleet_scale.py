"""How far a fleet scales: 64 nodes of 8 engines and 10,000 streams over HTTP, and a rack of 8 nodes lost.

`meltcore up` is real, with its plan, supervisor, API servers, queues, router and TCP links; `simulated_cluster.py` is
the cluster, with one process per rack. Load comes from the load generator, one part per model. All of it is repeated;
stated are the median of the repeats, their lowest and highest value, and whether the worst meets the target.

    python benchmarks/fleet_scale.py --repeats 5                       # and benchmarks/results/fleet_scale/cpu.json
    python benchmarks/fleet_scale.py --repeats 1 --racks 2 --nodes 2 --streams 200 --tokens 8 --step-s 0.5 --check-only
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import uvloop
from bench_output import Row, Target, median_rows, write_result
from running_fleet import Fleet, running, script_command, serve, use_driver, wait, with_scripts, write_checkpoint

from meltcore.fleet.planned import FleetPlanner
from meltcore.fleet.start_gate import WAVE
from meltcore.load.config import LoadConfig
from meltcore.load.runner import run_levels_async
from meltcore.results.schema import LevelResult

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


async def load(fleet: Fleet, args: argparse.Namespace, watch: Callable[[], None]) -> list[LevelResult]:
    """Load all models concurrently, with `watch` on a thread beside."""
    streams = args.streams // args.models
    configs = [
        LoadConfig(
            url=fleet.url,
            model=f"m{number}",
            concurrency=(streams,),
            num_prompts=(streams,),
            num_warmups=0,
            workload=f"random:in=16,out={args.tokens},vocab=500",
            continuous_usage=False,
            seed=number,
        )
        for number in range(args.models)
    ]
    watching = asyncio.create_task(asyncio.to_thread(watch))
    levels = await asyncio.gather(*(run_levels_async(config) for config in configs))
    await watching
    return [level for found in levels for level in found]


def gap_s(levels: list[LevelResult]) -> float:
    """The longest p99 of the time between two tokens of any model."""
    return max((level.event_gap_ms.p99 or 0.0) for level in levels) / 1e3


class Balance:
    """Watches open requests per engine while all streams are open."""

    def __init__(self, fleet: Fleet, streams: int) -> None:
        self._fleet, self._streams = fleet, streams
        self.most = self.least = self.looks = 0
        self.full = 0.0  # streams that were open at a look

    def __call__(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and not self.looks:
            counts = self.look()
            self.full = max(self.full, sum(counts))
            if sum(counts) >= self._streams:
                self.most, self.least = round(max(counts)), round(min(counts))
                self.looks += 1
            time.sleep(0.5)

    def look(self) -> list[float]:
        return [value for _, value in self._fleet.samples().get("replica_requests", [])]


class LostRack(Balance):
    """Silences a rack while all streams are open, and watches how its requests end."""

    def __init__(self, fleet: Fleet, streams: int, all_ready: str) -> None:
        super().__init__(fleet, streams)
        self._all_ready = all_ready
        self.lost = self.failed = 0
        self.error_s = self.back_s = 0.0

    def __call__(self) -> None:
        super().__call__()
        rack = min(self._fleet.children("--rack"))
        on_rack = {(row["model"], str(row["replica"])) for row in self._fleet.rows() if row["pid"] == rack}
        before = self._failed()
        for labels, value in self._fleet.samples()["replica_requests"]:
            found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            self.lost += round(value) if (found["model_name"], found["replica"]) in on_rack else 0
        os.kill(rack, signal.SIGSTOP)  # its machines say nothing any more, not even goodbye
        silent_s = time.monotonic()
        while time.monotonic() - silent_s < DEAD_AFTER_S:
            time.sleep(0.1)
            failed = self._failed() - before
            if failed > self.failed:
                self.failed, self.error_s = failed, time.monotonic() - silent_s
        os.kill(rack, signal.SIGKILL)
        self.back_s = wait(
            lambda: self._fleet.health().get("replicas") == self._all_ready, "engines of the lost rack", READY_LIMIT_S
        )

    def _failed(self) -> int:
        return round(sum(value for _, value in self._fleet.samples()["requests_failed_total"]))


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Row], list[str]]:
    """Run everything once; returns the rows and what went wrong."""
    address = f"{args.racks}x{args.nodes}x{args.gpus}"
    engines, problems, rows = args.racks * args.nodes * args.gpus, [], []
    path = write_fleet(folder, args)
    use_driver(DRIVER)
    planner = FleetPlanner(path, ray=address)
    started_s = time.monotonic()
    planner.config()
    plan_s = time.monotonic() - started_s
    rows.append(Row(work=f"plan of {engines} engines", unit="s", value=plan_s, target=Target(PLAN_S, better="lower")))

    log = folder / "server.log"
    environment = {"SIMULATED_STEP_S": str(args.step_s), "XDG_STATE_HOME": str(folder)}
    os.environ["XDG_STATE_HOME"] = str(folder)
    with running(script_command("--serve", str(path), address), log, environment) as fleet:
        all_ready = f"{engines} of {engines}"
        took_s = wait(lambda: fleet.health().get("replicas") == all_ready, f"{engines} engines", READY_LIMIT_S)
        work = f"start of {engines} engines that load for 1 s, in waves of {WAVE}"
        rows.append(Row(work=work, unit="s", value=took_s))

        streams = args.streams // args.models * args.models
        before_s = fleet.api_cpu_s()
        balance = Balance(fleet, streams)
        levels = uvloop.run(load(fleet, args, balance))
        succeeded, tokens = (sum(getattr(level, name) for level in levels) for name in ("succeeded", "output_tokens"))
        spent_us = (fleet.api_cpu_s() - before_s) / max(1, tokens) * 1e6
        work = f"{streams:,} streams of {args.tokens} tokens"
        ideal = -(-streams // engines)
        rows += [
            Row(work=f"{work}: finished", unit="requests", value=succeeded, target=Target(streams)),
            Row(work=f"{work}: open at the same time", unit="requests", value=balance.full, target=Target(streams)),
            Row(
                work=f"{work}: most on one engine, over the ideal {ideal}",
                unit="share",
                value=balance.most / ideal - 1,
                target=Target(BALANCE, better="lower"),
            ),
            Row(work=f"{work}: least on one engine", unit="requests", value=balance.least),
            Row(work=f"{work}: API servers, CPU per token, requests included", unit="us", value=spent_us),
            Row(work=f"{work}: p99 between two tokens, step {args.step_s:g} s", unit="s", value=gap_s(levels)),
        ]
        problems += [f"{count} requests failed: {why}" for level in levels for why, count in level.failures.items()]

        rack = LostRack(fleet, streams, all_ready)
        levels = uvloop.run(load(fleet, args, rack))
        succeeded = sum(level.succeeded for level in levels)
        work = f"a rack of {args.nodes} nodes is silent"
        rows += [
            Row(
                work=f"{work}: last error of its {rack.lost:,} requests",
                unit="s",
                value=rack.error_s,
                target=Target(ERROR_S, better="lower"),
            ),
            Row(work=f"{work}: requests that fail and are not its own", unit="requests", value=rack.failed - rack.lost),
            Row(
                work=f"{work}: all others finish", unit="requests", value=succeeded, target=Target(streams - rack.lost)
            ),
            Row(work=f"{work}: p99 between two tokens, step {args.step_s:g} s", unit="s", value=gap_s(levels)),
            Row(work=f"{work}: its engines run elsewhere, after the cluster knows", unit="s", value=rack.back_s),
        ]
        moved = log.read_text().count("is started on n")
        own = engines // args.racks
        if moved < own:
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
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=3.0)
    parser.add_argument("--api-servers", type=int, default=2)
    parser.add_argument("--check-only", action="store_true", help="Do not write the result file.")
    parser.add_argument("--log", type=Path, help="keep the log of the last run's server here")
    parser.add_argument("--serve", nargs=2, metavar=("FILE", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        use_driver(DRIVER)
        return serve(Path(args.serve[0]), args.serve[1])
    with_scripts()
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
