"""Tables of the docs from the documents of `meltcore compare-backends` under benchmarks/results/compare_backends/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meltcore.common.files import read_document
from meltcore.measure.documents.backends import START_KIND_BY_SET_UP, BackendComparison, BackendRun, BestBackend

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "compare_backends" / "h200.json"


def _result() -> BackendComparison:
    """Read the document."""
    return read_document(RESULT, BackendComparison)


def _lines(head: list[str], rows: list[list[str]], left: int) -> list[str]:
    """Lines of a table whose first `left` columns are text."""
    align = "|".join("---" if column < left else "--:" for column in range(len(head)))
    return [f"| {' | '.join(head)} |", f"|{align}|", *(f"| {' | '.join(row)} |" for row in rows)]


def rates() -> list[str]:
    """Lines of a table: output tok/s, TTFT p50 and ITL p50 by set-up, concurrency and backend; then the source."""
    found = _result()
    names = list(dict.fromkeys(run.backend for run in found.runs if run.levels))
    rows = []
    for set_up in found.set_ups:
        runs = [found.run(name, START_KIND_BY_SET_UP[set_up]) for name in names]
        for concurrency in found.levels_of(set_up):
            levels = [run.level(concurrency) if run is not None else None for run in runs]
            if any(levels):
                best = max(level.output_tokens_per_s for level in levels if level is not None)
                rows.append([set_up, str(concurrency), *(_cell(run, concurrency, best) for run in runs)])
    versions = "; ".join(f"{run.backend} {run.version}" for run in found.runs if run.start == "single" and run.version)
    gpus = ", ".join(gpu.name for gpu in found.fingerprint.gpus)
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    lines = _lines(["set-up", "concurrency", *names], rows, 1)
    return [*lines, "", f"{found.fingerprint.taken[:10]}, {gpus}; {versions}. {settings}; {found.load['workload']}."]


def _cell(run: BackendRun | None, concurrency: int, best: float) -> str:
    level = run.level(concurrency) if run is not None else None
    if run is None or level is None:
        return (run.failure(concurrency) if run is not None else "") or "not measured"
    rate = f"{level.output_tokens_per_s:,.0f}"
    latencies = [level.ttft_ms.p50, level.itl_ms.p50]
    texts = ["–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in latencies]
    bold = "**" if level.output_tokens_per_s == best else ""
    return f"{bold}{rate}{bold} ({', '.join(texts)})"


def best() -> list[str]:
    """Lines of a table: the best backend of each set-up and model."""
    columns: dict[str, Callable[[BestBackend], str]] = {
        "model": lambda row: row.model,
        "set-up": lambda row: row.set_up or "any",
        "concurrency": lambda row: ", ".join(map(str, row.levels)),
        "best": lambda row: row.backend or "none",
        "lead": lambda row: row.reason,
        "output tok/s": lambda row: "" if row.output_tokens_per_s is None else f"{row.output_tokens_per_s:,.0f}",
    }
    rows = [[cell(row) for cell in columns.values()] for row in _result().best]
    return _lines(list(columns), rows, 5)


def aspects() -> list[str]:
    """Lines of a table: the nine aspects by backend."""
    found = _result()
    rows = [[aspect.name, *(aspect.findings[name] for name in found.backends)] for aspect in found.aspects]
    return _lines(["aspect", *found.backends], rows, len(found.backends) + 1)


def unmeasured() -> list[str]:
    """Lines of a table: what was not measured, and why."""
    rows = [[run.backend, run.start, run.reason] for run in _result().runs if run.reason]
    return _lines(["backend", "start", "not measured"], rows, 3)


TABLES = {
    "backends: rates": rates,
    "backends: best": best,
    "backends: aspects": aspects,
    "backends: not measured": unmeasured,
}
