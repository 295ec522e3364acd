"""Tables of the docs that are read from documents of commands under benchmarks/results/, which have no rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
_VERSIONS = ("meltcore", "torch", "triton")


def _read(file: str) -> dict[str, Any]:
    """Read a document of a command."""
    document: dict[str, Any] = json.loads((RESULTS / file).read_text())
    return document


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _percent(change: float) -> str:
    return f"{change:+.1%}".replace("%", " %")


def _change(row: dict[str, Any]) -> str:
    """Returns a change of a comparison with its interval and p."""
    return (
        f"{_percent(row['change'])} (95 % interval {_percent(row['low'])} to {_percent(row['high'])}, p {row['p']:.3f})"
    )


def _table(columns: dict[str, Callable[[Any], str]], rows: Iterable[Any], source: dict[str, Any]) -> list[str]:
    """Lines of a table of numbers and of its source."""
    lines = [f"| {' | '.join(columns)} |", f"|{'--:|' * len(columns)}"]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows]
    made = source["fingerprint"]
    versions = ", ".join(f"{name} {made['versions'][name]}" for name in _VERSIONS)
    gpus = ", ".join(gpu["name"] for gpu in made["gpus"])
    command = " ".join(f"'{word}'" if " " in word else word for word in made["arguments"])
    return [*lines, "", f"{made['taken'][:10]}, {gpus}, {versions}: `meltcore {command}`"]


def levels() -> list[str]:
    """Lines of a table: Qwen2.5-1.5B over HTTP by concurrency, one run per level.

    A percentile of too few requests is empty, and so is the steady rate of a level that was too short for one.
    """
    run = _read("qwen25/h200.json")
    columns: dict[str, Callable[[Any], str]] = {
        "concurrency": lambda level: _number(level["concurrency"]),
        "requests": lambda level: _number(level["succeeded"]),
        "failed": lambda level: _number(level["failed"]),
        "duration, s": lambda level: _number(level["duration_s"], 2),
        "output tok/s": lambda level: _number(level["output_tokens_per_s"]),
        "steady tok/s": lambda level: _number((level["steady"] or {}).get("output_tokens_per_s")),
        "TTFT mean, ms": lambda level: _number(level["ttft_ms"]["mean"], 1),
        "TTFT p50, ms": lambda level: _number(level["ttft_ms"]["p50"], 1),
        "ITL p50, ms": lambda level: _number(level["itl_ms"]["p50"], 2),
        "ITL p99, ms": lambda level: _number(level["itl_ms"]["p99"], 2),
    }
    return _table(columns, run["levels"], run)


def precision() -> list[str]:
    """Lines of a table: each start of the control, of bfloat16 and of float16, then what the comparison says.

    After the verdict stand the control (A against A) and the metrics that are significant but not judged.
    """
    comparison = _read("qwen25/fp16.json")
    primary, control = comparison["primary"], comparison["control"]
    old, new = (comparison["differences"][0][side] for side in ("old", "new"))
    starts = list(zip_longest(control["old_values"], primary["old_values"], primary["new_values"]))
    columns: dict[str, Callable[[Any], str]] = {
        "start": lambda row: str(row[0]),
        f"{old}, control": lambda row: _number(row[1]),
        old: lambda row: _number(row[2]),
        new: lambda row: _number(row[3]),
    }
    means = ("mean", control["old"], primary["old"], primary["new"])
    lines = _table(columns, [*((number, *row) for number, row in enumerate(starts, 1)), means], comparison)
    said = f"{comparison['verdict']}: {_change(primary)}, {primary['load']}. {comparison['reason']}"
    noise = f"{old} against its control: {_change(control)}; noise {_percent(comparison['noise']).lstrip('+')}"
    alpha = comparison["limits"]["alpha"]
    others = [f"{row['metric']} {_change(row)}" for row in comparison["rows"] if row["p"] < alpha]
    unjudged = f"Significant, but not judged: {'; '.join(others)}." if others else "No other metric is significant."
    return [*lines[:-1], said, "", f"{noise}. {unjudged}", "", lines[-1]]


def batching() -> list[str]:
    """Lines of a table: the sweep of max-num-seqs, with its knee and its best point."""
    tuning = _read("qwen25/batching.json")
    points = tuning["points"]
    default = points[0]["output_tokens_per_s"]
    marks = {id(points[tuning["best"]]): "best", id(points[tuning["knee"]]): "knee"}
    columns: dict[str, Callable[[Any], str]] = {
        "max-num-seqs": lambda point: _number(point["settings"].get("max_num_seqs")) or "default",
        "output tok/s": lambda point: _number(point["output_tokens_per_s"]),
        "to the default": lambda point: _percent(point["output_tokens_per_s"] / default - 1),
        "TTFT p50, ms": lambda point: _number(point["ttft_ms"]),
        "ITL p50, ms": lambda point: _number(point["itl_ms"], 2),
        "": lambda point: marks.get(id(point), ""),
    }
    return _table(columns, points, tuning)


def context() -> list[str]:
    """Lines of a table: one prompt of more than 2^20 tokens."""
    run = _read("qwen25/context.json")
    columns: dict[str, Callable[[Any], str]] = {
        "prompt tokens": lambda level: _number(level["prompt_tokens"]),
        "output tokens": lambda level: _number(level["output_tokens"]),
        "failed": lambda level: _number(level["failed"]),
        "max-model-len": lambda _: _number(run["settings"]["max_model_len"]),
        "YaRN factor": lambda _: _number(run["settings"]["hf_overrides"]["rope_parameters"]["factor"]),
        "TTFT, s": lambda level: _number(level["ttft_ms"]["mean"] / 1000, 1),
        "ITL p50, ms": lambda level: _number(level["itl_ms"]["p50"], 2),
    }
    return _table(columns, run["levels"], run)


def sweep() -> list[str]:
    """Lines of a table: the cells of the GPU score's sweep, a row per concurrency and output length."""
    run = _read("gpu_sweep/h200.json")
    temperatures = run["score"]["grid"]["temperatures"]
    rows: dict[tuple[int, int], dict[float, Any]] = {}
    for cell in run["score"]["devices"][0]["sweep"]:
        rows.setdefault((cell["concurrency"], cell["output_len"]), {})[cell["temperature"]] = cell
    columns: dict[str, Callable[[Any], str]] = {
        "concurrency": lambda row: _number(row[0][0]),
        "output length": lambda row: _number(row[0][1]),
    }
    for each in temperatures:
        columns[f"tok/s, temperature {each:g}"] = lambda row, key=each: _number(row[1][key]["output_tokens_per_s"])
    for each in temperatures:
        columns[f"ITL p50, ms, temperature {each:g}"] = lambda row, key=each: _number(row[1][key]["itl_ms"]["p50"], 2)
    return _table(columns, rows.items(), run)


TABLES = {
    "Qwen2.5-1.5B levels": levels,
    "Qwen2.5-1.5B float16": precision,
    "Qwen2.5-1.5B batching": batching,
    "context of 1,048,700 tokens": context,
    "score sweep": sweep,
}
