"""What an upstream server costs more behind our API server than direct: latency, open streams, memory, cancelled work.

Scripted servers answer immediately, so all time beyond them is the API server's. In a run of its own:

- latency: a fixed rate of requests over kept connections, unstreamed answers of 64 tokens. Every request is sent
  directly or through the API server in turn, half of the rate each, so both meet the same machine. The cost is the
  difference of each pair: its median and 99th percentile.
- streams: 10,000 open streams with 20,000 events/s in total through the API server. Every event must come; stated are
  events/s, CPU time per event of the API server and its memory.
- memory: resident memory of the API server under the latency run's load, in MB per 10 minutes after the first ten
  (`--minutes`, at least 20).
- cancel: clients that disconnect, together and one after another, streamed and unstreamed. Stated is the time
  from the client's close to the end of its upstream request. The scripted server runs in this process, so both times
  are of one clock, and the delays of its event loop count too.

    python benchmarks/forwarding_cost.py
    python benchmarks/forwarding_cost.py --run streams
    python benchmarks/forwarding_cost.py --peer LiteLLM=http://127.0.0.1:4000 --rate 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
from bench_output import SCRIPTED_SERVER, Row, Target, write_result

from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.measure.load.wire.connection import HttpConnection, connect, resolve_target
from meltcore.measure.load.wire.connection import Target as Address
from meltcore.measure.load.wire.http import ResponseHandler
from meltcore.serve.http.listener import raise_file_limit
from meltcore.settings.fleet_spec import FleetSpec, ModelSection, ServerSection

sys.path.append(str(SCRIPTED_SERVER.parent))
from scripted_server import Script, ScriptedServer

MODEL = "scripted"
TOKENS = 64
RATE = 1000.0  # requests/s through the API server
LATENCY_TARGETS = {"median": Target(1.0, better="lower"), "p99": Target(5.0, better="lower")}
STREAMS, EVENTS_PER_S = 10_000, 20_000.0
OPEN_S = 20.0  # the scripted first token, before which all streams are opened
CANCELS, CANCELS_TOGETHER = 200, 100
CANCEL_TARGET = Target(100.0, better="lower")  # ms that an upstream request may outlive its client
ITL_S, CANCEL_AFTER_S = 0.05, 0.12  # a client leaves within its stream
POLL_S = 0.0005
START_LIMIT_S = 30.0
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "What is 7 * 8?"}], "max_tokens": TOKENS}
SERVE = """
import sys, msgspec
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.supervisor import serve
sys.exit(serve(msgspec.json.decode(sys.argv[1], type=PlacedFleet)))
"""


class Answer(ResponseHandler):
    """One answer: its events and how it ended."""

    total_events = 0

    def __init__(self, done: asyncio.Future[Answer]) -> None:
        self.now_s = 0.0
        self.events = 0
        self.status = 0
        self.failure = ""
        self._done = done

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        del headers
        self.status = status

    def on_body(self, data: bytes) -> None:
        events = data.count(b"data: ")
        self.events += events
        Answer.total_events += events

    def on_end(self) -> None:
        self._done.set_result(self)

    def on_failure(self, reason: str, detail: str) -> None:
        self.failure = f"{reason}: {detail}"
        if not self._done.done():
            self._done.set_result(self)


class Client:
    """Kept connections to one address."""

    def __init__(self, url: str) -> None:
        self.address: Address = resolve_target(url)
        self.idle: list[HttpConnection] = []

    async def ask(self, body: bytes) -> tuple[float, Answer]:
        """Send a request; returns its latency in seconds and the answer."""
        while self.idle and not self.idle[-1].is_reusable:
            self.idle.pop()
        connection = self.idle.pop() if self.idle else await connect(self.address, 60.0)
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        began_s = time.perf_counter()
        connection.send(self.address.encode_head("POST", "/v1/chat/completions", len(body)) + body, Answer(done))
        answer = await done
        latency_s = time.perf_counter() - began_s
        if answer.failure or answer.status != 200:
            raise SystemExit(f"{self.address.url} failed: status {answer.status} {answer.failure}")
        if connection.is_reusable:
            self.idle.append(connection)
        return latency_s, answer


@contextmanager
def process(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)


@contextmanager
def servers(*script: str, api_servers: int = 1) -> Iterator[tuple[str, str, list[int]]]:
    """The scripted server's URL, that of the API servers before it, and the process ids of the latter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(SCRIPTED_SERVER), *script]
        with process(command, folder, "scripted") as scripted:
            assert scripted.stdout is not None
            direct = scripted.stdout.readline().split()[-1]
            with api_servers_before(direct, folder, api_servers) as (through, pids):
                yield direct, through, pids


