"""Data parallel 2 against tensor parallel 2 over HTTP, by fresh starts of both, and what that makes on eight GPUs.

`meltcore compare` starts `serve -tp 2` (A) and `serve -dp 2` (B) in turns and writes the page of the comparison. The
rows for eight GPUs are computed, not measured: as many independent pairs of GPUs as the concurrency keeps busy, each
with an equal part of the requests. The API server and the network of a real node come on top.

    python benchmarks/dp_against_tp.py                      # Qwen3.5-35B-A3B, random weights, two GPUs
    python benchmarks/dp_against_tp.py --weights auto       # the checkpoint
    python benchmarks/dp_against_tp.py --model meltcore/sums --weights auto --device cpu \
        --workload random:in=64,out=8,vocab=800
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from bench_output import Row, need_gpu, write_result

from meltcore.cli.main import main as meltcore_command
from meltcore.results.comparison import COMPARISON_FILE, ComparisonResult
from meltcore.results.files import read_document
from meltcore.results.weights import WEIGHTS

METRIC = "output tok/s"
UNIT, COMPUTED = "output tokens/s", "output tokens/s, computed"
PAIRS = 4  # of GPUs, in a node of eight
MEASURED = (0, 1, 3)  # exit statuses of a comparison that has a result: any verdict


def server_command(args: argparse.Namespace, parallel: str) -> str:
    """The command file of one side; `parallel` is -tp or -dp."""
    words = [sys.executable, "-m", "meltcore.cli.main", "serve", args.model, parallel, "2"]
    words += ["--load-format", args.weights, "--device", args.device]
    # Random weights send most tokens to a few experts, which a trained router does not.
    words += ["--debug", "uniform-routing"] if args.weights == "dummy" else []
    return f"{shlex.join(words)} --port {{port}}\n"


def compare(args: argparse.Namespace) -> ComparisonResult:
    """Run the comparison and read its result. Exits with the status of a comparison that could not be made."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    for name, parallel in (("tp2.cmd", "-tp"), ("dp2.cmd", "-dp")):
        (out / name).write_text(server_command(args, parallel))
    words = ["compare", "--run", str(out / "tp2.cmd"), str(out / "dp2.cmd"), "--starts", str(args.starts)]
    words += ["--control", str(args.control), "--concurrency", ",".join(map(str, WEIGHTS))]
    words += ["--num-prompts", str(args.num_prompts), "--out", str(out)]
    status = meltcore_command([*words, "--workload", args.workload])
    if status not in MEASURED:
        raise SystemExit(status)
    [folder] = [path for path in out.iterdir() if path.is_dir() and path not in before]
    return read_document(folder, ComparisonResult, name=COMPARISON_FILE)


def rates(found: ComparisonResult) -> tuple[dict[int, float], dict[int, float]]:
    """(TP=2, DP=2): output tok/s by concurrency, means over starts."""
    rows = {row.load: row for row in found.rows if row.metric == METRIC}
    by_load = {concurrency: rows[f"concurrency {concurrency}"] for concurrency in WEIGHTS}
    return {load: row.old for load, row in by_load.items()}, {load: row.new for load, row in by_load.items()}


def on_eight(pair: Mapping[int, float], replicas: int) -> dict[int, float]:
    """Rates of four pairs of GPUs by concurrency. `pair`: rates of one, which holds `replicas` of the model.

    A request goes to the replica with the least to do, so a pair gets a second replica's request before another waits.
    """
    found = {}
    for concurrency in WEIGHTS:
        busy = min(PAIRS, max(1, concurrency // replicas))
        found[concurrency] = busy * pair[concurrency // busy]
    return found


def table(args: argparse.Namespace, tensor: Mapping[int, float], data: Mapping[int, float]) -> list[Row]:
    """Measured rows, then computed ones."""
    eight = on_eight(tensor, 1), on_eight(data, 2)
    sides = (("DP=2", "TP=2", UNIT, tensor, data), ("DP=8", "DP=4, TP=2", COMPUTED, *eight))
    return [
        Row(
            work=f"{name}, {concurrency} concurrent, {args.workload}",
            unit=unit,
            value=ours[concurrency],
            peer=peer,
            peer_value=theirs[concurrency],
            ratio=ours[concurrency] / theirs[concurrency],
        )
        for name, peer, unit, theirs, ours in sides
        for concurrency in WEIGHTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3.5-35B-A3B", help="Model to serve (default: %(default)s).")
    parser.add_argument("--weights", default="dummy", choices=("dummy", "auto"), help="auto: the checkpoint's.")
    parser.add_argument("--device", default="auto", help="cpu runs a bundled model without a GPU.")
    parser.add_argument("--starts", type=int, default=6, help="Fresh starts per side (default: 6).")
    parser.add_argument("--control", type=int, default=3, help="Starts of TP=2 against itself before (default: 3).")
    parser.add_argument("--num-prompts", type=int, default=64, help="Requests per level (default: 64).")
    parser.add_argument(
        "--workload", default="random:in=1024,out=277", help="As of meltcore load (default: %(default)s)."
    )
    parser.add_argument("--out", default="runs/dp_against_tp", help="Folder of the comparison (default: %(default)s).")
    args = parser.parse_args()
    need_gpu(2, args.model)
    tensor, data = rates(compare(args))
    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    notes = [f"Rows in {COMPUTED} are arithmetic on the rows of two GPUs: no eight GPUs were used."]
    write_result(table(args, tensor, data), versions, notes, subject=args.model, gpus=0 if args.device == "cpu" else 2)


if __name__ == "__main__":
    main()
