"""CPU time of a load client per streamed event: ours against aiohttp, on the same server in the same run.

The scripted server is pinned to one core and each client, in a process of its own, to another; all run on uvloop. Work
per event is alike: receive, cut the event out, decode its JSON, look for text, note the time. CPU is user + system of
the client process from its first connect to its last event. "whole run" is `meltcore load` around the same client:
making the workload, keeping records, watching itself, summing up. Clients take turns; the median of the rounds counts.

    python benchmarks/client_cost.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata

import msgspec
import uvloop
from bench_output import SCRIPTED_SERVER, Row, Target, write_result

from meltcore.cli.signals import signals_as_ctrl_c

SCENES = ((500, 100, 50.0), (10_000, 16, 1000.0))  # streams, tokens of each, ms between two: both 10,000 events/s
TARGET = Target(2.0, of="ratio")
TTFT_MS = 4000.0  # all streams are open before the first event


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice]


_typed = msgspec.json.Decoder(_Event).decode


def _text_by_json(data: bytes) -> str | None:
    choices = json.loads(data)["choices"]
    return choices[0]["delta"].get("content") if choices else None


def _text_by_msgspec(data: bytes) -> str | None:
    choices = _typed(data).choices
    return choices[0].delta.content if choices and choices[0].delta is not None else None


BODY = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "What is 7 * 8?"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 512,
}


def run_ours(url: str, streams: int) -> int:
    """Events received by the client itself: connections and streams, as `run_levels` uses them."""
    from meltcore.measure.load.record import RequestRecord
    from meltcore.measure.load.wire.connection import connect, resolve_target
    from meltcore.measure.load.wire.stream import StreamedResponse

    target = resolve_target(url)
    body = json.dumps(BODY).encode()
    request = target.encode_head("POST", "/v1/chat/completions", len(body)) + body

    async def one() -> int:
        connection = await connect(target, 60.0)
        done: asyncio.Future[StreamedResponse] = asyncio.get_running_loop().create_future()
        connection.send(request, StreamedResponse(RequestRecord(0, 0.0), done.set_result, keep_text=False))
        response = await done
        connection.close()
        if response.record.failure is not None:
            raise SystemExit(f"ours failed: {response.record.failure}")
        return len(response.record.times_s)

    async def every() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    return uvloop.run(every())


def run_whole(url: str, streams: int) -> int:
    """Events received in a whole run of the load generator."""
    from meltcore.measure.load.config import LoadConfig
    from meltcore.measure.load.run.runner import run_levels

    config = LoadConfig(
        url=url,
        concurrency=(streams,),
        num_prompts=(streams,),
        num_warmups=0,
        workload="problems:short",
        continuous_usage=False,
    )
    [result] = run_levels(config)
    if result.failed:
        raise SystemExit(f"ours failed: {result.failures}")
    return result.output_tokens


def run_aiohttp(url: str, streams: int, text_of: Callable[[bytes], str | None]) -> int:
    """Events received."""
    import aiohttp

    async def one(session: aiohttp.ClientSession) -> list[float]:
        async with session.post(f"{url}/v1/chat/completions", json=BODY) as response:
            response.raise_for_status()
            return [
                time.monotonic()
                async for line in response.content
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]") and text_of(line[6:])
            ]

    async def every() -> int:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return sum(map(len, await asyncio.gather(*(one(session) for _ in range(streams)))))

    return uvloop.run(every())


CLIENTS: dict[str, Callable[[str, int], int]] = {
    "meltcore": run_ours,
    "whole run": run_whole,
    "aiohttp + msgspec": lambda url, streams: run_aiohttp(url, streams, _text_by_msgspec),
    "aiohttp + json": lambda url, streams: run_aiohttp(url, streams, _text_by_json),
}


def measure_here(client: str, url: str, streams: int, core: int) -> None:
    """In a process of its own: print [events, CPU seconds]."""
    os.sched_setaffinity(0, {core})
    __import__("aiohttp" if client.startswith("aiohttp") else "meltcore.measure.load.run.runner")
    before_s = time.process_time()
    events = CLIENTS[client](url, streams)
    print(json.dumps([events, time.process_time() - before_s]))


def measure(client: str, url: str, streams: int, tokens: int, core: int) -> float:
    """CPU microseconds per event."""
    command = [
        sys.executable,
        __file__,
        "--client",
        client,
        "--url",
        url,
        "--streams",
        str(streams),
        "--core",
        str(core),
    ]
    events, cpu_s = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    if events != streams * tokens:
        raise SystemExit(f"{client}: {events} events came of {streams * tokens}")
    return cpu_s / events * 1e6


def start_server(core: int, tokens: int, itl_ms: float) -> tuple[subprocess.Popen[str], str]:
    """The process and its address."""
    options = ["--ttft-ms", str(TTFT_MS), "--itl-ms", str(itl_ms), "--tokens", str(tokens)]
    command = [sys.executable, str(SCRIPTED_SERVER), *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(server.pid, {core})
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        measure_here(args.client, args.url, args.streams, args.core)
        return
    server_core, client_core = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    for streams, tokens, itl_ms in SCENES:
        server, url = start_server(server_core, tokens, itl_ms)
        try:
            found: dict[str, list[float]] = {client: [] for client in CLIENTS}
            for _ in range(args.rounds):
                for client, costs in found.items():
                    costs.append(measure(client, url, streams, tokens, client_core))
        finally:
            server.kill()
            server.wait(10)
        ours = statistics.median(found.pop("meltcore"))
        work = f"client CPU per streamed event, {streams:,} streams, {streams * 1000 / itl_ms:,.0f} events/s"
        rows.append(Row(work=f"{work}, whole run", unit="us", value=statistics.median(found.pop("whole run"))))
        for peer, costs in found.items():
            cost = statistics.median(costs)
            rows.append(
                Row(work=work, unit="us", value=ours, peer=peer, peer_value=cost, ratio=cost / ours, target=TARGET)
            )
    packages = {name: metadata.version(name) for name in ("aiohttp", "uvloop", "msgspec")}
    write_result(rows, packages)


if __name__ == "__main__":
    with signals_as_ctrl_c():
        main()
