"""llama.cpp's `llama-batched-bench` on the lengths of offline.py, on the same machine: results/peer_llamacpp/h200.json.

It selects no tokens, so its rates are upper bounds: random prompts are prefilled, then each sequence is fed any token.
A rate counts the prompts' time, as ours does. One run per level; all layers on the GPU, flash attention on.

    python benchmarks/peer_llamacpp.py --model FILE.gguf --bench PATH/llama-batched-bench --works "1,64@1024:1024/256"
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_output import RESULTS
from offline_work import Work, parse_works

UBATCH = 2048  # tokens of a step


def commit_of(bench: str) -> str:
    """The version line of the program, without what built it."""
    printed = subprocess.run([bench, "--version"], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"^version: (.+)$", printed.stdout + printed.stderr, re.MULTILINE)
    return found[1] if found else "unknown"


def rates(bench: str, model: str, works: list[Work], timeout_s: float) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Each work of equal lengths and its line of results. Exits where the program fails or prints no line for one."""
    low, out = works[0].low, works[0].out
    context = max(work.requests for work in works) * (low + out)
    levels = ",".join(str(work.requests) for work in works)
    command = [bench, "-m", model, "-ngl", "all", "-fa", "on", "-c", str(context), "-b", str(UBATCH)]
    command += ["-ub", str(UBATCH), "-npp", str(low), "-ntg", str(out), "-npl", levels, "--output-format", "jsonl"]
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False)
        printed, ended = run.stdout, f"status {run.returncode}"
    except subprocess.TimeoutExpired as expired:
        printed, ended = (expired.stdout or b"").decode(), f"{timeout_s:.0f} s"
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    found = {line["pl"]: line for line in lines if (line["pp"], line["tg"]) == (low, out)}
    for work in works:
        if work.requests in found:
            yield work, found[work.requests]
    missing = [str(work) for work in works if work.requests not in found]
    if missing:
        raise SystemExit(f"{bench} ended after {ended} without {'; '.join(missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file.")
    parser.add_argument("--bench", default="llama-batched-bench", help="The program, if it is not on the path.")
    parser.add_argument("--works", default="1,16,64@1024:1024/256", help="Of one length each, low equal to high.")
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds for the levels of one length.")
    parser.add_argument("--out", type=Path, default=RESULTS / "peer_llamacpp" / "h200.json", help="Result file.")
    parser.add_argument("--subject", help="Subject of the run in the result file (default: the file's name).")
    args = parser.parse_args()
    works = parse_works(args.works)
    if any(work.low != work.high for work in works):
        raise SystemExit(f"--works {args.works}: llama-batched-bench takes prompts of one length")
    bench = shutil.which(args.bench)
    if bench is None:
        raise SystemExit(f"--bench {args.bench}: no such program")
    result: dict[str, Any] = {
        "subject": args.subject or Path(args.model).name,
        "versions": {"llama.cpp": commit_of(bench)},
        "rows": [],
    }
    earlier = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    runs = [*(run for run in earlier if run["subject"] != result["subject"]), result]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for lengths in dict.fromkeys((work.low, work.out) for work in works):
        same = [work for work in works if (work.low, work.out) == lengths]
        for work, line in rates(bench, args.model, same, args.timeout):
            rate = work.requests * work.out / (line["t_pp"] + line["t_tg"])
            print(f"{work}: {rate:,.0f} tok/s; prompts take {line['t_pp'] / (line['t_pp'] + line['t_tg']):.0%}")
            result["rows"].append({"work": str(work), "rates": [rate], "prompts_s": line["t_pp"]})
            args.out.write_text(json.dumps({"runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
