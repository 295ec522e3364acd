"""What an engine on another node costs the API server, against the same engine on its machine: CPU time and latency.

Two servers run: `meltcore up` with an engine of this machine, and `meltcore up --ray`, whose engine is reached over TCP
with CURVE keys and heartbeats. Both have one API server process. The scripted engine of both waits until all streams
are open, then sends a token of each stream at a fixed pace. A client reads the answers of /v1/completions as SSE.

Stated per number of streams, each the median of pairs of runs (local, remote, remote, local, and so on): CPU time of
the API server per token with all its threads, and the time from the engine's send of a token to its arrival at the
client. All processes are on this machine, with one clock, and the TCP link is its loopback device.

    python benchmarks/remote_engine.py                # a process in place of Ray starts the remote engine
    python benchmarks/remote_engine.py --ray local    # Ray does; needs meltcore[cluster]
    python benchmarks/remote_engine.py --quick --check-only
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import uvloop
from bench_output import Row, Target, write_result
from running_fleet import (
    Fleet,
    cpu_s,
    end_with_parent,
    running,
    script_command,
    serve,
    use_driver,
    wait,
    with_scripts,
    write_checkpoint,
)
from simulated_cluster import MAX_MODEL_LEN, VOCAB_SIZE

from meltcore.engine.host.client_sockets import open_sockets
from meltcore.measure.load.wire.connection import HttpConnection, connect, resolve_target
from meltcore.measure.load.wire.http import ResponseHandler
from meltcore.protocol.generation import (
    AddRequest,
    EngineStats,
    GenerationReady,
    SequenceOutput,
    StepOutputs,
    ToEngine,
)
from meltcore.protocol.shell import Loading, MemoryRow, Shutdown
from meltcore.protocol.tcp import is_remote
from meltcore.serve.http.listener import raise_file_limit
from meltcore.settings.config import EngineConfig

MODEL, DRIVER = "scripted", "one_node"
SEND_TIMES = "send-times"  # a file in the folder of the checkpoint: seconds of this machine's monotonic clock, float64
READY_LIMIT_S, OPEN_LIMIT_S = 120.0, 60.0
LEAD_S = 0.2  # from the last request to the first token
PAIRS = 8
# Streams and the length of a step in milliseconds: 50 tokens/s of a stream, and 10,000 of all for most streams.
LEVELS = {1: 20, 100: 20, 1000: 100}
WARM_UP = 0.2  # of the steps, which are not counted
MOST_TRIES = 5  # of a run that counts no token
CPU_RATIO = Target(1.25, better="lower")
ADDED_MS = Target(1.0, better="lower")
DIGIT = 500  # numbers in a prompt: streams are two digits, then the length of a step
_TEXT = re.compile(rb'"text":"([a-z]*)"')
_LETTERS = 26  # a token is a letter: id and text are one byte


# --- the engine ----------------------------------------------------------------------------------------------------


class PacedEngine:
    """Sends a token of each stream at a fixed pace, once as many are open as their prompts say."""

    def __init__(self, directory: Path, client_count: int, config: EngineConfig) -> None:
        self.sockets = open_sockets(directory, client_count, ToEngine)
        self.times = Path(config.model) / SEND_TIMES
        self.clients: dict[str, int] = {}  # by request
        self.is_ended = False

    def run(self) -> None:
        """Serve until the end."""
        self.sockets.send(0, Loading("scripted", 0.5))
        limits = (MAX_MODEL_LEN, 4096, VOCAB_SIZE, 64, 64)
        memory = [MemoryRow("weights", 0, "none"), MemoryRow("KV pages", 2**20)]
        ready = GenerationReady("CPU", "float32", "dummy", memory, 0.0, *limits, ["float32"], "float32", "none")
        self.sockets.send(0, ready)
        while not self.is_ended:
            self.sockets.poll(1000)
            request = self.receive()
            if request is not None and len(request.prompt) == 3:
                high, low, step_ms = request.prompt
                if len(self.clients) == high * DIGIT + low:
                    self.send_steps(request.sampling.max_tokens, step_ms / 1e3)
            elif request is not None:  # the probe of a new engine
                self.send_steps(request.sampling.max_tokens, 0.0)
        self.sockets.close()

    def receive(self) -> AddRequest | None:
        """Take what has arrived; returns the last request."""
        request = None
        for client in range(self.sockets.client_count):
            while (messages := self.sockets.receive(client)) is not None:
                for message in messages:
                    if isinstance(message, AddRequest):
                        request = message
                        self.clients[message.request_id] = client
                    elif isinstance(message, Shutdown):
                        self.is_ended = True
        return request

    def send_steps(self, steps: int, step_s: float) -> None:
        times = []
        started_s = time.monotonic() + (LEAD_S if step_s else 0.0)
        for number in range(steps):
            reason = "length" if number == steps - 1 else None
            token = ord("a") + number % _LETTERS
            parts: dict[int, list[SequenceOutput]] = {}
            for request_id, client in self.clients.items():
                parts.setdefault(client, []).append(SequenceOutput(request_id, [token], reason))
            time.sleep(max(0.0, started_s + number * step_s - time.monotonic()))
            times.append(time.monotonic())
            if reason is not None:
                self.clients.clear()
                np.array(times).tofile(self.times)
            for client, outputs in parts.items():
                self.sockets.send(client, StepOutputs(outputs, EngineStats(running=len(outputs)), time.monotonic()))


def be_engine(directory: Path, client_count: int) -> None:
    """Be an engine process, as `python -m meltcore.engine` is."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    if not is_remote(directory):
        threading.Thread(target=end_with_parent, daemon=True).start()
    PacedEngine(directory, client_count, config).run()


