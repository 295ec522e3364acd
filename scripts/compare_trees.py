"""Compares the offline speed of two source trees on one GPU, by fresh starts in turns.

    compare_trees.py OLD NEW --out DIR [--starts 5] [--control 2] [--model ID] [--works WORKS] [--options "..."]

Each start is a process that runs TREE/benchmarks/offline.py with that tree's source and a Triton cache of its own.
After one warm-up per tree, the old tree runs `--control` times, then both in mirrored turns (old, new, new, old, ...).
Prints the median of each level per tree, their ratio, and the spread of the old tree's own starts. Starts are kept in
DIR/starts.json, so an interrupted comparison is continued by the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_LINE = re.compile(r"^(?P<work>\d.*?): (?P<rate>[\d,]+) tok/s of ")
START_LIMIT_S = 300


def run(tree: Path, args: argparse.Namespace) -> dict[str, float]:
    """Output tok/s by workload of one fresh start. Raises RuntimeError with the end of its output where it fails."""
    command = [sys.executable, str(tree / "benchmarks" / "offline.py"), "--model", args.model, "--works", args.works]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(args.out.resolve() / f"triton-{tree.name}"),
    }
    done = subprocess.run(
        [*command, *shlex.split(args.options)], env=environment, capture_output=True, text=True, timeout=START_LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"{tree}: exit status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    found = (_LINE.match(line) for line in done.stdout.splitlines())
    return {match["work"]: float(match["rate"].replace(",", "")) for match in found if match}


def turns(starts: int, control: int) -> list[str]:
    """Which tree each start is of, warm-ups (in capitals) first."""
    mirrored = [side for number in range(starts) for side in (("old", "new") if number % 2 == 0 else ("new", "old"))]
    return ["OLD", "NEW", *["old"] * control, *mirrored]


def show(done: list[dict[str, Any]]) -> None:
    """The table: medians, their ratio, and the spread of the old tree's starts."""
    rates = {side: [start["rates"] for start in done if start["side"] == side] for side in ("old", "new")}
    if not all(rates.values()):
        return
    print(f"{len(rates['old'])} old and {len(rates['new'])} new starts")
    print(f"{'workload':44} {'old':>10} {'new':>10} {'new/old':>8} {'old spread':>11}")
    for work in rates["old"][0]:
        old, new = ([each[work] for each in rates[side]] for side in ("old", "new"))
        middle = statistics.median(old)
        spread = (max(old) - min(old)) / middle
        print(f"{work:44} {middle:10,.0f} {statistics.median(new):10,.0f} "
              f"{statistics.median(new) / middle:8.4f} {spread:11.2%}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=5, help="Fresh starts per tree (default: 5).")
    parser.add_argument("--control", type=int, default=2, help="Further starts of the old tree before (default: 2).")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--works", default="1,10,100,1000@128:1024/128")
    parser.add_argument("--options", default="", help="More options of offline.py.")
    parser.add_argument("--limit-s", type=float, default=550.0, help="Begin no start that may end after this time.")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "starts.json"
    done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    begun, longest = time.monotonic(), 0.0
    for side in turns(args.starts, args.control)[len(done) :]:
        before = time.monotonic()
        if before - begun + longest > args.limit_s:
            print("out of time: run the same command again")
            break
        done.append({"side": side, "rates": run(args.old if side.lower() == "old" else args.new, args)})
        longest = max(longest, time.monotonic() - before)
        path.write_text(json.dumps(done, indent=1) + "\n")
        print(f"{side}: {time.monotonic() - before:.0f} s, {done[-1]['rates']}", flush=True)
    show(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
