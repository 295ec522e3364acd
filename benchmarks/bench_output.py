"""The form of every benchmark's result: one table printed last, and the same as JSON under benchmarks/results/."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from meltcore.results.fingerprint import clean_arguments, take_fingerprint

RESULTS = Path(__file__).parent / "results"


@dataclass(kw_only=True)
class Row:
    """One measured value. `ratio` is above 1 where we are better; `reach` is what was asked of it (or of the value)."""

    work: str
    unit: str
    value: float
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    reach: float | None = None
    limit_share: float | None = None
    # Of --debug uniform-routing: tokens of a decode step, and the experts of a layer that it met.
    routed_tokens: int | None = None
    experts_met: float | None = None
    experts_expected: float | None = None
    invalid: str | None = None  # why the value does not count


def need_gpu(count: int = 1, model: str = "") -> None:
    """Leave with one line where there are fewer NVIDIA GPUs. A bundled model or a folder may do without."""
    if model.startswith("meltcore/") or (model and Path(model).is_dir()):
        return
    import torch  # not every benchmark has it

    there = torch.cuda.device_count()
    if there < count:
        raise SystemExit("needs an NVIDIA GPU" if count == 1 else f"needs {count} NVIDIA GPUs, torch sees {there}")


def write_result(name: str, rows: Sequence[Row], versions: dict[str, str], notes: Sequence[str] = ()) -> None:
    """Write benchmarks/results/NAME.json and print the table. `versions`: of the packages that matter and the peers.

    `notes`: what a reader must know beside the rows, such as what was skipped and why.
    """
    fingerprint = take_fingerprint()
    result = {
        "machine": {
            "cpu": fingerprint.cpu,
            "cores": fingerprint.cores,
            "memory_bytes": fingerprint.memory_bytes,
            "gpus": [gpu.name for gpu in fingerprint.gpus],
            "kernel": fingerprint.kernel,
        },
        "versions": {"python": fingerprint.python, "meltcore": fingerprint.versions["meltcore"], **versions},
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *clean_arguments(sys.argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        **({"notes": list(notes)} if notes else {}),
        "rows": [{key: value for key, value in asdict(row).items() if value is not None} for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    table = Table(title=name, title_justify="left")
    for column in ("work", "unit", "value", "peer", "peer value", "ratio", "reach", "of limit"):
        table.add_column(column, justify="left" if column in ("work", "unit", "peer") else "right")
    for row in rows:
        numbers = (row.peer_value, row.ratio, row.reach, row.limit_share)
        work = f"{row.work} (INVALID: {row.invalid})" if row.invalid else row.work
        table.add_row(work, row.unit, _number(row.value), row.peer or "", *map(_number, numbers))
    console = Console(width=140)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
