"""Data parallel against tensor parallel over HTTP, by fresh starts of both: on two GPUs, or on --gpus 4 or 8.

`meltcore compare` starts `serve -tp N` (A) and `serve -dp N` (B) in turns and writes the page of the comparison. With
more than two GPUs it then compares A with `serve -tp 2 -dp N/2`. With two, rows for eight GPUs are computed, not
measured: as many independent pairs of GPUs as the concurrency keeps busy, each with an equal part of the requests. The
API server and the network of a real node come on top.

    python benchmarks/dp_against_tp.py                      # Qwen3.5-35B-A3B, random weights, two GPUs
    python benchmarks/dp_against_tp.py --gpus 8             # TP=8 against DP=8, then against TP=2 in four replicas
    python benchmarks/dp_against_tp.py --weights auto       # the checkpoint
    python benchmarks/dp_against_tp.py --model meltcore/sums --weights auto --device cpu \
        --workload random:in=64,out=8,vocab=800
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from bench_output import Row, need_gpu, write_result

from meltcore.cli.main import main as meltcore_command
from meltcore.common.files import read_document
from meltcore.measure.documents.comparison import COMPARISON_FILE, ComparisonResult
from meltcore.measure.documents.weights import WEIGHTS

METRIC = "output tok/s"
UNIT, COMPUTED = "output tokens/s", "output tokens/s, computed"
PAIRS = 4  # of GPUs, in a node of eight
MEASURED = (0, 1, 3)  # exit statuses of a comparison that has a result: any verdict


class Side(NamedTuple):
    """One way to use all GPUs: `tensor` GPUs hold a replica of the model, of which there are `data`."""

    tensor: int
    data: int

    def __str__(self) -> str:
        parts = [("DP", self.data), ("TP", self.tensor)]
        return ", ".join(f"{name}={count}" for name, count in parts if count > 1)

    @property
    def flags(self) -> list[str]:
        """Options of `meltcore serve`."""
        parts = [("-tp", self.tensor), ("-dp", self.data)]
        return [word for name, count in parts if count > 1 for word in (name, str(count))]


def others(gpus: int) -> list[Side]:
    """What is compared with tensor parallelism over all GPUs."""
    return [Side(1, gpus)] if gpus == 2 else [Side(1, gpus), Side(2, gpus // 2)]


def server_command(args: argparse.Namespace, side: Side) -> str:
    """The command file of one side."""
    words = [sys.executable, "-m", "meltcore.cli.main", "serve", args.model, *side.flags]
    words += ["--load-format", args.weights, "--device", args.device]
    # Random weights send most tokens to a few experts, which a trained router does not.
    words += ["--debug", "uniform-routing"] if args.weights == "dummy" else []
    return f"{shlex.join(words)} --port {{port}}\n"


def compare(args: argparse.Namespace, sides: Sequence[Side]) -> ComparisonResult:
    """Compare two sides and read the result. Exits with the status of a comparison that could not be made."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    files = [out / f"tp{side.tensor}dp{side.data}.cmd" for side in sides]
    for file, side in zip(files, sides, strict=True):
        file.write_text(server_command(args, side))
    words = ["compare", "--run", *map(str, files), "--starts", str(args.starts)]
    words += ["--control", str(args.control), "--concurrency", ",".join(map(str, WEIGHTS))]
    words += ["--num-prompts", str(args.num_prompts), "--out", str(out)]
    status = meltcore_command([*words, "--workload", args.workload])
    if status not in MEASURED:
        raise SystemExit(status)
    [folder] = [path for path in out.iterdir() if path.is_dir() and path not in before]
    return read_document(folder, ComparisonResult, name=COMPARISON_FILE)


def rates(found: ComparisonResult) -> tuple[dict[int, float], dict[int, float]]:
    """(A, B): output tok/s by concurrency, means over starts."""
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


def table(
    args: argparse.Namespace,
    name: str,
    ours: Mapping[int, float],
    peer: str,
    theirs: Mapping[int, float],
    unit: str = UNIT,
) -> list[Row]:
    """One row per concurrency."""
    return [
        Row(
            work=f"{name}, {concurrency} concurrent, {args.workload}",
            unit=unit,
            value=ours[concurrency],
            peer=peer,
            peer_value=theirs[concurrency],
            ratio=ours[concurrency] / theirs[concurrency],
        )
        for concurrency in WEIGHTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3.5-35B-A3B", help="Model to serve (default: %(default)s).")
    parser.add_argument("--weights", default="dummy", choices=("dummy", "auto"), help="auto: the checkpoint's.")
    parser.add_argument("--device", default="auto", help="cpu runs a bundled model without a GPU.")
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=2, help="GPUs to use (default: 2).")
    parser.add_argument("--starts", type=int, default=6, help="Fresh starts per side (default: 6).")
    parser.add_argument("--control", type=int, default=3, help="Starts of A against itself before (default: 3).")
    parser.add_argument("--num-prompts", type=int, default=64, help="Requests per level (default: 64).")
    parser.add_argument(
        "--workload", default="random:in=1024,out=277", help="As of meltcore load (default: %(default)s)."
    )
    parser.add_argument("--out", default="runs/dp_against_tp", help="Folder of the comparison (default: %(default)s).")
    args = parser.parse_args()
    need_gpu(args.gpus, args.model)
    whole, rows, notes = Side(args.gpus, 1), [], []
    for side in others(args.gpus):
        tensor, data = rates(compare(args, (whole, side)))
        rows += table(args, str(side), data, str(whole), tensor)
    if args.gpus == 2:
        rows += table(args, "DP=8", on_eight(data, 2), "DP=4, TP=2", on_eight(tensor, 1), COMPUTED)
        notes = [f"Rows in {COMPUTED} are arithmetic on the rows of two GPUs: no eight GPUs were used."]
    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    write_result(rows, versions, notes, subject=args.model, gpus=0 if args.device == "cpu" else args.gpus)


if __name__ == "__main__":
    main()
