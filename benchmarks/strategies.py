"""Common ways to run a small model on one GPU, on the same prompts (those of the GPU score): output tokens per second.

transformers one request at a time, on batches, compiled, in INT8, in asynchronous tasks, CUDA streams and processes;
ONNX Runtime; TensorRT-LLM, SGLang, vLLM, and ours. Random weights, prompts of 128 to 1,024 tokens, 128 output tokens,
greedy, end tokens ignored, prefill in the wall time. Each strategy has its own processes and the GPU to itself, is
warmed up with one batch, and gets whole batches until its time is over. The number of requests stands beside each rate:
a slow strategy may not get beyond its first batch.

    python benchmarks/strategies.py --site vllm=FOLDER     FOLDER: holds an installed vLLM
    python benchmarks/strategies.py --list                 what can run here, and why the rest cannot

A strategy whose package or device is missing is not run; the reason is printed and kept with the results.

Exit status: 0, 1 where nothing could be measured, 130 where it was interrupted (what was measured is written).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from bench_output import Row, need_gpu, write_result

WORKER = Path(__file__).parent / "strategy_worker.py"
OURS = "meltcore, all concurrently"
INTERRUPTED = "interrupted"
EXIT_NOTHING, EXIT_INTERRUPTED = 1, 130
WARM_LIMIT_S, WORK_LIMIT_S = 600.0, 300.0


# What a worker imports that may be missing, beside torch: the module's name and its package's.
PACKAGES = {
    "transformers": {"transformers": "transformers"},
    "compile": {"transformers": "transformers"},
    "int8": {"transformers": "transformers", "bitsandbytes": "bitsandbytes", "accelerate": "accelerate"},
    "async": {"transformers": "transformers"},
    "streams": {"transformers": "transformers"},
    "onnxruntime": {"transformers": "transformers", "onnxruntime": "onnxruntime-gpu", "onnx": "onnx"},
    "tensorrt_llm": {"tensorrt_llm": "tensorrt-llm"},
    "sglang": {"sglang": "sglang"},
    "vllm": {"vllm": "vllm"},
    "meltcore": {},
}
_NEED_GPU = {"streams": "only CUDA has streams", "tensorrt_llm": "TensorRT-LLM", "sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True)
class Strategy:
    """`batch` requests are given to each of `processes` at a time. site: a folder that goes first on its path."""

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
        """Output tokens per second."""
        return self.tokens / self.took_s

    def __str__(self) -> str:
        return f"{self.rate:,.0f} output tokens/s, of {self.requests:,} requests in {self.took_s:.1f} s"


class StrategyError(Exception):
    """A strategy did not work here; the reason stands in the table."""


def strategies(args: argparse.Namespace) -> list[Strategy]:
    """All of them. Processes share the GPU without MPS, by time slices."""
    many, batch, tasks, requests = args.processes, args.batch, args.tasks, args.requests
    listed = [
        Strategy("transformers, one request at a time", "transformers", 1),
        Strategy(f"transformers, generate on batches of {batch}", "transformers", batch),
        Strategy(f"transformers, torch.compile and a static cache, batches of {batch}", "compile", batch),
        Strategy(f"transformers, INT8 weights (bitsandbytes), batches of {batch}", "int8", batch),
        Strategy(f"transformers, {tasks} asynchronous tasks, one request each", "async", tasks),
        Strategy(f"transformers, {tasks} CUDA streams, one request each", "streams", tasks),
        Strategy(f"transformers, {many} processes, one request each", "transformers", 1, many),
        Strategy(f"transformers, {many} processes, batches of {batch} each", "transformers", batch, many),
        Strategy(f"ONNX Runtime, batches of {batch}", "onnxruntime", batch),
        Strategy(f"TensorRT-LLM, {requests:,} concurrent requests", "tensorrt_llm", requests),
        Strategy(f"SGLang, {requests:,} concurrent requests", "sglang", requests),
        Strategy(f"vLLM, {requests:,} concurrent requests", "vllm", requests),
        Strategy(f"{OURS}, {requests:,} requests", "meltcore", requests),
    ]
    return [replace(each, site=args.sites.get(each.worker)) for each in listed]


def measure(strategy: Strategy, args: argparse.Namespace) -> Measured:
    """Start, warm up and time a strategy's workers, and end them in every case. Raises StrategyError."""
    with tempfile.TemporaryFile("w+") as log:
        workers: list[subprocess.Popen[str]] = []
        try:  # around the starts as well: an interruption there must leave no worker behind
            workers.extend(start(strategy, process, args, log) for process in range(strategy.processes))
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
    """The rest of the worker's next line that starts with `beginning`; libraries print other lines.

    Raises StrategyError where it ends first, or is ended because it took longer than `limit_s`.
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
    raise StrategyError(f"ended with status {worker.wait()} within {limit_s:g} s: {last}")


def end(worker: subprocess.Popen[str]) -> None:
    """End the worker and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def missing(strategy: Strategy, device: str) -> str | None:
    """Why a strategy cannot run on a device ("cuda", "cpu"), as far as that is known before it starts."""
    if strategy.worker in _NEED_GPU and not device.startswith("cuda"):
        return f"needs a GPU: {_NEED_GPU[strategy.worker]}"
    packages = PACKAGES.get(strategy.worker, {})
    in_site = {module for module in packages if strategy.site is not None and Path(strategy.site, module).is_dir()}
    if strategy.site is not None and not in_site:
        return f"{Path(strategy.site).name} holds none of {', '.join(packages)}"
    absent = [package for module, package in packages.items() if module not in in_site and find_spec(module) is None]
    if not absent:
        return None
    return f"not installed: {', '.join(absent)}; name a folder that holds it with --site {strategy.worker}=FOLDER"


