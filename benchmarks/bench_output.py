"""Result files of the benchmarks: one table printed last, and the same rows under benchmarks/results/SCRIPT/GPU.json.

A file holds the newest rows of one script on one kind of machine. It is a list of runs; each names its subject (the
model or server that was measured), machine, versions, command and date. A new row replaces the older row of the same
subject, work and unit. Earlier values are in git's history.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from machine import machine_name
from rich.console import Console
from rich.table import Table

from meltcore.measure.documents.fingerprint import clean_arguments, take_fingerprint

RESULTS = Path(__file__).parent / "results"
SCRIPTED_SERVER = Path(__file__).resolve().parents[1] / "tests" / "doubles" / "scripted_server.py"


class Target(NamedTuple):
    """A goal that was set before the measurement: a bound on a row's value or on its ratio to the peer."""

    reach: float
    of: Literal["value", "ratio"] = "value"
    better: Literal["higher", "lower"] = "higher"


@dataclass(kw_only=True)
class Row:
    """One measured value.

    ratio: to the peer, above 1 where ours is better. limit_share: of the physical limit that the script names, 0 to 1.
    """

    work: str
    unit: str
    value: float
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    target: Target | None = None
    limit_share: float | None = None
    # With --debug uniform-routing: tokens of a decode step, and experts per layer that it used.
    routed_tokens: int | None = None
    experts_used: float | None = None
    experts_expected: float | None = None
    invalid: str | None = None  # why the value does not count
    repeats: tuple[Row, ...] = ()  # the same row of several runs, whose median `value` is

    @property
    def span(self) -> tuple[float, float] | None:
        """The lowest and the highest value of the repeats; None of a single run."""
        values = [row.value for row in self.repeats]
        return (min(values), max(values)) if values else None

    @property
    def met(self) -> bool | None:
        """Whether the target was reached, by the worst of the repeats too.

        None without a target, or where its ratio was not measured.
        """
        if self.repeats:
            each = [row.met for row in self.repeats]
            return None if None in each else all(each)
        if self.target is None:
            return None
        measured = self.value if self.target.of == "value" else self.ratio
        if measured is None:
            return None
        return measured >= self.target.reach if self.target.better == "higher" else measured <= self.target.reach

    def as_json(self) -> dict[str, Any]:
        """The row's fields that have a value; a target as `reach`, `reach_of`, `better` and `met`.

        Of repeats: their number, and the lowest and highest value.
        """
        found = asdict(replace(self, target=None, repeats=()))
        found = {key: value for key, value in found.items() if value is not None and key != "repeats"}
        if self.span is not None:
            found |= {"repeats": len(self.repeats), "lowest": self.span[0], "highest": self.span[1]}
        if self.target is not None:
            found |= {"reach": self.target.reach, "reach_of": self.target.of, "better": self.target.better}
            if self.met is not None:
                found["met"] = self.met and not self.invalid
        return found


def median_rows(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several runs of the same work, in one order: each with its median, lowest and highest value.

    Rows with a peer are not for it: their ratio would be that of the first run.
    """
    if len(runs) == 1:
        return list(runs[0])
    return [
        replace(rows[0], value=statistics.median(row.value for row in rows), repeats=rows)
        for rows in zip(*runs, strict=True)
    ]


def need_gpu(count: int = 1, model: str = "") -> None:
    """Exits with one line where there are fewer NVIDIA GPUs. A bundled model, a local folder or file needs none."""
    if model.startswith("meltcore/") or (model and Path(model).exists()):
        return
    import torch  # not every benchmark has it

    there = torch.cuda.device_count()
    if there < count:
        raise SystemExit("needs an NVIDIA GPU" if count == 1 else f"needs {count} NVIDIA GPUs, torch sees {there}")


def write_result(
    rows: Sequence[Row],
    versions: dict[str, str],
    notes: Sequence[str] = (),
    *,
    subject: str = "",
    gpus: int = 1,
    script: str | None = None,
    out: Path | None = None,
) -> Path:
    """Merges the rows into a result file and prints them as a table. Returns the file's path.

    versions: of the packages that matter and of the peers. notes: what a reader must know beside the rows, such as what
    was skipped and why. subject: the model or server that was measured. gpus: how many of the machine's GPUs were used.
    script: None for the running one. out: None writes benchmarks/results/SCRIPT/GPU.json.
    """
    fingerprint = take_fingerprint()
    names = [gpu.name for gpu in fingerprint.gpus]
    script = script or Path(sys.argv[0]).stem
    run = {
        "subject": subject,
        "machine": {
            "cpu": fingerprint.cpu,
            "cores": fingerprint.cores,
            "memory_bytes": fingerprint.memory_bytes,
            "gpus": names,
            "kernel": fingerprint.kernel,
        },
        "versions": {"python": fingerprint.python, "meltcore": fingerprint.versions["meltcore"], **versions},
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *clean_arguments(sys.argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        **({"notes": list(notes)} if notes else {}),
        "rows": [row.as_json() for row in rows],
    }
    path = out or RESULTS / script / f"{machine_name(names, gpus)}.json"
    merge_run(path, run)
    print_table(f"{script}: {subject}" if subject else script, rows, notes)
    return path


def merge_run(path: Path, run: dict[str, Any]) -> None:
    """Adds a run to a result file; rows that it replaces leave the earlier runs, and empty runs leave the file."""
    runs = msgspec.json.decode(path.read_bytes())["runs"] if path.exists() else []
    new = {(row["work"], row["unit"]) for row in run["rows"]}
    for earlier in runs:
        if earlier["subject"] == run["subject"]:
            earlier["rows"] = [row for row in earlier["rows"] if (row["work"], row["unit"]) not in new]
    runs = [*(earlier for earlier in runs if earlier["rows"]), run]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"runs": runs}), indent=2) + b"\n")


def read_runs(script: str, machine: str) -> list[dict[str, Any]]:
    """The runs of a result file, oldest first. Raises FileNotFoundError where nothing has been measured."""
    runs: list[dict[str, Any]] = msgspec.json.decode((RESULTS / script / f"{machine}.json").read_bytes())["runs"]
    return runs


def print_table(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Prints rows and notes, 140 columns wide."""
    table = Table(title=title, title_justify="left")
    for column in ("work", "unit", "value", "peer", "peer value", "ratio", "reach", "met", "of limit"):
        table.add_column(column, justify="left" if column in ("work", "unit", "peer") else "right")
    for row in rows:
        work = f"{row.work} (INVALID: {row.invalid})" if row.invalid else row.work
        met = "" if row.met is None else "yes" if row.met else "no"
        table.add_row(
            work,
            row.unit,
            _number(row.value) + (f" ({_number(row.span[0])} to {_number(row.span[1])})" if row.span else ""),
            row.peer or "",
            _number(row.peer_value),
            _number(row.ratio),
            _number(row.target.reach if row.target else None),
            met,
            _number(row.limit_share),
        )
    console = Console(width=140)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
