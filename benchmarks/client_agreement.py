"""Agreement of our load generator and guidellm on one server: output tok/s, median TTFT, median ITL, within 3 %.

The server is the scripted one, with times like a real server's (TTFT 100 ms, ITL 20 ms, 64 tokens), so both can
also be compared with the true values. Clients take turns. guidellm lives in an environment of its own:

    python -m venv /tmp/peer && /tmp/peer/bin/pip install guidellm
    python benchmarks/client_agreement.py --guidellm /tmp/peer/bin/guidellm
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_output import SCRIPTED_SERVER, Row, Target, write_result

from meltcore.cli.signals import signals_as_ctrl_c

CONCURRENCY, REQUESTS = 10, 100
TTFT_MS, ITL_MS, TOKENS = 100.0, 20.0, 64
# Waves of requests, one after another on each connection.
TRUE_TOKENS_PER_S = CONCURRENCY * TOKENS / ((TTFT_MS + (TOKENS - 1) * ITL_MS) / 1000)
WITHIN = 0.03

METRICS = {"output tokens/s": "tokens/s", "median TTFT": "ms", "median ITL": "ms"}
TRUTH = {"output tokens/s": TRUE_TOKENS_PER_S, "median TTFT": TTFT_MS, "median ITL": ITL_MS}


def run_ours(url: str) -> dict[str, float]:
    from meltcore.measure.load.config import LoadConfig
    from meltcore.measure.load.run.runner import run_levels

    [level] = run_levels(
        LoadConfig(url=url, concurrency=(CONCURRENCY,), num_prompts=(REQUESTS,), workload="problems:short")
    )
    if level.failed or level.ttft_ms.p50 is None or level.itl_ms.p50 is None:
        raise SystemExit(f"ours failed: {level.failures}")
    return {
        "output tokens/s": level.output_tokens_per_s,
        "median TTFT": level.ttft_ms.p50,
        "median ITL": level.itl_ms.p50,
    }


def run_guidellm(program: str, url: str) -> dict[str, float]:
    """guidellm's ITL is (last - first token) / (tokens - 1) of a request: on an even stream, the gap."""
    with tempfile.TemporaryDirectory() as folder:
        data, output = Path(folder) / "prompts.jsonl", Path(folder) / "out.json"
        lines = [{"prompt": f"What is {number} + {number + 1}?"} for number in range(REQUESTS)]
        data.write_text("\n".join(map(json.dumps, lines)))
        command = [program, "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={url},model=scripted"]
        command += ["--profile", f"kind=concurrent,streams={CONCURRENCY}"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={output}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, capture_output=True, timeout=300, env=environment)
        [benchmark] = json.loads(output.read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    if len(requests) != REQUESTS:
        raise SystemExit(f"guidellm: {len(requests)} of {REQUESTS} requests succeeded")
    metrics = benchmark["metrics"]
    timings = [request["info"]["timings"] for request in requests]
    # Over the same span as ours, from the first start to the last end: its own rate leaves out ramp and drain.
    span_s = max(each["request_end"] for each in timings) - min(each["request_start"] for each in timings)
    return {
        "output tokens/s": metrics["output_token_count"]["successful"]["total_sum"] / span_s,
        "median TTFT": metrics["time_to_first_token_ms"]["successful"]["median"],
        "median ITL": metrics["inter_token_latency_ms"]["successful"]["median"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--guidellm", default="guidellm", metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options = ["--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS), "--tokens", str(TOKENS)]
    server = subprocess.Popen([sys.executable, str(SCRIPTED_SERVER), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(run_ours(url))
            theirs.append(run_guidellm(args.guidellm, url))
    finally:
        server.kill()
        server.wait(10)
    rows = []
    for name, unit in METRICS.items():
        mine = statistics.median(found[name] for found in ours)
        peer = statistics.median(found[name] for found in theirs)
        agreement = min(mine, peer) / max(mine, peer)
        work = f"{name} of one server (truth {TRUTH[name]:.4g}; ratio: smaller over larger)"
        rows.append(
            Row(
                work=work,
                unit=unit,
                value=mine,
                peer="guidellm",
                peer_value=peer,
                ratio=agreement,
                target=Target(1 - WITHIN, of="ratio"),
            )
        )
    version = subprocess.run([args.guidellm, "--version"], capture_output=True, text=True, check=True, timeout=120)
    write_result(rows, {"guidellm": version.stdout.split()[-1]})


if __name__ == "__main__":
    with signals_as_ctrl_c():
        main()
