"""Output tokens per second over HTTP: streamed answers under a closed loop of users, one server at a time.

Without --url it starts our own server (random weights, prefix cache off, prompts as token ids, greedy, EOS ignored).
With --url it loads any OpenAI-compatible server, with the same client and the same requests, and writes a run named
NAME. A later run of ours compares with it by --peer.

    python benchmarks/http_load.py --url http://127.0.0.1:8000 --name vllm
    python benchmarks/http_load.py --peer benchmarks/results/http_load/h200.json --peer-subject vllm

Two rates per level: in the steady window (the longest span with 90 % of the users in flight), and of the whole level,
its ramp and its last answers included. The server's own count of generated tokens, where it has one (vLLM without
--disable-log-stats), has to agree with the client's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

from bench_output import Row, Target, need_gpu, write_result

from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.experiments.servers import MeltcoreServer
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import run_levels
from meltcore.measure.load.wire.probe import parse_gauges

# Targets on one H200 with Qwen3-0.6B, by users.
TARGETS = {users: Target(rate) for users, rate in ((400, 27_100.0), (1_000, 30_750.0), (10_000, 29_850.0))}
OFFLINE_TARGET = Target(0.98, of="ratio")
CALIBRATION_REQUESTS = 1_000
SPARE = 1.5  # more requests than the short calibration predicts, since --seconds is a floor
COUNTER, COUNTER_TOLERANCE = "generation_tokens_total", 0.005
MOST_EMPTY = 0.001  # fraction of answers without text that a level may have
MAX_MODEL_LEN = 2048
MOST_RUNNING = 1024  # sequences of our server by default
MOST_OFFLINE = 1_000  # users: with more, the others wait in either


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return parse_gauges(reply.read().decode())


def load(url: str, users: int, requests: int, seed: int, args: argparse.Namespace, notes: list[str]) -> LevelResult:
    config = LoadConfig(
        url=url,
        model=args.served,
        concurrency=(users,),
        num_prompts=(requests,),
        num_warmups=0,
        workload=f"random:in={args.inlen},out={args.out},vocab={args.vocab}",
        continuous_usage=False,
        processes=min(args.processes, users),
        seed=seed,
    )
    (level,) = run_levels(config)
    # Random weights sometimes generate only special tokens, which have no text.
    empty = sum(count for reason, count in level.failures.items() if reason.startswith("empty answer"))
    answered = requests - empty
    if level.failed > empty or empty > MOST_EMPTY * requests or level.output_tokens != answered * args.out:
        raise RuntimeError(f"{users} users: {level.failures or 'wrong count'}: {level.output_tokens} tokens")
    if empty:
        notes.append(f"{users:,} users: {empty} of {requests:,} answers had tokens and no text, and are not counted")
    return level


def measure(url: str, users: int, args: argparse.Namespace, notes: list[str]) -> tuple[LevelResult, float]:
    """One level of at least `args.seconds`, and the CPU microseconds of our API servers per token (0: unknown).

    Adds remarks about the level to `notes`.
    """
    probe = load(url, min(users, CALIBRATION_REQUESTS), min(2 * users, CALIBRATION_REQUESTS), 1, args, [])
    rate = probe.output_tokens_per_s / args.out
    requests = round(max(args.rounds * users, SPARE * rate * args.seconds))
    print(f"{users:,} users: {requests:,} requests", flush=True)
    before = metrics(url)
    level = load(url, users, requests, 2, args, notes)
    after = metrics(url)
    if level.duration_s < args.seconds:
        raise RuntimeError(f"{users} users: the level lasted {level.duration_s:.1f} s, less than {args.seconds:g} s")
    if args.url is None or COUNTER in after:
        counted = after[COUNTER] - before[COUNTER]
        if abs(counted / level.output_tokens - 1) > COUNTER_TOLERANCE:
            raise RuntimeError(f"the server counted {counted:,.0f} tokens, the client {level.output_tokens:,}")
    else:
        notes.append(f"{users:,} users: the server does not count its tokens; only the client did")
    cpu_s = after.get("api_server_cpu_seconds_total", 0.0) - before.get("api_server_cpu_seconds_total", 0.0)
    return level, cpu_s * 1e6 / level.output_tokens


def level_rows(users: int, level: LevelResult, cpu_us: float, peer: dict[str, float]) -> list[Row]:
    work = f"{users:,} users, {level.requests:,} requests in {level.duration_s:.0f} s"
    steady = level.steady
    found = [("whole level", "output tokens/s", level.output_tokens_per_s)]
    if steady is not None:
        found.insert(0, ("steady", "output tokens/s", steady.output_tokens_per_s))
    for name, value in (
        ("TTFT mean", level.ttft_ms.mean),
        ("gap between events p50", level.event_gap_ms.p50),
        ("gap between events p99", level.event_gap_ms.p99),
    ):
        if value is not None:
            found.append((name, "ms", value))
    found.append(("events per token", "ratio", level.events_per_token or 0.0))
    if cpu_us:
        found.append(("API server processes", "CPU us per token", cpu_us))
    if level.client is not None and level.client.cpu_utilization is not None:
        found.append(("busiest client process", "of a core", level.client.cpu_utilization))
    rows = []
    for name, unit, value in found:
        row = Row(work=f"{work}: {name} [{level.verdict}]", unit=unit, value=value)
        if name == "steady":
            row.target = TARGETS.get(users)
        other = peer.get(f"{users:,} users: {name}")
        if other:
            row.peer, row.peer_value = "peer", other
            row.ratio = value / other if unit == "output tokens/s" else other / value if value else None
        rows.append(row)
    for reason in level.reasons:
        print(f"{users:,} users: {reason}", flush=True)
    return rows


def read_peer(path: Path | None, subject: str) -> dict[str, float]:
    """A peer's values by "USERS users: NAME", from its run of `subject` in a result file."""
    values: dict[str, float] = {}
    for run in json.loads(path.read_text())["runs"] if path else []:
        if run["subject"] == subject:
            for row in run["rows"]:
                users, _, rest = row["work"].partition(",")
                values[f"{users}: {rest.partition(': ')[2].partition(' [')[0]}"] = row["value"]
    if path and not values:
        raise SystemExit(f"{path} has no run of {subject!r}; name one with --peer-subject")
    return values


