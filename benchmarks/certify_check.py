"""Compares the metrics of `meltcore certify` with those of a C++ program that shares no code with it.

Both run several times, alternating. Medians must agree within 3 % from 256 MB on and within 10 % below. A finding in
any certificate of a healthy node counts as false. The program is built here with nvcc.

    python benchmarks/certify_check.py --repeats 3                     quick: GEMM, copies, all-reduce
    python benchmarks/certify_check.py --tier standard --repeats 1     also every pair of GPUs, and all-reduce by size
    python benchmarks/certify_check.py --tier full                     the longest certificate, against the same program

The result is written to --out after every repeat, so that an interruption loses nothing; --earlier continues such a
result of the same GPUs. Exits 0 only where every metric agrees and every certificate is a PASS without a finding.
"""

import argparse
import json
import os
import shlex
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

from bench_output import RESULTS, machine_name, need_gpu

from meltcore.measure.documents.fingerprint import clean_arguments

SOURCE = Path(__file__).with_name("certify_check.cu")
TOLERANCE, TOLERANCE_OF_SMALL = 0.03, 0.10
SMALL = ("/4KiB", "/1MiB", "/64MiB")  # below 256 MB; every other metric moves at least that
BUILD_LIMIT_S, RUN_LIMIT_S = 180.0, 600.0
CERTIFY_LIMIT_S = {"quick": 180, "standard": 900, "full": 3600}
EXIT_LIMIT_S = 30  # for a certificate that was interrupted
SYSTEM_NCCL = Path("/usr/include/nccl.h")
# As in certify: the order of the GPUs, no NVLink multicast, and no events between collectives in a graph.
ENVIRONMENT = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_MIXING_SUPPORT": "0"}

Metrics = dict[tuple[str, tuple[int, ...]], list[float]]