@contextmanager
def api_servers_before(direct: str, folder: Path, api_servers: int = 1) -> Iterator[tuple[str, list[int]]]:
    """The URL of the API servers before the server at `direct`, and their process ids."""
    server = ServerSection(port=0, api_server_count=api_servers)
    config = PlacedFleet(FleetSpec(models={MODEL: ModelSection(url=direct)}, server=server))
    with process([sys.executable, "-c", SERVE, msgspec.json.encode(config).decode()], folder, "serve") as served:
        assert served.stdout is not None
        through = served.stdout.readline().split()[-1]
        yield through, api_servers_of(served.pid, api_servers)


def api_servers_of(supervisor: int, count: int) -> list[int]:
    """The process ids of the API servers of a supervisor."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        found = [int(pid) for pid in children if b"serve.api_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise SystemExit("the API server processes did not start")


def cpu_s(pids: list[int]) -> float:
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def memory_mb(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def wait_ready(client: Client, body: bytes) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            await client.ask(body)
            return
        except SystemExit:
            await asyncio.sleep(0.1)
    raise SystemExit(f"{client.address.url} was not ready within {START_LIMIT_S:g} s")


async def paired(direct: Client, through: Client, rate: float, seconds: float) -> list[tuple[float, float]]:
    """Latencies of pairs, direct and through the server, in seconds. Each pair begins together with its number."""
    body = json.dumps(BODY).encode()
    loop, pairs, running = asyncio.get_running_loop(), [], set()

    async def one(*, is_direct_first: bool) -> None:
        first, second = (direct, through) if is_direct_first else (through, direct)
        times = {id(first): (await first.ask(body))[0]}
        times[id(second)] = (await second.ask(body))[0]
        pairs.append((times[id(direct)], times[id(through)]))

    began_s = loop.time()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, began_s + number / rate - loop.time()))
        task = asyncio.create_task(one(is_direct_first=number % 2 == 0))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return pairs


def percentile(values: list[float], fraction: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(fraction * 1000) - 1]


def latency_rows(pairs: list[tuple[float, float]], rate: float, name: str) -> list[Row]:
    work = f"{name}: added latency, {TOKENS}-token unstreamed answers, {rate:,.0f} requests/s"
    added_ms = [(through - direct) * 1000 for direct, through in pairs]
    direct_ms = [direct * 1000 for direct, _ in pairs]
    found = {"median": statistics.median(added_ms), "p99": percentile(added_ms, 0.99)}
    print(
        f"{work}: median {found['median']:.3f} ms, p99 {found['p99']:.3f} ms over {len(pairs):,} pairs; "
        f"direct median {statistics.median(direct_ms):.3f} ms, p99 {percentile(direct_ms, 0.99):.3f} ms"
    )
    return [
        Row(work=f"{work}, {key}", unit="ms", value=value, target=LATENCY_TARGETS[key] if rate == RATE else None)
        for key, value in found.items()
    ]


def measure_latency(rate: float, seconds: float, peer: str | None) -> list[Row]:
    async def run(direct_url: str, through_url: str) -> list[tuple[float, float]]:
        direct, through = Client(direct_url), Client(through_url)
        for client in (direct, through):
            await wait_ready(client, json.dumps(BODY).encode())
        await paired(direct, through, rate, min(3.0, seconds))  # connections, and what is compiled or cached once
        before_s = cpu_s(pids)
        pairs = await paired(direct, through, rate, seconds)
        used_us.append((cpu_s(pids) - before_s) / len(pairs) * 1e6)
        return pairs

    used_us: list[float] = []
    with servers("--ttft-ms", "0", "--itl-ms", "0", "--tokens", str(TOKENS)) as (direct, through, pids):
        rows = latency_rows(uvloop.run(run(direct, through)), rate, "meltcore")
        work = f"CPU time of the API server per unstreamed request, {rate:,.0f} requests/s"
        rows.append(Row(work=work, unit="us", value=used_us[0]))
        if peer is not None:
            name, _, url = peer.partition("=")
            rows += latency_rows(uvloop.run(run(direct, url)), rate, name)
    return rows


def measure_streams(seconds: float) -> list[Row]:
    """Open all streams before the first one's first token, then count events and CPU time while all are streaming."""
    itl_s = STREAMS / EVENTS_PER_S
    tokens = round((seconds + OPEN_S) / itl_s)
    body = json.dumps(BODY | {"stream": True, "max_tokens": tokens}).encode()
    script = ("--ttft-ms", str(OPEN_S * 1000), "--itl-ms", str(itl_s * 1000), "--tokens", str(tokens))
    samples: list[tuple[float, int, float, float]] = []  # time, events, CPU seconds, MB

    async def run(url: str, pids: list[int]) -> tuple[float, float, list[Answer]]:
        client, tasks = Client(url), []
        began_s = time.monotonic()
        watch = asyncio.create_task(sample(pids))
        for number in range(STREAMS):
            tasks.append(asyncio.create_task(client.ask(body)))
            if number % 50 == 49:
                await asyncio.sleep(0.8 * OPEN_S / (STREAMS / 50))
        opened_s = time.monotonic()
        answers = [answer for _, answer in await asyncio.gather(*tasks)]
        watch.cancel()
        return opened_s + OPEN_S, began_s + OPEN_S + tokens * itl_s, answers

    async def sample(pids: list[int]) -> None:
        while True:
            samples.append((time.monotonic(), Answer.total_events, cpu_s(pids), memory_mb(pids)))
            await asyncio.sleep(0.5)

    with servers(*script, api_servers=2) as (_, through, pids):  # one would need 20,000 file descriptors
        time.sleep(3.0)  # the model's health
        first_s, last_s, answers = uvloop.run(run(through, pids))
    expected = STREAMS * (tokens + 4)  # role, finish, usage and [DONE]
    if (events := sum(answer.events for answer in answers)) != expected:
        raise SystemExit(f"{events:,} events came of {expected:,}")
    inside = [each for each in samples if first_s <= each[0] <= last_s]
    (start_s, start_events, start_cpu_s, _), (end_s, end_events, end_cpu_s, memory) = inside[0], inside[-1]
    counted, took_s = end_events - start_events, end_s - start_s
    work = f"{STREAMS:,} open streams, {EVENTS_PER_S:,.0f} events/s"
    print(f"{work}: all {expected:,} events came; {counted / took_s:,.0f} events/s over {took_s:.0f} s")
    return [
        Row(
            work=f"{work}, through the API server",
            unit="events/s",
            value=counted / took_s,
            target=Target(0.99 * EVENTS_PER_S),
        ),
        Row(
            work=f"{work}, CPU time of the API server per event",
            unit="us",
            value=(end_cpu_s - start_cpu_s) / counted * 1e6,
        ),
        Row(work=f"{work}, memory of both API server processes", unit="MB", value=memory),
    ]