# --- the client ----------------------------------------------------------------------------------------------------


class Stream(ResponseHandler):
    """One answer: what arrived, and when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.parts: list[tuple[float, bytes]] = []
        self.status = 0
        self.failure = ""
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        del headers
        self.status = status

    def on_body(self, data: bytes) -> None:
        if not self.parts:
            self.begun.set_result(None)
        self.parts.append((self.now_s, data))

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_failure(self, reason: str, detail: str) -> None:
        self.failure = f"{reason}: {detail}"
        self.on_end()

    def arrived_s(self, steps: int) -> list[float]:
        """When each token has arrived. Raises SystemExit for an answer that is not the engine's."""
        text, found = b"", []
        for now_s, data in self.parts:
            letters = b"".join(_TEXT.findall(data))
            text += letters
            found += [now_s] * len(letters)
        expected = bytes(ord("a") + number % _LETTERS for number in range(steps))
        if self.status != 200 or self.failure or text != expected:
            answer = b"".join(data for _, data in self.parts[:2])[:300]
            raise SystemExit(f"status {self.status} {self.failure}: {len(text)} of {steps} tokens; {answer!r}")
        return found


class Run(NamedTuple):
    """What one run has measured. used_us: CPU time per token of each process by name."""

    used_us: dict[str, float]
    p50_ms: float
    p99_ms: float


def named_processes(fleet: Fleet) -> dict[int, str]:
    """What each process of a server is, by id."""
    found = {}
    for pid, command in fleet.processes().items():
        line = " ".join(command)
        if pid == fleet.process.pid:
            found[pid] = "supervisor"
        elif "meltcore.serve.api_server_main" in command:
            found[pid] = "API server"
        elif "--engine" in command:
            found[pid] = "engine"
        elif "meltcore.fleet.ray.driver" in command or DRIVER in command:
            found[pid] = "driver"
        else:
            found[pid] = "actor" if line.startswith("ray::EngineActor") else "processes of Ray"
    return found


def used_s(names: dict[int, str]) -> dict[str, float]:
    """CPU seconds by name."""
    total = dict.fromkeys(names.values(), 0.0)
    for pid, name in names.items():
        total[name] += cpu_s(pid)
    return total