def libraries() -> tuple[list[str], bool]:
    """Returns (nvcc options, whether NCCL is included): libraries that pip installs with torch, else the toolkit's.

    Without NCCL, collectives are not compared, and the result says so.
    """
    options: list[str] = []
    spec = find_spec("nvidia")
    roots = [Path(location) for location in (list(spec.submodule_search_locations or []) if spec is not None else [])]
    with_nccl = False
    for header, names in (("cublas_v2.h", ("cublas", "curand")), ("nccl.h", ("nccl",))):
        folder = next((found.parent for root in roots for found in sorted(root.rglob(header))), None)
        shared = folder.parent / "lib" if folder is not None else Path("nowhere")
        found_libraries = [library for name in names for library in sorted(shared.glob(f"lib{name}.so*"))[:1]]
        if folder is not None and len(found_libraries) == len(names):
            options += [
                f"-I{folder}",
                "-Xlinker",
                ",".join(map(str, found_libraries)),
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
    """Compiles the C++ program. Returns (its path, whether it has NCCL)."""
    program = folder / "certify_check"
    options, with_nccl = libraries()
    command = ["nvcc", "-O2", f"-arch={architecture}", "-std=c++17", str(SOURCE), "-o", str(program), *options]
    subprocess.run(command, check=True, timeout=BUILD_LIMIT_S)
    return program, with_nccl


def independent(program: Path, peers: bool) -> tuple[list[dict[str, Any]], str]:
    """Runs the C++ program. Returns (its rows, why they are incomplete: empty where they are complete)."""
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
    """Runs `meltcore certify`. Returns (the certificate, duration of the command in s)."""
    began_s = time.monotonic()
    # SIGINT rather than SIGKILL, so that it ends the probes it started.
    timeout = ["timeout", "-s", "INT", "-k", str(EXIT_LIMIT_S), str(CERTIFY_LIMIT_S[tier])]
    command = [sys.executable, "-m", "meltcore.cli.main", "certify", "--tier", tier, "--json", "--out", str(folder)]
    done = subprocess.run([*timeout, *command], stdout=subprocess.PIPE, check=False)
    if not done.stdout:
        raise SystemExit(f"meltcore certify gave no certificate and ended with status {done.returncode}")
    return json.loads(done.stdout), time.monotonic() - began_s


def add(metrics: Metrics, key: str, gpus: list[int], value: float | None) -> None:
    """Adds a value to the series of a metric."""
    if value is not None:
        metrics.setdefault((key, tuple(gpus)), []).append(value)


def compare(certify: Metrics, independent: Metrics) -> list[dict[str, Any]]:
    """Returns one row per metric of the independent program."""
    rows = []
    for (key, gpus), values in sorted(independent.items()):
        own = certify.get((key, gpus))
        row: dict[str, Any] = {"key": key, "gpus": list(gpus), "independent": values, "certify": own, "agree": False}
        if own:
            row["difference"] = statistics.median(own) / statistics.median(values) - 1
            row["tolerance"] = TOLERANCE_OF_SMALL if key.endswith(SMALL) else TOLERANCE
            row["agree"] = abs(row["difference"]) <= row["tolerance"]
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the comparison."""
    print(f"{'metric':<36}{'GPUs':<10}{'certify':>10}{'C++':>10}{'differ':>9}")
    for row in rows:
        gpus = ",".join(map(str, row["gpus"]))
        own = f"{statistics.median(row['certify']):.4g}" if row["certify"] else "none"
        differ = f"{100 * row['difference']:+.1f} %" if row["certify"] else "?"
        mark = "" if row["agree"] else "  DISAGREE"
        print(f"{row['key']:<36}{gpus:<10}{own:>10}{statistics.median(row['independent']):>10.4g}{differ:>9}{mark}")


def continue_from(earlier: str, tier: str) -> tuple[Metrics, Metrics, list[dict[str, Any]], list[str]]:
    """Returns (metrics of certify, of the program, the runs, the GPUs) of an earlier result."""
    result = json.loads(Path(earlier).read_text())
    if result["tier"] != tier:
        raise SystemExit(f"--earlier {earlier}: has the tier {result['tier']}, not {tier}")
    certify, independent = (
        {(row["key"], tuple(row["gpus"])): row[side] for row in result["metrics"] if row[side]}
        for side in ("certify", "independent")
    )
    return certify, independent, result["runs"], uuids(result["machine"])


def uuids(fingerprint: dict[str, Any]) -> list[str]:
    """Returns the UUIDs of the GPUs."""
    return [gpu["uuid"] for gpu in fingerprint["gpus"]]


def keep(folder: Path, target: str) -> None:
    """Copies the last certificate's files to `target`."""
    path = Path(target)
    path.mkdir(parents=True, exist_ok=True)
    last = sorted(folder.glob("*-certify"))[-1]
    for name in ("certificate.json", "certificate.html"):
        shutil.copy(last / name, path)


def out(requested: str | None, tier: str, fingerprint: dict[str, Any]) -> Path:
    """Returns the path of the result file and creates its folder."""
    names = [gpu["name"] for gpu in fingerprint["gpus"]]
    path = (
        Path(requested) if requested else RESULTS / f"certify_check_{tier}" / f"{machine_name(names, len(names))}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=tuple(CERTIFY_LIMIT_S), default="quick")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="result file (default: benchmarks/results/certify_check_TIER/GPU.json)")
    parser.add_argument("--earlier", metavar="FILE", help="result to continue")
    parser.add_argument("--keep", metavar="DIR", help="copy the last certificate's JSON and HTML to DIR")
    args = parser.parse_args()
    need_gpu()
    own, independent_values, runs, gpus = continue_from(args.earlier, args.tier) if args.earlier else ({}, {}, [], None)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/certify_check.py", *clean_arguments(sys.argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        "tier": args.tier,
        "agree": False,
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program, result["collectives_compared"] = build(folder)
        for _ in range(args.repeats):
            lines, why = independent(program, args.tier != "quick")
            for line in lines:
                add(independent_values, line["key"], line["gpus"], line["value"])
            found, took_s = certificate(args.tier, folder)
            for check in found["checks"]:
                for row in check["rows"]:
                    add(own, row["key"], row["gpus"], row.get("measured"))
            run = {name: found[name] for name in ("started", "verdict", "findings", "unverified")}
            result["runs"].append({**run, "seconds": took_s, "independent_incomplete": why})
            print(f"certify: {found['verdict']} in {took_s:.0f} s, {len(found['findings'])} findings {why}", flush=True)
            result["metrics"] = compare(own, independent_values)
            if gpus is not None and uuids(found["snapshot"]["fingerprint"]) != gpus:
                raise SystemExit(f"--earlier {args.earlier}: has other GPUs")
            result["machine"] = found["snapshot"]["fingerprint"]
            result["agree"] = agrees(result)
            out(args.out, args.tier, result["machine"]).write_text(json.dumps(result, indent=2) + "\n")
            if args.keep:
                keep(folder, args.keep)
    print_table(result["metrics"])
    for finding in (finding for run in result["runs"] for finding in run["findings"]):
        print(f"{finding['verdict']} {finding['code']} {finding['subject']}: {finding['message']}")
    print("collectives compared" if result["collectives_compared"] else "collectives NOT compared: no nccl.h found")
    print("AGREE, no false finding" if result["agree"] else "NOT in agreement")
    return 0 if result["agree"] else 1


def agrees(result: dict[str, Any]) -> bool:
    """Returns whether every metric agrees and every certificate is a PASS without a finding."""
    clean = all(
        run["verdict"] == "PASS" and not run["findings"] and not run["independent_incomplete"] for run in result["runs"]
    )
    return clean and bool(result["metrics"]) and all(row["agree"] for row in result["metrics"])


if __name__ == "__main__":
    sys.exit(main())
