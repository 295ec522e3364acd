"""What people try with a small model on one GPU, on the same prompts (those of the GPU score): output tokens a second.

Batch 1 with transformers, its `generate` on batches, several processes of it, vLLM, and ours. Random weights, prompts
of 128 to 1,024 tokens, 128 output tokens, greedy, end tokens ignored, prefill in the wall time. Each strategy has its
own process and the GPU to itself, is warmed up with one batch, and gets whole batches until its time is over. How many
requests a rate is of stands beside it: a slow strategy may not get beyond its first batch.

    python benchmarks/strategies.py --vllm-site SITE     SITE: a folder that holds an installed vLLM

Exit status: 0, 1 where nothing could be measured, 130 where it was interrupted (what was measured is written).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from bench_output import Row, need_gpu, write_result

WORKER = Path(__file__).parent / "strategy_worker.py"
OURS = "meltcore, all at once"
INTERRUPTED = "interrupted"
EXIT_NOTHING, EXIT_INTERRUPTED = 1, 130
WARM_LIMIT_S, WORK_LIMIT_S = 600.0, 300.0


@dataclass(frozen=True)
class Strategy:
    """`batch` requests are given to each of `processes` at a time."""

    name: str
    worker: str
    batch: int
    processes: int = 1
    site: str | None = None


@dataclass(frozen=True)
class Measured:
    """What the workers of a strategy did from the first start to the last end."""

    tokens: int
    requests: int
    took_s: float

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.took_s

    def __str__(self) -> str:
        return f"{self.rate:,.0f} output tokens/s, of {self.requests:,} requests in {self.took_s:.1f} s"


class Failed(Exception):
    """A strategy did not work here; the reason stands in the table."""


def strategies(args: argparse.Namespace) -> list[Strategy]:
    many = args.processes
    return [
        Strategy("transformers, one request at a time", "transformers", 1),
        Strategy(f"transformers, generate on batches of {args.batch}", "transformers", args.batch),
        Strategy(f"transformers, {many} processes, one request each", "transformers", 1, many),
        Strategy(f"vLLM, {args.requests:,} requests at once", "vllm", args.requests, site=args.vllm_site),
        Strategy(f"{OURS}, {args.requests:,} requests", "meltcore", args.requests),
    ]


def measure(strategy: Strategy, args: argparse.Namespace) -> Measured:
    """Start, warm up and time a strategy's workers, and end them whatever happens. Raises Failed."""
    with tempfile.TemporaryFile("w+") as log:
        workers = [start(strategy, process, args, log) for process in range(strategy.processes)]
        try:
            for worker in workers:
                expect(worker, "warm", WARM_LIMIT_S, log)
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            done = [json.loads(expect(worker, "done ", WORK_LIMIT_S, log)) for worker in workers]
        finally:
            for worker in workers:
                end(worker)
    return Measured(
        tokens=sum(each["tokens"] for each in done),
        requests=sum(each["requests"] for each in done),
        took_s=max(each["ended_s"] for each in done) - min(each["started_s"] for each in done),
    )


def start(strategy: Strategy, process: int, args: argparse.Namespace, log: TextIO) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), strategy.worker, "--model", args.model, "--device", args.device]
    command += ["--dtype", args.dtype, "--batch", str(strategy.batch), "--seconds", str(args.seconds)]
    command += ["--process", str(process), "--processes", str(strategy.processes)]
    path = os.pathsep.join(filter(None, [strategy.site, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # vLLM starts processes of its own, which have to end with it
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )


def expect(worker: subprocess.Popen[str], beginning: str, limit_s: float, log: TextIO) -> str:
    """What follows `beginning` in the worker's next line that has it; libraries print others.

    Raises Failed where it ends first, or is ended because it took longer than `limit_s`.
    """
    assert worker.stdout is not None
    watchdog = threading.Timer(limit_s, end, (worker,))
    watchdog.daemon = True
    try:  # around the start as well: an interruption there must not leave the watchdog behind
        watchdog.start()
        for line in worker.stdout:
            if line.startswith(beginning):
                return line.removeprefix(beginning)
    finally:
        watchdog.cancel()
    log.seek(0)
    last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
    raise Failed(f"ended with status {worker.wait()} within {limit_s:g} s: {last}")


def end(worker: subprocess.Popen[str]) -> None:
    """The worker and all it started."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def missing(strategy: Strategy) -> str | None:
    """Why a strategy cannot even be tried here."""
    if strategy.worker == "vllm":
        if strategy.site is None and find_spec("vllm") is None:
            return "vLLM is not installed; name a folder that holds it with --vllm-site"
        if strategy.site is not None and not Path(strategy.site, "vllm").is_dir():
            return f"{Path(strategy.site).name} holds no vllm package"
    return None


def site_version(package: str, site: str | None) -> str | None:
    found = metadata.distributions(name=package, path=[site] if site else sys.path)
    return next((each.version for each in found), None)


def run_all(wanted: Sequence[Strategy], args: argparse.Namespace) -> tuple[dict[str, Measured], dict[str, str]]:
    """(what was measured, why the rest was not) by name. An interruption ends it there."""
    found: dict[str, Measured] = {}
    reasons: dict[str, str] = {}
    for number, strategy in enumerate(wanted):
        reason = missing(strategy)
        if reason is None:
            try:
                found[strategy.name] = measure(strategy, args)
                print(f"{strategy.name}: {found[strategy.name]}", flush=True)
                continue
            except Failed as error:
                reason = str(error)
            except KeyboardInterrupt:
                reasons |= {left.name: INTERRUPTED for left in wanted[number:]}
                break
        reasons[strategy.name] = reason
        print(f"{strategy.name}: skipped: {reason}", flush=True)
    return found, reasons


def table_rows(found: dict[str, Measured]) -> list[Row]:
    """A row a strategy, ours beside each other's."""
    ours = next((each.rate for name, each in found.items() if name.startswith(OURS)), None)
    rows = []
    for name, each in found.items():
        row = Row(work=name, unit="output tokens/s", value=each.rate)
        if ours is not None and not name.startswith(OURS):
            row.peer, row.peer_value, row.ratio = "meltcore", ours, ours / each.rate
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each strategy, after its warm-up")
    parser.add_argument("--batch", type=int, default=64, help="of transformers' generate")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1000, help="at once, for vLLM and ours")
    parser.add_argument("--vllm-site", help="a folder with vLLM and what it needs, put first on the path")
    parser.add_argument("--only", default="", help="strategies whose worker is one of these, with commas")
    parser.add_argument("--name", default="strategies", help="of the result file")
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        need_gpu()

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was measured is kept then, too
    only = set(filter(None, args.only.split(",")))
    wanted = [strategy for strategy in strategies(args) if not only or strategy.worker in only]
    found, reasons = run_all(wanted, args)
    versions = {name: site_version(name, None) for name in ("torch", "triton", "transformers")}
    versions["vllm"] = site_version("vllm", args.vllm_site)
    write_result(
        args.name,
        table_rows(found),
        {name: version for name, version in versions.items() if version},
        notes=[
            *(f"{name}: {each}" for name, each in found.items()),
            *(f"{name}: skipped: {reason}" for name, reason in reasons.items()),
        ],
    )
    return EXIT_INTERRUPTED if INTERRUPTED in reasons.values() else 0 if found else EXIT_NOTHING


if __name__ == "__main__":
    sys.exit(main())