def site_version(package: str, site: str | None) -> str | None:
    found = metadata.distributions(name=package, path=[site] if site else sys.path)
    return next((each.version for each in found), None)


def run_all(wanted: Sequence[Strategy], args: argparse.Namespace) -> tuple[dict[str, Measured], dict[str, str]]:
    """(what was measured, why the rest was not) by name. An interruption ends it there."""
    found: dict[str, Measured] = {}
    reasons: dict[str, str] = {}
    for number, strategy in enumerate(wanted):
        reason = missing(strategy, args.device)
        if reason is None:
            try:
                found[strategy.name] = measure(strategy, args)
                print(f"{strategy.name}: {found[strategy.name]}", flush=True)
                continue
            except StrategyError as error:
                reason = str(error)
            except KeyboardInterrupt:
                reasons |= {left.name: INTERRUPTED for left in wanted[number:]}
                break
        reasons[strategy.name] = reason
        print(f"{strategy.name}: not run: {reason}", flush=True)
    return found, reasons


def table_rows(found: dict[str, Measured]) -> list[Row]:
    """One row per strategy, with ours as its peer."""
    ours = next((each.rate for name, each in found.items() if name.startswith(OURS)), None)
    rows = []
    for name, each in found.items():
        row = Row(work=name, unit="output tokens/s", value=each.rate)
        if ours is not None and not name.startswith(OURS):
            row.peer, row.peer_value, row.ratio = "meltcore", ours, ours / each.rate
        rows.append(row)
    return rows


def package_versions(sites: dict[str, str]) -> dict[str, str]:
    """Installed versions of torch, triton and what the strategies import."""
    found = {name: site_version(name, None) for name in ("torch", "triton")}
    for worker, packages in PACKAGES.items():
        for name in packages.values():
            found[name] = found.get(name) or site_version(name, sites.get(worker)) or site_version(name, None)
    return {name: version for name, version in found.items() if version}


def site_option(text: str) -> tuple[str, str]:
    """WORKER=FOLDER as (worker, folder)."""
    worker, _, folder = text.partition("=")
    if worker not in PACKAGES:
        raise argparse.ArgumentTypeError(f"{text}: no such worker; one of {', '.join(PACKAGES)}")
    if not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: must name a folder")
    return worker, folder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=15.0, help="Duration of each strategy after its warm-up.")
    parser.add_argument("--batch", type=int, default=64, help="Batch size of transformers' generate.")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=16, help="Asynchronous tasks, and CUDA streams, of one process.")
    parser.add_argument("--requests", type=int, default=1000, help="Concurrent requests of serving engines.")
    parser.add_argument(
        "--site",
        type=site_option,
        action="append",
        default=[],
        metavar="WORKER=FOLDER",
        help="Folder with a worker's packages, put first on its path; repeatable.",
    )
    parser.add_argument("--only", default="", help=f"Workers to run ({', '.join(PACKAGES)}), separated by commas.")
    parser.add_argument("--list", action="store_true", help="List strategies and why some cannot run; run none.")
    args = parser.parse_args()
    for name in ("seconds", "batch", "processes", "tasks", "requests"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            parser.error(f"--{name} must be above 0 and finite; got {value:g}")
    args.sites = dict(args.site)
    return args


def print_list(wanted: Sequence[Strategy], device: str) -> None:
    if device.startswith("cuda"):
        import torch

        if torch.cuda.device_count() == 0:
            print("torch sees no NVIDIA GPU: nothing runs with --device cuda")
    for strategy in wanted:
        reason = missing(strategy, device)
        print(f"{strategy.worker:<13} {strategy.name}" + (f": cannot run: {reason}" if reason else ""))


def main() -> int:
    args = parse_arguments()
    only = set(filter(None, args.only.split(",")))
    if unknown := only - PACKAGES.keys():
        raise SystemExit(f"--only {','.join(sorted(unknown))}: no such worker; one of {', '.join(PACKAGES)}")
    wanted = [strategy for strategy in strategies(args) if not only or strategy.worker in only]
    if args.list:
        print_list(wanted, args.device)
        return 0
    if args.device.startswith("cuda"):
        need_gpu()

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interruption keeps what was measured
    found, reasons = run_all(wanted, args)
    write_result(
        table_rows(found),
        package_versions(args.sites),
        notes=[
            *(f"{name}: {each}" for name, each in found.items()),
            *(f"{name}: not run: {reason}" for name, reason in reasons.items()),
        ],
        subject=args.model,
        gpus=0 if args.device == "cpu" else 1,
    )
    return EXIT_INTERRUPTED if INTERRUPTED in reasons.values() else 0 if found else EXIT_NOTHING


if __name__ == "__main__":
    sys.exit(main())