def measure_memory(rate: float, minutes: float) -> list[Row]:
    if minutes < 20:
        raise SystemExit("--minutes must be at least 20: the first ten do not count")

    async def run(url: str, direct_url: str, pids: list[int]) -> list[float]:
        direct, through, samples = Client(direct_url), Client(url), []
        await wait_ready(through, json.dumps(BODY).encode())
        for minute in range(round(minutes)):
            await paired(direct, through, rate, 60.0)
            samples.append(memory_mb(pids))
            print(f"minute {minute + 1}: {samples[-1]:.2f} MB", flush=True)
        return samples

    with servers("--ttft-ms", "0", "--itl-ms", "0", "--tokens", str(TOKENS)) as (direct, through, pids):
        samples = uvloop.run(run(through, direct, pids))
    growth = (samples[-1] - samples[9]) / (len(samples) - 10) * 10
    work = f"memory growth per 10 minutes after the first ten, {rate:,.0f} requests/s, {minutes:g} minutes"
    return [Row(work=work, unit="MB", value=growth, target=Target(1.0, better="lower"))]


async def reach(server: ScriptedServer, in_flight: int) -> float:
    """The time at which this many requests are open at the server, to half a millisecond."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while server.in_flight != in_flight:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{server.in_flight} requests are open at the server instead of {in_flight}")
        await asyncio.sleep(POLL_S)
    return time.monotonic()


async def cancelled(server: ScriptedServer, client: Client, count: int, *, stream: bool) -> tuple[float, list[float]]:
    """How long upstream requests outlive clients that disconnect: `count` together, then one at a time; in seconds."""
    body = json.dumps(BODY | {"stream": stream}).encode()
    request = client.address.encode_head("POST", "/v1/chat/completions", len(body)) + body

    async def begin() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(client.address.host, client.address.port)
        writer.write(request)
        return writer

    writers = [await begin() for _ in range(count)]
    await reach(server, count)
    began_s = time.monotonic()
    for writer in writers:
        writer.transport.abort()
    together_s, single_s = await reach(server, 0) - began_s, []
    for _ in range(CANCELS):
        writer = await begin()
        await reach(server, 1)
        await asyncio.sleep(CANCEL_AFTER_S)
        began_s = time.monotonic()
        writer.transport.abort()
        single_s.append(await reach(server, 0) - began_s)
    return together_s, single_s


def measure_cancel() -> list[Row]:
    async def run(folder: Path) -> list[Row]:
        rows = []
        server = ScriptedServer(Script(ttft_s=0.0, itl_s=ITL_S, tokens=100_000))
        direct = f"http://127.0.0.1:{await server.start()}"
        with api_servers_before(direct, folder) as (through, _):
            client = Client(through)
            await wait_ready(client, json.dumps(BODY | {"max_tokens": 1}).encode())
            for stream in (True, False):
                together_s, single_s = await cancelled(server, client, CANCELS_TOGETHER, stream=stream)
                work = f"upstream request after its client has left, {'streamed' if stream else 'unstreamed'}"
                values = {
                    f"one of {CANCELS:,} after another, median": statistics.median(single_s),
                    f"one of {CANCELS:,} after another, longest": max(single_s),
                    f"the last of {CANCELS_TOGETHER:,} together": together_s,
                }
                rows += [
                    Row(work=f"{work}: {key}", unit="ms", value=value * 1000, target=CANCEL_TARGET)
                    for key, value in values.items()
                ]
        server.stop()
        return rows

    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(run(Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", choices=("latency", "streams", "memory", "cancel"), default="latency")
    parser.add_argument("--rate", type=float, default=RATE, help="pairs of requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--peer", metavar="NAME=URL", help="another gateway to the same model, in the same run")
    args = parser.parse_args()
    raise_file_limit()
    if args.run == "latency":
        rows = measure_latency(args.rate, args.seconds, args.peer)
    elif args.run == "streams":
        rows = measure_streams(args.seconds)
    elif args.run == "cancel":
        rows = measure_cancel()
    else:
        rows = measure_memory(args.rate, args.minutes)
    write_result(rows, {})


if __name__ == "__main__":
    with signals_as_ctrl_c():
        main()
