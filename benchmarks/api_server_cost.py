"""Two costs of the API server process, with the bundled model and the engine on the same machine.

- CPU time of the API server process per streamed token, at several concurrencies: from the server's own
  `meltcore:api_server_cpu_seconds_total`, read before and after each level. It includes everything: reading,
  tokenizing, admitting, detokenizing, writing events, metrics, the log line.
- The engine's output tokens per second offline (`LLM`, the same prompts, lengths and threads) against through HTTP.

    python benchmarks/api_server_cost.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

from bench_output import Row, write_result

from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.measure.experiments.servers import MeltcoreServer
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import run_levels
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
LEVELS = (10, 100, 400)
VOCABULARY = 800  # below the bundled tokenizer's size
# The API server and the client share the other core. An engine that takes it too slows the process that is measured.
ENGINE_THREADS = max(1, len(os.sched_getaffinity(0)) - 1)


def api_server_cpu_s(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("meltcore:api_server_cpu_seconds_total"):
                return float(line.split()[-1])
    raise RuntimeError("the server has no meltcore:api_server_cpu_seconds_total")


def run_level(url: str, concurrency: int, requests: int) -> tuple[float, float]:
    """(API server CPU microseconds per token, output tokens/s) of one level of fixed-length answers."""
    config = LoadConfig(
        url=url,
        concurrency=(concurrency,),
        num_prompts=(requests,),
        num_warmups=0,
        workload=f"random:in={PROMPT_TOKENS},out={OUTPUT_TOKENS},vocab={VOCABULARY}",
        continuous_usage=False,
    )
    before = api_server_cpu_s(url)
    (level,) = run_levels(config)
    spent = api_server_cpu_s(url) - before
    if level.failed or level.output_tokens != requests * OUTPUT_TOKENS:
        raise RuntimeError(f"{level.failures}, {level.output_tokens} tokens of {requests * OUTPUT_TOKENS}")
    return spent * 1e6 / level.output_tokens, level.output_tokens_per_s


def offline_tokens_per_s(requests: int) -> float:
    """Output tokens/s of the same work without an API server, in a process of its own."""
    result = subprocess.run(
        [sys.executable, __file__, "--offline", str(requests)], capture_output=True, text=True, timeout=600, check=True
    )
    return float(json.loads(result.stdout.splitlines()[-1]))


def measure_offline(requests: int) -> float:
    import random

    from meltcore import LLM, SamplingParams
    from meltcore.common.host_memory import keep_freed_memory

    keep_freed_memory()  # as the engine process does: the two must differ by the API server alone
    llm = LLM(BUNDLED_MODEL, enable_prefix_caching=False)
    draw = random.Random(0)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    llm.generate(prompts[:8], sampling)
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling)
    elapsed = time.perf_counter() - started
    assert sum(len(answer.token_ids) for answer in answers) == requests * OUTPUT_TOKENS
    return requests * OUTPUT_TOKENS / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--offline", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.offline:
        print(json.dumps(measure_offline(arguments.offline)))
        return
    os.environ["OMP_NUM_THREADS"] = str(ENGINE_THREADS)  # of the server's engine and of the offline processes
    costs: dict[int, list[float]] = {level: [] for level in LEVELS}
    over_http: list[float] = []
    offline: list[float] = []
    most = max(LEVELS)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = ["serve", BUNDLED_MODEL, "--no-enable-prefix-caching", "--port", "0"]
        with MeltcoreServer(command, log, report=print) as server:
            url = server.wait_ready()
            run_level(url, 8, 8)
            for _ in range(arguments.rounds):
                for level in LEVELS:
                    cost, rate = run_level(url, level, max(level, 100))
                    costs[level].append(cost)
                    if level == most:
                        over_http.append(rate)
        offline += [offline_tokens_per_s(most) for _ in range(arguments.rounds)]
    rows = [
        Row(
            work=f"API server process, {level} streams, {PROMPT_TOKENS} tokens in / {OUTPUT_TOKENS} out",
            unit="CPU us per streamed token",
            value=statistics.median(values),
        )
        for level, values in costs.items()
    ]
    http, alone = statistics.median(over_http), statistics.median(offline)
    rows.append(
        Row(
            work=f"{most} requests, {PROMPT_TOKENS} in / {OUTPUT_TOKENS} out: through HTTP against offline",
            unit="output tokens/s",
            value=http,
            peer="own offline API",
            peer_value=alone,
            ratio=http / alone,
        )
    )
    write_result(rows, {name: version(name) for name in ("torch", "starlette", "uvicorn", "uvloop")})


if __name__ == "__main__":
    with signals_as_ctrl_c():
        main()