async def run_level(fleet: Fleet, times: Path, streams: int, step_ms: int, steps: int) -> Run | None:
    """Open the streams, and measure from the end of the warm-up to near the end.

    Returns None if no token was sent between the two looks at the processes, as on a machine that is too busy.
    """
    step_s = step_ms / 1e3
    names = named_processes(fleet)
    prompt = [*divmod(streams, DIGIT), step_ms]
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": steps, "stream": True}).encode()
    address = resolve_target(fleet.url)
    request = address.encode_head("POST", "/v1/completions", len(body)) + body
    connections: list[HttpConnection] = [await connect(address, OPEN_LIMIT_S) for _ in range(streams)]
    answers = [Stream() for _ in connections]
    gc.collect()
    gc.disable()
    try:
        for connection, answer in zip(connections, answers, strict=True):
            connection.send(request, answer)
            await asyncio.sleep(0)
        async with asyncio.timeout(OPEN_LIMIT_S):
            await answers[0].begun
        # Looks at the processes are in the middle between two steps, when all is idle.
        await asyncio.sleep(round(WARM_UP * steps) * step_s + LEAD_S + step_s / 2)
        first_s, first = time.monotonic(), used_s(names)
        await asyncio.sleep(round(0.7 * steps) * step_s)
        last_s, last = time.monotonic(), used_s(names)
        async with asyncio.timeout(OPEN_LIMIT_S + steps * step_s):
            for answer in answers:
                await answer.ended
    finally:
        gc.enable()
        for connection in connections:
            connection.close()
    sent_s = np.fromfile(times)
    counted = (sent_s > first_s) & (sent_s < last_s)
    arrived_s = np.array([answer.arrived_s(steps) for answer in answers])
    latency_ms = (arrived_s - sent_s)[:, counted] * 1e3
    tokens = int(counted.sum()) * streams
    if not tokens:
        return None
    p50, p99 = np.percentile(latency_ms, [50, 99])
    used_us = {name: (last[name] - first[name]) / tokens * 1e6 for name in first}
    return Run(used_us, float(p50), float(p99))


# --- the comparison ------------------------------------------------------------------------------------------------


def middle(values: list[float]) -> float:
    return statistics.median(values)


def level_rows(streams: int, step_ms: int, pairs: list[tuple[Run, Run]]) -> tuple[list[Row], list[str]]:
    """The rows of one number of streams, and what pairs scatter. pairs: local and remote."""
    work = f"{streams:,} {'stream' if streams == 1 else 'streams'}, a token each {step_ms} ms"
    rows, notes = [], []

    def compare(what: str, unit: str, value: Callable[[Run], float], target: Target | None, how: str) -> None:
        local, remote = [value(run) for run, _ in pairs], [value(run) for _, run in pairs]
        found = [there - here if how == "added" else there / here for here, there in zip(local, remote, strict=True)]
        rows.append(
            Row(work=f"{work}: {what}", unit=unit, value=middle(remote), peer="local", peer_value=middle(local))
        )
        label = f"{work}: {what}, {'remote minus local' if how == 'added' else 'remote over local'}"
        rows.append(Row(work=label, unit=unit if how == "added" else "ratio", value=middle(found), target=target))
        notes.append(f"{label}: {', '.join(f'{each:.3f}' for each in sorted(found))}")

    compare("CPU of the API server per token", "us", lambda run: run.used_us["API server"], CPU_RATIO, "over")
    compare("engine's send to the client, median", "ms", lambda run: run.p50_ms, ADDED_MS, "added")
    compare("engine's send to the client, p99", "ms", lambda run: run.p99_ms, None, "added")
    for name in sorted({name for _, run in pairs for name in run.used_us} - {"API server"}):
        row = Row(
            work=f"{work}: CPU of {name} per token", unit="us", value=middle([run.used_us[name] for _, run in pairs])
        )
        if name in pairs[0][0].used_us:
            row.peer, row.peer_value = "local", middle([run.used_us[name] for run, _ in pairs])
        rows.append(row)
    return rows, notes


