"""What scripts that measure a peer's offline API share: options, and the run that they write.

Needs no Meltcore, which a peer's environment may lack.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from machine import EnergyMeter, Gpu, machine_name
from offline_work import LONG, SHORT, VOCAB, Generate, measure, parse_works

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")  # as in bench_output
# Batches of captured CUDA graphs, up to --seqs.
GRAPH_SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 2049, 64)]


def peer_parser(documentation: str | None) -> argparse.ArgumentParser:
    """The options of every peer, whose prompts are those of offline.py with equal works, seed and vocabulary."""
    parser = argparse.ArgumentParser(description=(documentation or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="Folder with a config.json.")
    parser.add_argument("--works", default=f"{SHORT} {LONG}")
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=16384, help="Tokens per step.")
    parser.add_argument("--tp", type=int, default=1, help="Tensor-parallel size.")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=VOCAB, help="Prompts have token ids below it.")
    parser.add_argument("--out", type=Path, help="Result file (default: results/SCRIPT/GPU.json).")
    parser.add_argument("--subject", help="Subject of the run in the result file (default: --model).")
    return parser


def measure_peer(script: str, args: argparse.Namespace, generate: Generate, run: dict[str, Any]) -> None:
    """Measures all works and writes them after each one, with what the GPU spent on it.

    run: what else the result file says about this run; an earlier run of the subject is replaced.
    """
    gpu = Gpu()
    out: Path = args.out or RESULTS / script / f"{machine_name([gpu.name], args.tp)}.json"
    result = {"subject": args.subject or args.model, "gpu": gpu.name, "tp": args.tp, **run, "rows": []}
    earlier = json.loads(out.read_text())["runs"] if out.exists() else []
    runs = [*(each for each in earlier if each["subject"] != result["subject"]), result]
    out.parent.mkdir(parents=True, exist_ok=True)
    meter = EnergyMeter(gpu.read)
    for measured in measure(parse_works(args.works), generate, args.reps, args.seed, args.vocab, meter=meter):
        spent = meter.spent() if args.tp == 1 else None
        row = {"work": str(measured.work), "rates": measured.rates, **(spent._asdict() if spent else {})}
        each = f"of {[round(rate) for rate in measured.rates]}{f'; {spent}' if spent else ''}"
        print(f"{measured.work}: {measured.median:,.0f} tok/s {each}", flush=True)
        result["rows"].append(row)
        out.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
