"""Tables of the docs from the documents of `meltcore compare-backends` under benchmarks/results/compare_backends/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "compare_backends" / "h200.json"
_MOST_FAILED = 0.01  # as meltcore.results.backends.MOST_FAILED
_STARTS = {"sessions": "single", "batching": "single"}


def _result() -> dict[str, Any]:
    """Read the document."""
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


def _level(run: dict[str, Any], concurrency: int) -> dict[str, Any] | None:
    """Return a level that counts; None where there is none."""
    for level in run["levels"]:
        if level["concurrency"] == concurrency and level["failed"] <= _MOST_FAILED * level["requests"]:
            return dict(level)
    return None


def _lines(head: list[str], rows: list[list[str]], left: int) -> list[str]:
    """Lines of a table whose first `left` columns are text."""
    align = "|".join("---" if column < left else "--:" for column in range(len(head)))
    return [f"| {' | '.join(head)} |", f"|{align}|", *(f"| {' | '.join(row)} |" for row in rows)]


def rates() -> list[str]:
    """Lines of a table: output tok/s, TTFT p50 and ITL p50 by set-up, concurrency and backend; then the source."""
    found = _result()
    names = list(dict.fromkeys(run["backend"] for run in found["runs"] if run["levels"]))
    rows = []
    for set_up in found["set_ups"]:
        runs = {run["backend"]: run for run in found["runs"] if run["start"] == _STARTS.get(set_up, set_up)}
        for concurrency in found["load"]["concurrency"]:
            if set_up in _STARTS and (concurrency <= found["most_sessions"]) != (set_up == "sessions"):
                continue
            levels = [_level(runs[name], concurrency) for name in names]
            if not any(levels):
                continue
            best = max(level["output_tokens_per_s"] for level in levels if level)
            cells = [_cell(level, best) for level in levels]
            rows.append([set_up, str(concurrency), *cells])
    versions = "; ".join(
        f"{run['backend']} {run['version']}" for run in found["runs"] if run["start"] == "single" and run["version"]
    )
    made = found["fingerprint"]
    gpus = ", ".join(gpu["name"] for gpu in made["gpus"])
    settings = ", ".join(f"{name} {value}" for name, value in found["settings"].items())
    lines = _lines(["set-up", "concurrency", *names], rows, 1)
    return [*lines, "", f"{made['taken'][:10]}, {gpus}; {versions}. {settings}; {found['load']['workload']}."]


def _cell(level: dict[str, Any] | None, best: float) -> str:
    if level is None:
        return "not measured"
    rate = f"{level['output_tokens_per_s']:,.0f}"
    latencies = [level[name]["p50"] for name in ("ttft_ms", "itl_ms")]
    texts = ["–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in latencies]
    bold = "**" if level["output_tokens_per_s"] == best else ""
    return f"{bold}{rate}{bold} ({', '.join(texts)})"


def best() -> list[str]:
    """Lines of a table: the best backend of each set-up and model."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "model": lambda row: row["model"],
        "set-up": lambda row: row["set_up"] or "any",
        "concurrency": lambda row: ", ".join(map(str, row["levels"])),
        "best": lambda row: row["backend"] or "none",
        "lead": lambda row: row["reason"],
        "output tok/s": lambda row: "" if row["output_tokens_per_s"] is None else f"{row['output_tokens_per_s']:,.0f}",
    }
    rows = [[cell(row) for cell in columns.values()] for row in _result()["best"]]
    return _lines(list(columns), rows, 5)


def aspects() -> list[str]:
    """Lines of a table: the nine aspects by backend."""
    found = _result()
    rows = [[row["name"], *(row["findings"][name] for name in found["backends"])] for row in found["aspects"]]
    return _lines(["aspect", *found["backends"]], rows, len(found["backends"]) + 1)


def unmeasured() -> list[str]:
    """Lines of a table: what was not measured, and why."""
    rows = [[run["backend"], run["start"], run["reason"]] for run in _result()["runs"] if run["reason"]]
    return _lines(["backend", "start", "not measured"], rows, 3)


TABLES = {
    "backends: rates": rates,
    "backends: best": best,
    "backends: aspects": aspects,
    "backends: not measured": unmeasured,
}
