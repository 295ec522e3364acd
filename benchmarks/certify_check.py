"""Are the certificate's figures right? `meltcore certify` beside a C++ program that shares no code with it.

Both run three times, in turn. Each figure of both is compared by its medians: within 3 % from 256 MB on. A finding in
any of the three certificates of a healthy node is a false one. The program is built here with nvcc.

    python benchmarks/certify_check.py [--tier quick|standard] [--repeats 3] [--out certify_check.json]

Exits 0 only where every figure agrees and no certificate has a finding.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("certify_check.cu")
TOLERANCE = 0.03
BUILD_LIMIT_S, RUN_LIMIT_S, CERTIFY_LIMIT_S = 180.0, 240.0, 900.0
SYSTEM_NCCL = Path("/usr/include/nccl.h")
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0"}

Figures = dict[tuple[str, tuple[int, ...]], list[float]]


def libraries() -> tuple[list[str], bool]:
    """(options for nvcc, whether NCCL is among them): the libraries that pip keeps beside torch, else the toolkit's.

    Without NCCL collectives are not compared, and the result says so.
    """
    options: list[str] = []
    spec = find_spec("nvidia")
    roots = [Path(place) for place in (list(spec.submodule_search_locations or []) if spec is not None else [])]
    with_nccl = False
    for header, names in (("cublas_v2.h", ("cublas", "curand")), ("nccl.h", ("nccl",))):
        folder = next((found.parent for root in roots for found in sorted(root.rglob(header))), None)
        shared = folder.parent / "lib" if folder is not None else Path("nowhere")
        places = [library for name in names for library in sorted(shared.glob(f"lib{name}.so*"))[:1]]
        if folder is not None and len(places) == len(names):
            options += [
                f"-I{folder}",
                "-Xlinker",
                ",".join(map(str, places)),
                "-Xlinker",
                f"-rpath={folder.parent / 'lib'}",
            ]
            with_nccl |= header == "nccl.h"
        elif header != "nccl.h":
            options += ["-lcublas", "-lcurand"]
        elif SYSTEM_NCCL.exists():
            options += ["-lnccl"]
            with_nccl = True
    return [*options, *(["-DWITH_NCCL"] if with_nccl else [])], with_nccl


def build(folder: Path, architecture: str = "native") -> tuple[Path, bool]:
    """(program, whether it has NCCL)."""
    program = folder / "certify_check"
    options, with_nccl = libraries()
    command = ["nvcc", "-O2", f"-arch={architecture}", "-std=c++17", str(SOURCE), "-o", str(program), *options]
    subprocess.run(command, check=True, timeout=BUILD_LIMIT_S)
    return program, with_nccl


def independent(program: Path, peers: bool) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(program), "1" if peers else "0"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_LIMIT_S,
        env={**os.environ, **MULTICAST_OFF},
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"key"')]


def certificate(tier: str, folder: Path) -> tuple[dict[str, Any], float]:
    """(the certificate, seconds it took from start to end of the command)."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "meltcore.cli.main", "certify", "--tier", tier, "--json", "--out", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=CERTIFY_LIMIT_S, check=False)
    if not done.stdout:
        raise SystemExit(f"meltcore certify gave no certificate and left with status {done.returncode}")
    return json.loads(done.stdout), time.monotonic() - began_s


def add(figures: Figures, key: str, gpus: list[int], value: float | None) -> None:
    if value is not None:
        figures.setdefault((key, tuple(gpus)), []).append(value)


def compare(ours: Figures, theirs: Figures) -> list[dict[str, Any]]:
    rows = []
    for (key, gpus), values in sorted(theirs.items()):
        mine = ours.get((key, gpus))
        row: dict[str, Any] = {"key": key, "gpus": list(gpus), "theirs": values, "ours": mine, "agree": False}
        if mine:
            row["difference"] = statistics.median(mine) / statistics.median(values) - 1
            row["agree"] = abs(row["difference"]) <= TOLERANCE
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'figure':<36}{'GPUs':<10}{'certify':>10}{'C++':>10}{'differ':>9}")
    for row in rows:
        gpus = ",".join(map(str, row["gpus"]))
        mine = f"{statistics.median(row['ours']):.4g}" if row["ours"] else "none"
        differ = f"{100 * row['difference']:+.1f} %" if row["ours"] else "?"
        mark = "" if row["agree"] else "  DISAGREE"
        print(f"{row['key']:<36}{gpus:<10}{mine:>10}{statistics.median(row['theirs']):>10.4g}{differ:>9}{mark}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("quick", "standard"), default="quick")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="certify_check.json")
    parser.add_argument("--keep", metavar="DIR", help="copy the last certificate's JSON and HTML there")
    args = parser.parse_args()
    ours: Figures = {}
    theirs: Figures = {}
    runs = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        program, with_nccl = build(folder)
        for _ in range(args.repeats):
            for line in independent(program, args.tier != "quick"):
                add(theirs, line["key"], line["gpus"], line["value"])
            found, took_s = certificate(args.tier, folder)
            for check in found["checks"]:
                for row in check["rows"]:
                    add(ours, row["key"], row["gpus"], row.get("measured"))
            runs.append({"verdict": found["verdict"], "seconds": took_s, "findings": found["findings"]})
            print(f"certify: {found['verdict']} in {took_s:.0f} s, {len(found['findings'])} findings", flush=True)
        if args.keep:
            last = sorted(folder.glob("*-certify"))[-1]
            for name in ("certificate.json", "certificate.html"):
                shutil.copy(last / name, args.keep)
    rows = compare(ours, theirs)
    findings = [finding for run in runs for finding in run["findings"]]
    agree = all(row["agree"] for row in rows) and not findings and all(run["verdict"] == "PASS" for run in runs)
    result = {
        "tier": args.tier,
        "tolerance": TOLERANCE,
        "collectives_compared": with_nccl,
        "agree": agree,
        "runs": runs,
        "figures": rows,
        "machine": found["snapshot"]["fingerprint"],
    }
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    print_table(rows)
    for finding in findings:
        print(f"{finding['verdict']} {finding['code']} {finding['subject']}: {finding['message']}")
    print("collectives compared" if with_nccl else "collectives NOT compared: no nccl.h beside torch")
    print("AGREE, no false finding" if agree else "NOT in agreement")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
