"""Ten thousand concurrent streams: all finish, the server stays ready, and its memory does not grow.

Runs --before concurrent requests and then --streams, on one server, and fails unless
- every request got all of its tokens, and both client and server saw all of them in flight together;
- every /health request meanwhile was answered "ready";
- the memory of all server processes together, and of the GPU, is within --tolerance of what it was after the first.

    python benchmarks/many_streams.py                                                        one GPU
    python benchmarks/many_streams.py --model meltcore/sums --load-format auto --api-server-count 2 --streams 200 \\
        --before 50 --inlen 32 --out 64 --vocab 800
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from bench_output import Row, Target, need_gpu, write_result

from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.common.gpus.driver import NoDriverError, Nvml
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.experiments.servers import MeltcoreServer
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import run_levels
from meltcore.measure.load.wire.probe import parse_gauges

HEALTH_EVERY_S = 0.25
SETTLE_S = 5.0  # after the last answer: idle processes return memory to the system after a moment


@dataclass(frozen=True)
class Resident:
    """A process's resident bytes by kind: its own, mapped files, and memory shared with others or with a driver."""

    anonymous: int
    file: int
    shared: int

    @classmethod
    def of(cls, pid: int) -> Resident:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(*(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")))

    @property
    def total(self) -> int:
        return self.anonymous + self.file + self.shared


@dataclass(frozen=True)
class Memory:
    """Bytes, after a level and at rest. GPU: None where there is no NVIDIA driver."""

    processes: dict[int, Resident]  # by process id
    gpu: int | None

    @property
    def host(self) -> int:
        return sum(process.total for process in self.processes.values())


class HealthWatch:
    """Asks /health in a thread, on one kept connection, and keeps every answer that is not "ready"."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.asked = 0
        self.slowest_s = 0.0
        self.problems: list[str] = []

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=30)
        while not self._stop.wait(HEALTH_EVERY_S):
            started_s = time.monotonic()
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                body = answer.read()
            except OSError as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                connection.close()
            else:
                if answer.status != http.client.OK:
                    self.problems.append(f"{answer.status}: {body.decode()}")
            self.asked += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)


def server_pids(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in server_pids(int(child)))]


def print_growth(before: Memory, after: Memory) -> None:
    """What each process has grown by, KiB of each kind."""
    print("grown by, KiB:      total  anonymous  file  shared")
    for pid, now in after.processes.items():
        was = before.processes.get(pid, Resident(0, 0, 0))
        by = (now.total - was.total, now.anonymous - was.anonymous, now.file - was.file, now.shared - was.shared)
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        name = words[words.index("-m") + 1].removeprefix("meltcore.") if "-m" in words else words[0]
        print("{:>24} {:>11,} {:>5,} {:>7,}  {}".format(*(size // 1024 for size in by), f"{name} ({pid})"))


def gpu_bytes() -> int | None:
    """Memory in use on the first GPU."""
    try:
        nvml = Nvml()
    except NoDriverError:
        return None
    used, _ = nvml.memory_bytes(nvml.gpus()[0])
    nvml.close()
    return used


def at_rest(url: str, pid: int) -> Memory:
    """Wait until the server holds no request and has been idle, then read its memory. Raises RuntimeError."""
    until_s = time.monotonic() + 30
    while gauges(url)["requests_in_flight"] or gauges(url)["num_requests_running"]:
        if time.monotonic() > until_s:
            raise RuntimeError("requests are left in the server")
        time.sleep(0.2)
    time.sleep(SETTLE_S)
    return Memory({found: Resident.of(found) for found in server_pids(pid)}, gpu_bytes())


def gauges(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return parse_gauges(reply.read().decode())


def run(url: str, streams: int, args: argparse.Namespace) -> LevelResult:
    config = LoadConfig(
        url=url,
        concurrency=(streams,),
        num_prompts=(streams,),
        num_warmups=0,
        workload=f"random:in={args.inlen},out={args.out},vocab={args.vocab}",
        continuous_usage=False,
        processes=args.processes,
        seed=streams,
    )
    (level,) = run_levels(config)
    return level


def problems_of(level: LevelResult, streams: int, args: argparse.Namespace) -> list[str]:
    found = [f"{count} requests failed: {reason}" for reason, count in level.failures.items()]
    if level.output_tokens != streams * args.out:
        found.append(f"{level.output_tokens} tokens came, not {streams * args.out}")
    for who, peak in (("client", level.peak_in_flight), ("server", level.server_peak_in_flight)):
        if peak != streams:
            found.append(f"the {who} saw at most {peak} in flight")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--before", type=int, default=1_000)
    parser.add_argument("--inlen", default="128-1024")
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=30_000)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--api-server-count", type=int)
    parser.add_argument("--check-only", action="store_true", help="Do not write the result file.")
    parser.add_argument(
        "--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) // 3), help="Client processes."
    )
    args = parser.parse_args()
    need_gpu(model=args.model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is ended then, too
    command = ["serve", args.model, "--port", "0", "--load-format", args.load_format]
    command += ["--no-enable-prefix-caching", "--max-model-len", "2048"]
    command += ["--api-server-count", str(args.api_server_count)] if args.api_server_count else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with MeltcoreServer(command, log, report=print) as server:
            url = server.wait_ready()
            first = run(url, args.before, args)
            before = at_rest(url, server.pid)
            with HealthWatch(url) as health:
                level = run(url, args.streams, args)
            after = at_rest(url, server.pid)
            print_growth(before, after)
    problems = problems_of(first, args.before, args) + problems_of(level, args.streams, args)
    problems += [f"/health: {problem}" for problem in health.problems[:3]]
    work = f"{args.streams:,} concurrent streams, {args.inlen} in / {args.out} out"
    rows = [
        Row(work=f"{work}: finished", unit="requests", value=level.succeeded, target=Target(args.streams)),
        Row(work=f"{work}: most in flight, by the server", unit="requests", value=level.server_peak_in_flight or 0),
        Row(work=f"{work}: whole level [{level.verdict}]", unit="output tokens/s", value=level.output_tokens_per_s),
        Row(work=f"{work}: /health not ready", unit=f"of {health.asked}", value=len(health.problems)),
        Row(work=f"{work}: slowest /health", unit="s", value=health.slowest_s),
    ]
    for where, was, now in (("host", before.host, after.host), ("GPU", before.gpu, after.gpu)):
        grown = None if was is None or now is None else now / was - 1
        if grown is None:
            print(f"{where}: no NVIDIA driver, so its memory was not measured")
            continue
        print(f"{where} memory: {was >> 20:,} MiB after {args.before:,} streams, {now >> 20:,} MiB after all")
        name = f"{where} memory afterwards, against after {args.before:,}"
        rows.append(Row(work=name, unit="growth", value=grown, target=Target(args.tolerance, better="lower")))
        if abs(grown) > args.tolerance:
            problems.append(f"{name}: {grown:+.1%}")
    if not args.check_only:
        write_result(rows, {name: metadata.version(name) for name in ("torch", "uvicorn", "uvloop")})
    for problem in problems:
        print(f"FAIL: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    with signals_as_ctrl_c():
        sys.exit(main())
