"""Result files of the benchmarks: one table printed last, and the same rows under benchmarks/results/SCRIPT/GPU.json.

A file holds the newest rows of one script on one kind of machine. It is a list of runs; each names its subject (the
model or server that was measured), machine, versions, command, date, commit and a digest of the code that it measured.
A new row replaces the older row of the same subject, work and unit. Earlier values are in git's history. Runs before
2026-11-30 name the commit that brought their rows, and have no digest.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from machine import machine_name
from rich.console import Console
from rich.table import Table

from meltcore.measure.documents.fingerprint import clean_arguments, take_fingerprint

RESULTS_VARIABLE = "BENCHMARK_RESULTS"  # a folder in place of the committed results
RESULTS = Path(os.environ.get(RESULTS_VARIABLE) or Path(__file__).parent / "results")
HEADLINE = ("offline/h200", "Qwen/Qwen3-0.6B")  # file and subject of the README's table
SOURCE = Path(__file__).resolve().parents[1] / "src" / "meltcore"
_ENGINE = ("engine", "kernels", "layers", "models", "offline")
_SERVER = (*_ENGINE, "serve")
# What each script measures: files and folders of src/meltcore. Scripts that are not here measure the engine.
CODE_PATHS = {
    "all_reduce": ("kernels/comm",),
    "api_server_cost": _SERVER,
    "attention": ("kernels/attention",),
    "block_fp8": ("kernels/fp8", "kernels/moe"),
    "client_agreement": ("measure/load",),
    "client_cost": ("measure/load",),
    "cluster_transport": ("engine/host", "protocol", "serve/engines"),
    "decode_layers": ("kernels/persistent",),
    "delta_net": ("kernels/gated_delta",),
    "experts": ("kernels/gemm", "kernels/moe"),
    "fleet_load": (*_SERVER, "fleet", "measure/load"),
    "fleet_scale": ("fleet", "protocol", "serve"),
    "fleet_turns": (*_SERVER, "fleet"),
    "forwarding_cost": ("serve",),
    "http_load": _SERVER,
    "linear": ("kernels/gemm",),
    "load_checkpoint": ("models",),
    "many_streams": _SERVER,
    "placement_groups": ("fleet/ray",),
    "plan_memory": (*_ENGINE, "fleet/plan"),
    "prompt_all_reduce": ("kernels/comm",),
    "prompt_attention": ("kernels/attention",),
    "quantized_linear": ("kernels/quant",),
    "remote_engine": ("engine/host", "protocol", "serve"),
    "router": ("kernels/moe",),
    "structured_validity": (*_SERVER, "text"),
}
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
        """Whether the target was reached, a target for the value by the worst of the repeats too.

        None without a target, or where its ratio was not measured.
        """
        if self.target is None:
            return None
        worst = min if self.target.better == "higher" else max
        values = [row.value for row in self.repeats] or [self.value]
        measured = worst(values) if self.target.of == "value" else self.ratio
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
    script: None for the running one. out: None writes SCRIPT/GPU.json below `RESULTS`.
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
        "commit": (fingerprint.git_revision or "unknown")[:8],
        "code": code_digest(script),
        **({"notes": list(notes)} if notes else {}),
        "rows": [row.as_json() for row in rows],
    }
    path = out or RESULTS / script / f"{machine_name(names, gpus)}.json"
    merge_run(path, run)
    print_table(f"{script}: {subject}" if subject else script, rows, notes)
    return path


@cache
def code_digest(script: str) -> str:
    """A digest of the code that a script measures, which changes with any byte of it."""
    digest = hashlib.sha256()
    for name in CODE_PATHS.get(script, _ENGINE):
        place = SOURCE / name
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix in (".py", ".cu"):
                digest.update(f"{path.relative_to(SOURCE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


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
            format_number(row.value)
            + (f" ({format_number(row.span[0])} to {format_number(row.span[1])})" if row.span else ""),
            row.peer or "",
            format_number(row.peer_value),
            format_number(row.ratio),
            format_number(row.target.reach if row.target else None),
            met,
            format_number(row.limit_share),
        )
    console = Console(width=140)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def format_number(value: float | None) -> str:
    """A value with four digits, or without decimals from 1,000 on. Empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
