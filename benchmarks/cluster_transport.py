"""Compares how the tokens of an engine reach the server: ZeroMQ on one machine and over TCP, and Ray's streaming calls.

    python benchmarks/cluster_transport.py [--streams 1,100,1000] [--seconds 5] [--repeats 3]

A scripted engine ends a step every 20 ms, in which each stream gets one token. The receiver decodes each message, as an
API server does. Measured for each transport and number of streams: the receiver's CPU per token with all its threads,
and the latency from the send to the decoded message. Repeats of all transports alternate; stated is their median.

    ipc           the two sockets of an engine on the same machine
    tcp           one CURVE socket on the loopback device, for an engine on another node
    ray-steps     an actor's streaming call that yields one message per step
    ray-requests  a streaming call per stream that yields its tokens

The Ray transports need the package ray; they are left out with a line where it is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from bench_output import Row, median_rows, write_result

from meltcore.common.process import KILL_LIMIT_S, end_group, start
from meltcore.engine.host.client_sockets import open_sockets
from meltcore.protocol.engines import FromEngine, from_engine
from meltcore.protocol.generation import AddRequest, EngineStats, SequenceOutput, StepOutputs, ToEngine
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.tcp import Binding, EngineAddress, KeyPair, read_listening, write_address, write_binding
from meltcore.serve.engines.engine_link import EngineLink

STEP_S = 0.02
START_LIMIT_S = 60.0
TRANSPORTS = ("ipc", "tcp", "ray-steps", "ray-requests")


def step_message(streams: range, number: int) -> StepOutputs:
    """A step of a scripted engine. `mask_s_total` is the time of the send, which no transport changes."""
    outputs = [SequenceOutput(f"cmpl-{stream:020}", [number % 512]) for stream in streams]
    return StepOutputs(outputs, EngineStats(mask_s_total=time.monotonic()), time.monotonic())


def produce(directory: Path) -> None:
    """Wait for a request whose `max_tokens` is the number of steps and whose `priority` that of streams; send them."""
    sockets = open_sockets(directory, 1, ToEngine)
    request = None
    while request is None:
        sockets.poll(1000)
        request = next((each for each in sockets.receive(0) or [] if isinstance(each, AddRequest)), None)
    started_s = time.monotonic()
    for number in range(request.sampling.max_tokens):
        time.sleep(max(0.0, started_s + number * STEP_S - time.monotonic()))
        sockets.send(0, step_message(range(request.priority), number))
    sockets.close()


class Receiver:
    """Counts tokens and latencies of messages, from the second second on."""

    def __init__(self, streams: int, steps: int) -> None:
        self.expected = streams * steps
        self.warm_up = self.expected // 5
        self.tokens = 0
        self.latencies: list[float] = []
        self.done = asyncio.Event()
        self.started_cpu_s = 0.0
        self.started_tokens = 0

    def receive(self, message: FromEngine) -> None:
        now_s = time.monotonic()
        assert isinstance(message, StepOutputs)
        self.tokens += sum(len(output.token_ids) for output in message.outputs)
        if not self.started_tokens and self.tokens >= self.warm_up:
            self.started_tokens, self.started_cpu_s = self.tokens, time.process_time()
        elif self.started_tokens:
            self.latencies.append(now_s - message.stats.mask_s_total)
        if self.tokens >= self.expected:
            self.done.set()

    def result(self) -> dict[str, float]:
        cpu_s = time.process_time() - self.started_cpu_s
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1e3
        return {
            "cpu_us_per_token": cpu_s / (self.tokens - self.started_tokens) * 1e6,
            "p50_ms": float(p50),
            "p99_ms": float(p99),
            "tokens": self.tokens - self.started_tokens,
        }


async def over_zeromq(streams: int, steps: int, *, is_remote: bool) -> dict[str, float]:
    receiver = Receiver(streams, steps)
    with tempfile.TemporaryDirectory() as there_name, tempfile.TemporaryDirectory() as here_name:
        there, here = Path(there_name), Path(here_name)
        keys, host = KeyPair.generate(), "127.0.0.1"
        if is_remote:
            write_binding(there, Binding(host, keys.public))
        else:
            there = here
        process = await asyncio.to_thread(start, [sys.executable, __file__, "--produce", str(there)])
        try:
            if is_remote:
                await _until(lambda: read_listening(there))
                listening = read_listening(there)
                assert listening is not None
                write_address(here, EngineAddress("loopback", host, listening.port, listening.engine_key, keys))
            link = EngineLink(here, 0, receiver.receive, sys.exit)
            sampling = SamplingParams(max_tokens=steps)
            link.send(AddRequest("start", [1], sampling, priority=streams))
            async with asyncio.timeout(START_LIMIT_S + 3 * steps * STEP_S):
                await receiver.done.wait()
            link.close()
        finally:
            await asyncio.to_thread(end_group, process, KILL_LIMIT_S)
    return receiver.result()


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        while not condition():  # noqa: ASYNC110 - a file tells it
            await asyncio.sleep(0.01)


class RayEngine:
    """The engine as an actor; each call streams the messages of some streams."""

    async def stream(self, first: int, last: int, steps: int, start_s: float) -> AsyncIterator[bytes]:
        """Yield one message per step. start_s: of the first one, by the monotonic clock of this machine."""
        encode = msgspec.msgpack.Encoder().encode
        for number in range(steps):
            await asyncio.sleep(max(0.0, start_s + number * STEP_S - time.monotonic()))
            yield encode(step_message(range(first, last), number))


async def over_ray(streams: int, steps: int, *, per_request: bool) -> dict[str, float]:
    import ray

    receiver = Receiver(streams, steps)
    actor = ray.remote(RayEngine).options(max_concurrency=2 * streams + 1, num_cpus=0).remote()
    decode = msgspec.msgpack.Decoder(from_engine()).decode
    calls = [(stream, stream + 1) for stream in range(streams)] if per_request else [(0, streams)]

    async def read(first: int, last: int, start_s: float) -> None:
        method = actor.stream.options(num_returns="streaming")
        async for message in method.remote(first, last, steps, start_s):
            receiver.receive(decode(await message))

    try:
        start_s = time.monotonic() + 2.0
        async with asyncio.timeout(START_LIMIT_S + 3 * steps * STEP_S):
            await asyncio.gather(*(read(*call, start_s) for call in calls))
    finally:
        ray.kill(actor)
    return receiver.result()


def measure(transport: str, streams: int, steps: int) -> dict[str, Any]:
    """Measure one transport in this process. `error`: it was too slow."""
    try:
        if transport.startswith("ray"):
            import ray

            ray.init(
                address="local",
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
                num_cpus=1,
                object_store_memory=100 * 2**20,
            )
            work = over_ray(streams, steps, per_request=transport == "ray-requests")
        else:
            work = over_zeromq(streams, steps, is_remote=transport == "tcp")
        return {"transport": transport, "streams": streams, **uvloop.run(work)}
    except TimeoutError:
        return {
            "transport": transport,
            "streams": streams,
            "error": f"not within {START_LIMIT_S:g} s and three times the length",
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,100,1000")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check-only", action="store_true", help="Do not write the result file.")
    parser.add_argument("--produce", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce is not None:
        produce(options.produce)
        return 0
    steps = round(options.seconds / STEP_S)
    if options.one is not None:
        print(json.dumps(measure(options.one, int(options.streams), steps)), flush=True)
        return 0
    load_before = os.getloadavg()[0]
    levels = [
        (transport, int(streams))
        for transport in options.transports.split(",")
        for streams in options.streams.split(",")
    ]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {level: [] for level in levels}
    print(f"{'transport':14} {'streams':>7} {'CPU us/token':>13} {'p50 ms':>8} {'p99 ms':>8}")
    for _ in range(options.repeats):
        for transport, streams in levels:
            if any("error" in run for run in found[transport, streams]):
                continue
            run = _run(transport, streams, options.seconds)
            found[transport, streams].append(run)
            numbers = run.get("error") or f"{run['cpu_us_per_token']:13.2f} {run['p50_ms']:8.3f} {run['p99_ms']:8.3f}"
            print(f"{transport:14} {streams:>7} {numbers}", flush=True)
    rows, notes = table_rows(found)
    notes.append(f"{os.cpu_count()} cores; load average at the start {load_before:.2f}, niceness {os.nice(0)}")
    if not options.check_only:
        packages = ("pyzmq", "uvloop", "msgspec", *(("ray",) if find_spec("ray") else ()))
        write_result(rows, {name: metadata.version(name) for name in packages}, notes)
    return 0


def table_rows(found: dict[tuple[str, int], list[dict[str, Any]]]) -> tuple[list[Row], list[str]]:
    """The rows of all transports, and a note for each that has no result."""
    rows: list[Row] = []
    notes = []
    for (transport, streams), runs in found.items():
        work = f"{streams:,} {'stream' if streams == 1 else 'streams'}, {transport}"
        failed = [run["error"] for run in runs if "error" in run]
        if failed:
            notes.append(f"{work}: {failed[0]}")
            continue
        rows += median_rows(
            [
                [
                    Row(work=f"{work}: CPU of the receiver per token", unit="us", value=run["cpu_us_per_token"]),
                    Row(work=f"{work}: send to the decoded message, median", unit="ms", value=run["p50_ms"]),
                    Row(work=f"{work}: send to the decoded message, p99", unit="ms", value=run["p99_ms"]),
                ]
                for run in runs
            ]
        )
    return rows, notes


def _run(transport: str, streams: int, seconds: float) -> dict[str, Any]:
    """Measure in a process of its own: CPU time is that of one transport alone."""
    command = [sys.executable, __file__, "--one", transport, "--streams", str(streams), "--seconds", str(seconds)]
    limit_s = 2 * START_LIMIT_S + 4 * seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"transport": transport, "streams": streams, "error": f"no result within {limit_s:g} s"}
    if done.returncode or not done.stdout:
        return {"transport": transport, "streams": streams, "error": done.stderr.strip().rpartition("\n")[2]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    sys.exit(main())
