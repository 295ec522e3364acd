"""Runs the command of committed rows again on the machine at hand, and prints old values, new ones and their ratio.

    python benchmarks/repeat.py                        list what can be repeated
    python benchmarks/repeat.py README                 the run behind the table of the README
    python benchmarks/repeat.py client_cost/cpu        the newest run of a result file
    python benchmarks/repeat.py offline/h200 --subject Qwen/Qwen3-8B-AWQ
    python benchmarks/repeat.py --without-spread       count rows of a single run, and name the machine for them
    python benchmarks/repeat.py linear/h200 --record 3 run it three times, and record the rows with their spread

Without --record the new rows stay in a temporary folder: nothing under benchmarks/results/ changes. A caution says
where other processes used the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench_output import HEADLINE, RESULTS, RESULTS_VARIABLE, format_number, machine_name, merge_run
from rich.console import Console
from rich.table import Table

from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.load.run.surroundings import SurroundingsMonitor, machine_cautions

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "benchmarks/"


def repeatable_runs() -> dict[str, list[dict[str, Any]]]:
    """The runs of each result file as SCRIPT/MACHINE, oldest first. Runs of `meltcore` commands are left out."""
    runs = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        found = [run for run in msgspec.json.decode(path.read_bytes()).get("runs", ()) if is_repeatable(run)]
        if found:
            runs[f"{path.parent.name}/{path.stem}"] = found
    return runs


def is_repeatable(run: dict[str, Any]) -> bool:
    """Whether a run was made by a script of this folder, and has rows that no newer run replaced."""
    return str(run.get("command", "")).startswith(f"python {SCRIPT}") and bool(run.get("rows"))


def without_spread() -> list[str]:
    """Lines that count the rows of a single run in each result file, name the machine that repeats them, and sum up."""
    lines, single, total, on_cpu = [], 0, 0, 0
    for path in sorted(RESULTS.glob("*/*.json")):
        runs = msgspec.json.decode(path.read_bytes()).get("runs", ())
        rows = [(row, run) for run in runs for row in run.get("rows", ())]
        found = [is_repeatable(run) for row, run in rows if "repeats" not in row]
        if found:
            count = "" if all(found) else f"; this script repeats {sum(found)} of them"
            lines.append(f"{path.parent.name}/{path.stem}: {len(found)} of {len(rows)} rows, of {path.stem}{count}")
        single, total = single + len(found), total + len(rows)
        on_cpu += sum(found) * (path.stem == "cpu")
    return [*lines, f"{single:,} of {total:,} rows have no spread; {on_cpu:,} of them can be repeated on a CPU"]


def choose(name: str, subject: str | None = None, number: int | None = None) -> tuple[str, dict[str, Any]]:
    """The machine and a run of NAME: the one with this number from 1, else the newest. Raises ValueError for none."""
    if name == "README":
        name, subject = HEADLINE
    runs = repeatable_runs()
    if name not in runs and (RESULTS / f"{name}.json").exists():
        raise ValueError(f"{name} has no rows of a script under {SCRIPT}; its file names the commands to run instead")
    if name not in runs:
        raise ValueError(f"no rows {name!r}; one of README, {', '.join(runs)}")
    subjects = [run["subject"] for run in runs[name]]
    machine = name.partition("/")[2]
    if number is not None:
        if not 1 <= number <= len(runs[name]):
            raise ValueError(f"--run {number}: {name} has runs 1 to {len(runs[name])}")
        return machine, runs[name][number - 1]
    found = [run for run in runs[name] if subject in (None, run["subject"])]
    if not found:
        raise ValueError(f"{name} has no subject {subject!r}; one of {', '.join(dict.fromkeys(subjects))}")
    return machine, found[-1]


def arguments_of(run: dict[str, Any], files: Sequence[Path]) -> list[str]:
    """The script and the arguments of a run. A recorded path `.../NAME` becomes the file or folder of that name.

    Raises ValueError for a path that `files` does not have.
    """
    places = {path.name: str(path) for path in files}
    arguments = []
    for argument in shlex.split(run["command"])[1:]:
        name = argument.removeprefix(".../")
        if name != argument and name not in places:
            raise ValueError(f"the command names a file without its folder, {argument}: add --file PATH/{name}")
        arguments.append(places.get(name, argument) if name != argument else argument)
    return arguments


def check_machine(machine: str, gpus: Sequence[str]) -> None:
    """Raise ValueError where rows of `machine` cannot be compared with rows of a machine with these GPUs."""
    if machine != "cpu" and machine not in {machine_name(gpus, count) for count in range(1, len(gpus) + 1)}:
        here = ", ".join(gpus) or "no NVIDIA GPU"
        raise ValueError(f"the rows are of {machine}, and this machine has {here}; --anyway runs the command here")


def beside(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """Work, unit, old value, new value and new over old of each old row. What was not measured again stays empty."""
    values = {(row["work"], row["unit"]): row["value"] for row in new}
    lines = []
    for row in old:
        value = values.get((row["work"], row["unit"]))
        ratio = f"{value / row['value']:.2f}" if value is not None and row["value"] else ""
        lines.append((row["work"], row["unit"], format_number(row["value"]), format_number(value), ratio))
    return lines


def with_spread(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run of several of the same command. Each row is the one of its median, with the lowest and highest value.

    A target for the value is met if each run met it, a target for the ratio if the row of the median did. Raises
    ValueError where a run lacks a row.
    """
    if len(runs) == 1:
        return runs[0]
    lines = [{(row["work"], row["unit"]): row for row in run["rows"]} for run in runs]
    if any(line.keys() != lines[0].keys() for line in lines):
        raise ValueError("the runs have different rows")
    rows = []
    for key in lines[0]:
        found = sorted((line[key] for line in lines), key=lambda row: float(row["value"]))
        row = found[(len(found) - 1) // 2]
        row |= {"repeats": len(found), "lowest": found[0]["value"], "highest": found[-1]["value"]}
        if row.get("reach_of") == "value":
            row["met"] = all(each.get("met", False) for each in found)
        rows.append(row)
    return runs[-1] | {"rows": rows}


def print_rows(title: str, lines: Sequence[Sequence[str]]) -> None:
    """Print lines of `beside` as a table."""
    table = Table(title=title, title_justify="left")
    for column in ("work", "unit", "old", "new", "new / old"):
        table.add_column(column, justify="left" if column in ("work", "unit") else "right")
    for line in lines:
        table.add_row(*line)
    Console(width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", metavar="ROWS", help="README, or SCRIPT/MACHINE of a result file.")
    parser.add_argument("--subject", help="Model or server that was measured (default: the subject of the newest run).")
    parser.add_argument("--run", type=int, metavar="N", help="One of its runs by the number in the list (no ROWS).")
    parser.add_argument("--file", type=Path, action="append", default=[], help="A file that the command names.")
    parser.add_argument("--anyway", action="store_true", help="Also on another kind of machine.")
    parser.add_argument("--record", type=int, metavar="N", help="Run it N times, at least 3, and record the spread.")
    parser.add_argument(
        "--without-spread", action="store_true", help="Count the rows of a single run, and run nothing."
    )
    args = parser.parse_args()
    if args.without_spread:
        print("\n".join(without_spread()))
        return 0
    if args.rows is None:
        for name, runs in repeatable_runs().items():
            for number, run in enumerate(runs, 1):
                print(f"{name} --run {number}  {run['subject'] or '-'}  {run['date']}  {run['command']}")
        return 0
    if args.record is not None and args.record < 3:
        parser.error(f"--record {args.record}: must be at least 3")
    try:
        machine, run = choose(args.rows, args.subject, args.run)
        if not args.anyway:
            check_machine(machine, [gpu.name for gpu in take_fingerprint().gpus])
        arguments = arguments_of(run, args.file)
    except ValueError as error:
        parser.error(str(error))
    print(f"{run['date']}, commit {run['commit']}: {shlex.join(['python', *arguments])}", flush=True)
    monitor = SurroundingsMonitor()
    monitor.start()
    status, found = 0, defaultdict[tuple[Path, str], list[dict[str, Any]]](list)  # by result file and subject
    for _ in range(args.record or 1):
        with tempfile.TemporaryDirectory(prefix="meltcore-repeat-") as folder:
            environment = {**os.environ, RESULTS_VARIABLE: folder}
            status |= subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode
            for path in Path(folder).glob("*/*.json"):
                for each in msgspec.json.decode(path.read_bytes())["runs"]:
                    found[path.relative_to(folder), each["subject"]].append(each)
    cautions = machine_cautions(monitor.finish())
    results = {(path, subject): with_spread(runs) for (path, subject), runs in found.items()}
    new = [row for result in results.values() for row in result["rows"]]
    print_rows(f"{args.rows}: old is of {run['date']}, commit {run['commit']}", beside(run["rows"], new))
    for caution in cautions.values():
        print(f"caution: {caution}")
    if args.record and not status:
        for (path, _), result in results.items():
            merge_run(RESULTS / path, result)
    return status or (0 if new else 1)


if __name__ == "__main__":
    sys.exit(main())