def is_ready(fleet: Fleet) -> bool:
    return fleet.health().get("status") == "ready"


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Row], list[str]]:
    """Run all levels; returns the rows and what a reader must know."""
    os.environ["XDG_STATE_HOME"] = str(folder)
    checkpoint = write_checkpoint(folder)
    path = folder / "fleet.yaml"
    load = f"checkpoint: {checkpoint}, load_format: dummy, device: cpu, memory: 64MiB"
    path.write_text(f"server: {{port: 0, api_server_count: 1}}\nmodels:\n  {MODEL}: {{{load}}}\n")
    rows, notes = [], []
    command = script_command("--serve", str(path))
    settings = {"RAY_USAGE_STATS_ENABLED": "0"}
    with (
        running(command, folder / "local.log", settings) as local,
        running([*command, args.ray], folder / "remote.log", settings) as remote,
    ):
        for fleet in (local, remote):
            wait(partial(is_ready, fleet), "the engine", READY_LIMIT_S)
        for streams, step_ms in args.levels.items():
            steps = max(10, round(args.seconds * 1e3 / step_ms))
            pairs = []
            for number in range(args.pairs):
                order = (local, remote) if number % 2 == 0 else (remote, local)
                found = {}
                for fleet in order:
                    level = partial(run_level, fleet, checkpoint / SEND_TIMES, streams, step_ms, steps)
                    runs = (uvloop.run(level()) for _ in range(MOST_TRIES))
                    run = next((run for run in runs if run is not None), None)
                    if run is None:
                        raise SystemExit(f"{streams} streams: no run of {MOST_TRIES} counted a token: other work is on")
                    found[fleet] = run
                pairs.append((found[local], found[remote]))
                here, there = pairs[-1]
                print(
                    f"{streams:5} streams: CPU {here.used_us['API server']:.1f} and {there.used_us['API server']:.1f}"
                    f" us per token, median {here.p50_ms:.3f} and {there.p50_ms:.3f} ms,"
                    f" p99 {here.p99_ms:.2f} and {there.p99_ms:.2f} ms",
                    flush=True,
                )
            added, scatter = level_rows(streams, step_ms, pairs)
            rows += added
            notes += scatter
    return rows, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", default=DRIVER, help=f"the cluster ({DRIVER}: a process in place of Ray)")
    parser.add_argument("--streams", default="", help="comma-separated; others than 1, 100 and 1000 take 100 ms steps")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of runs, local and remote, per number of streams")
    parser.add_argument("--quick", action="store_true", help="one short pair with 4 streams: does it work?")
    parser.add_argument("--check-only", action="store_true", help="Do not write the result file.")
    parser.add_argument("--serve", nargs="+", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--engine", nargs=2, metavar=("DIRECTORY", "CLIENTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        be_engine(Path(args.engine[0]), int(args.engine[1]))
        return 0
    if args.serve:
        path, *address = args.serve
        if address == [DRIVER]:
            use_driver(DRIVER)
        return serve(Path(path), address[0] if address else None, script_command("--engine"))
    if args.quick:
        args.levels, args.seconds, args.pairs = {4: 20}, 0.4, 1
    else:
        chosen = [int(text) for text in args.streams.split(",") if text] or list(LEVELS)
        args.levels = {streams: LEVELS.get(streams, 100) for streams in chosen}
    with_scripts()
    raise_file_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the servers
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows, notes = measure(args, Path(folder))
    notes += [
        f"{os.cpu_count()} cores; other work on them at the start: load average {load_before:.2f}",
        f"the remote engine is started by {'a process in place of Ray' if args.ray == DRIVER else 'Ray'}",
    ]
    if not args.check_only:
        versions = ("pyzmq", "uvloop", "msgspec", *(() if args.ray == DRIVER else ("ray",)))
        subject = "" if args.ray == DRIVER else "started by Ray"
        write_result(rows, {name: metadata.version(name) for name in versions}, notes, subject=subject)
    for row in rows if args.check_only else ():
        print(f"{row.work}: {row.value:.4g} {row.unit}")
    missed = [f"{row.work}: {row.value:.4g} {row.unit}" for row in rows if row.met is False]
    for line in missed:
        print(f"FAIL: {line}")
    return 1 if missed and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