def offline_tokens_per_s(users: int, requests: int, args: argparse.Namespace) -> float:
    """Our offline API on as many requests of the same lengths, `users` of them running, in a process of its own."""
    command = [sys.executable, __file__, "--offline", str(requests), "--model", args.model, "--users", str(users)]
    command += ["--inlen", args.inlen, "--out", str(args.out), "--vocab", str(args.vocab)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return float(result.stdout.splitlines()[-1])


def beside_offline(users: int, level: LevelResult, args: argparse.Namespace) -> Row:
    alone = offline_tokens_per_s(users, level.requests, args)
    http = level.output_tokens_per_s
    return Row(
        work=f"{users:,} users, {level.requests:,} requests: through HTTP against offline",
        unit="output tokens/s",
        value=http,
        peer="own offline API",
        peer_value=alone,
        ratio=http / alone,
        target=OFFLINE_TARGET,
    )


def measure_offline(requests: int, args: argparse.Namespace) -> float:
    from meltcore import LLM, SamplingParams

    llm = LLM(
        args.model,
        load_format="dummy",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=min(int(args.users), MOST_RUNNING),
        enable_prefix_caching=False,
    )
    low, _, high = args.inlen.partition("-")
    draw = random.Random(0)
    prompts = [
        [draw.randrange(100, args.vocab) for _ in range(draw.randint(int(low), int(high or low)))]
        for _ in range(requests)
    ]
    sampling = SamplingParams(max_tokens=args.out, ignore_eos=True)
    llm.generate(prompts[:64], sampling)
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling)
    elapsed = time.perf_counter() - started
    assert all(len(answer.token_ids) == args.out for answer in answers)
    return requests * args.out / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="Address of a running server, instead of starting ours.")
    parser.add_argument("--served", help="The model's name there (default: the first listed).")
    parser.add_argument("--name", default="peer", help="Name of the server that --url gives, in the result file.")
    parser.add_argument("--peer", type=Path, help="Result file with a run of a peer to compare with.")
    parser.add_argument("--peer-subject", default="peer", help="The peer's --name in that file (default: peer).")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="Model of our server.")
    parser.add_argument("--users", default="400,1000,10000")
    parser.add_argument("--seconds", type=float, default=30.0, help="Shortest duration of a level in seconds.")
    parser.add_argument("--rounds", type=float, default=2.0, help="Mean number of requests per user, at least.")
    parser.add_argument("--inlen", default="576", help="Prompt tokens: N or LOW-HIGH.")
    parser.add_argument("--out", type=int, default=128, help="Output tokens.")
    parser.add_argument("--vocab", type=int, default=30_000, help="Vocabulary size: prompt token ids are below it.")
    parser.add_argument("--api-server-count", type=int, help="API server processes of our server.")
    parser.add_argument(
        "--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) // 3), help="Client processes."
    )
    parser.add_argument("--no-offline", action="store_true", help="Skip the offline API.")
    parser.add_argument("--serve-flags", default="", help="More flags for our server, in one string.")
    parser.add_argument("--offline", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        print(measure_offline(args.offline, args))
        return
    if args.url is None:
        need_gpu(model=args.model)
    flags = ["--load-format", "dummy", "--no-enable-prefix-caching", "--max-model-len", str(MAX_MODEL_LEN)]
    flags += ["--api-server-count", str(args.api_server_count)] if args.api_server_count else []
    peer = read_peer(args.peer, args.peer_subject)
    rows: list[Row] = []
    notes: list[str] = []
    levels: dict[int, LevelResult] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    early: BaseException | None = None
    try:
        with ExitStack() as stack:
            url = args.url
            if url is None:
                log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
                command = ["serve", args.model, "--port", "0", *flags, *args.serve_flags.split()]
                url = stack.enter_context(MeltcoreServer(command, log, report=print)).wait_ready()
            for users in map(int, args.users.split(",")):
                level, cpu_us = measure(url, users, args, notes)
                rows += level_rows(users, level, cpu_us, peer)
                levels[users] = level
    except (KeyboardInterrupt, RuntimeError) as error:
        early = error  # the levels before it count
        notes.append(f"ended early: {error!r}")
    if args.url is None and not args.no_offline and early is None:
        rows += [beside_offline(users, level, args) for users, level in levels.items() if users <= MOST_OFFLINE]
    versions = {} if args.url else {name: metadata.version(name) for name in ("torch", "uvicorn", "uvloop")}
    if rows:
        write_result(rows, versions, notes, subject=args.model if args.url is None else args.name)
    if early is not None:
        raise SystemExit(notes[-1])


if __name__ == "__main__":
    with signals_as_ctrl_c():
        main()
