"""Are the certificate's figures right? `meltcore certify` beside a C++ program that shares no code with it.

Both run several times, in turn. Each figure of both is compared by its medians: within 3 % from 256 MB on, within 10 %
below. A finding in any certificate of a healthy node is a false one. The program is built here with nvcc.

    python benchmarks/certify_check.py --repeats 3                     quick: products, copies, one all-reduce
    python benchmarks/certify_check.py --tier standard --repeats 1     also every pair of GPUs, and all-reduce by size

What is known is written to --out after every repeat, so that one that is cut off loses nothing; --earlier goes on from
such a result of the same GPUs, where a series takes longer than one command may. Exits 0 only where
every figure agrees and every certificate is a PASS without a finding.
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
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_output import need_gpu

from meltcore.results.fingerprint import clean_arguments

SOURCE = Path(__file__).with_name("certify_check.cu")
TOLERANCE, TOLERANCE_OF_SMALL = 0.03, 0.10
SMALL = ("/4KiB", "/1MiB", "/64MiB")  # what is below 256 MB; every other figure moves at least that
BUILD_LIMIT_S, RUN_LIMIT_S = 180.0, 240.0
CERTIFY_LIMIT_S = {"quick": 180, "standard": 480}
LEAVE_S = 30  # for a certificate that was interrupted
SYSTEM_NCCL = Path("/usr/include/nccl.h")
# As certify has it: its order of the GPUs, no NVLink multicast, and no events between collectives in a graph.
ENVIRONMENT = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_MIXING_SUPPORT": "0"}

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


def independent(program: Path, peers: bool) -> tuple[list[dict[str, Any]], str]:
    """(what it measured, why it is not all: empty where it is)."""
    with tempfile.TemporaryFile("w+") as out:
        try:
            code = subprocess.run(
                [str(program), "1" if peers else "0"],
                stdout=out,
                timeout=RUN_LIMIT_S,
                env={**os.environ, **ENVIRONMENT},
                check=False,
            ).returncode
            why = f"the C++ program ended with status {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"the C++ program took more than {RUN_LIMIT_S:.0f} s"
        out.seek(0)
        return [json.loads(line) for line in out if line.startswith('{"key"') and line.endswith("}\n")], why


def certificate(tier: str, folder: Path) -> tuple[dict[str, Any], float]:
    """(the certificate, seconds it took from start to end of the command)."""
    began_s = time.monotonic()
    # Interrupted rather than killed, so that it ends the probes it has started.
    patience = ["timeout", "-s", "INT", "-k", str(LEAVE_S), str(CERTIFY_LIMIT_S[tier])]
    command = [sys.executable, "-m", "meltcore.cli.main", "certify", "--tier", tier, "--json", "--out", str(folder)]
    done = subprocess.run([*patience, *command], stdout=subprocess.PIPE, check=False)
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
            row["tolerance"] = TOLERANCE_OF_SMALL if key.endswith(SMALL) else TOLERANCE
            row["agree"] = abs(row["difference"]) <= row["tolerance"]
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


def go_on_from(earlier: str, tier: str) -> tuple[Figures, Figures, list[dict[str, Any]], list[str]]:
    """(our figures, the program's, the runs, the GPUs) of an earlier result."""
    result = json.loads(Path(earlier).read_text())
    if result["tier"] != tier:
        raise SystemExit(f"--earlier {earlier}: is of the tier {result['tier']}, not {tier}")
    ours, theirs = (
        {(row["key"], tuple(row["gpus"])): row[side] for row in result["figures"] if row[side]}
        for side in ("ours", "theirs")
    )
    return ours, theirs, result["runs"], uuids(result["machine"])


def uuids(fingerprint: dict[str, Any]) -> list[str]:
    return [gpu["uuid"] for gpu in fingerprint["gpus"]]


def keep(folder: Path, wanted: str) -> None:
    """Copy the last certificate's files to `wanted`."""
    place = Path(wanted)
    place.mkdir(parents=True, exist_ok=True)
    last = sorted(folder.glob("*-certify"))[-1]
    for name in ("certificate.json", "certificate.html"):
        shutil.copy(last / name, place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=tuple(CERTIFY_LIMIT_S), default="quick")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default=str(SOURCE.parent / "results" / "certify_check.json"))
    parser.add_argument("--earlier", metavar="FILE", help="a result to go on from")
    parser.add_argument("--keep", metavar="DIR", help="copy the last certificate's JSON and HTML there")
    args = parser.parse_args()
    need_gpu()
    ours, theirs, runs, gpus = go_on_from(args.earlier, args.tier) if args.earlier else ({}, {}, [], None)
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/certify_check.py", *clean_arguments(sys.argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        "tier": args.tier,
        "agree": False,
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        program, result["collectives_compared"] = build(folder)
        for _ in range(args.repeats):
            lines, why = independent(program, args.tier != "quick")
            for line in lines:
                add(theirs, line["key"], line["gpus"], line["value"])
            found, took_s = certificate(args.tier, folder)
            for check in found["checks"]:
                for row in check["rows"]:
                    add(ours, row["key"], row["gpus"], row.get("measured"))
            run = {name: found[name] for name in ("started", "verdict", "findings", "unseen")}
            result["runs"].append({**run, "seconds": took_s, "independent_cut_short": why})
            print(f"certify: {found['verdict']} in {took_s:.0f} s, {len(found['findings'])} findings {why}", flush=True)
            result["figures"] = compare(ours, theirs)
            if gpus is not None and uuids(found["snapshot"]["fingerprint"]) != gpus:
                raise SystemExit(f"--earlier {args.earlier}: is of other GPUs")
            result["machine"] = found["snapshot"]["fingerprint"]
            result["agree"] = agrees(result)
            Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
            if args.keep:
                keep(folder, args.keep)
    print_table(result["figures"])
    for finding in (finding for run in result["runs"] for finding in run["findings"]):
        print(f"{finding['verdict']} {finding['code']} {finding['subject']}: {finding['message']}")
    print("collectives compared" if result["collectives_compared"] else "collectives NOT compared: no nccl.h found")
    print("AGREE, no false finding" if result["agree"] else "NOT in agreement")
    return 0 if result["agree"] else 1


def agrees(result: dict[str, Any]) -> bool:
    """Every figure of the independent program, and every certificate a PASS without a finding."""
    clean = all(
        run["verdict"] == "PASS" and not run["findings"] and not run["independent_cut_short"] for run in result["runs"]
    )
    return clean and bool(result["figures"]) and all(row["agree"] for row in result["figures"])


if __name__ == "__main__":
    sys.exit(main())
