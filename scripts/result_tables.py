"""Tables of the docs that are read from documents of commands under benchmarks/results/, which have no rows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
_VERSIONS = ("meltcore", "torch", "triton")
SHARING = "gpu_sharing/h200.json"
SHARING_FACTOR = 1.3


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
    command = shlex.join(made["arguments"])
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


def sharing() -> list[str]:
    """Lines of a table: means of sharing a GPU in time, what has not been measured, and what the rule says."""
    if not (RESULTS / SHARING).exists():
        return ["Not measured yet on a GPU."]
    runs = _read(SHARING)["runs"]
    found: dict[str, dict[str, dict[str, float]]] = {}  # by means, works and unit
    for row in (row for run in runs for row in run["rows"]):
        means, works = row["work"].split(": ")
        units = found.setdefault(means, {}).setdefault(works, {})
        units[row["unit"]] = row["value"]
        if row["unit"] == "p95 ms" and "peer_value" in row:  # alone, in the same run
            units["p95 to alone"] = row["value"] / row["peer_value"]
    heads = ["means", "interactive work", "requests", "p50, ms", "p95, ms", "p99, ms", "p95 to alone", "busy work left"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'--:|' * (len(heads) - 2)}"]
    for means, works in [(means, works) for means, pair in found.items() for works in pair]:
        units = found[means][works]
        cells = [means, works, _number(units["requests"]), *(_number(units[f"p{each} ms"], 2) for each in (50, 95, 99))]
        share = units.get("busy share of alone")
        cells += ["", ""] if share is None else [f"{units['p95 to alone']:.2f}×", f"{share:.0%}".replace("%", " %")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", sharing_verdict({means: pair for means, pair in found.items() if means != "alone"})]
    for run in runs:
        versions = ", ".join(f"{name} {run['versions'][name]}" for name in _VERSIONS if name in run["versions"])
        machine = ", ".join(run["machine"]["gpus"]) or "CPU"
        made = f"{run['date']}, commit {run['commit']}, {machine}, {versions}"
        lines += ["", f"{made}: `{run['command']}`", ""]
        lines += [f"- {note}" for note in run.get("notes", ())]
    return lines


def sharing_verdict(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Apply the rule of docs/decisions/gpu-sharing.md to rows by means, works and unit. Returns a sentence.

    A means within one process wins where its p95 is better than the best p95 of MPS, and than the best of step pacing,
    by SHARING_FACTOR, and it leaves the busy work no less than each of these two does, for both pairs of works.
    """

    def best(family: str, works: str) -> dict[str, float] | None:
        rows = [units[works] for means, units in found.items() if means.startswith(family) and works in units]
        return min(rows, key=lambda units: units["p95 ms"], default=None)

    all_works = sorted({works for units in found.values() for works in units})
    peers = {works: [best(family, works) for family in ("MPS", "pacing")] for works in all_works}
    if any(peer is None for each in peers.values() for peer in each):
        return "Undecided: MPS or step pacing has not been measured on both pairs of works."
    winners = [
        means
        for means, units in found.items()
        if means.startswith(("streams", "green"))
        and all(works in units for works in all_works)
        and all(
            peer is not None
            and peer["p95 ms"] >= SHARING_FACTOR * units[works]["p95 ms"]
            and units[works]["busy share of alone"] >= peer["busy share of alone"]
            for works in all_works
            for peer in peers[works]
        )
    ]
    if winners:
        return f"By the rule one process for several engines is worth it: {', '.join(winners)}."
    return "By the rule no means within one process is worth it: engines stay processes of their own."


def real_models() -> list[str]:
    """Lines of a table: real weights in each format on each device, beside transformers in float32."""
    lines = [
        "| model | weights | on | English | Hindi | largest difference | equal texts | no tie | equal to llama.cpp |"
    ]
    lines.append(f"|---|---|---|{'--:|' * 6}")
    sources = []
    for path in sorted((RESULTS / "real_model_parity").glob("*.json")):
        for run in json.loads(path.read_text())["runs"]:
            for weights, cells in _parity_cells(run["rows"]).items():
                lines.append(f"| {run['subject']} | {weights} | {path.stem} | {' | '.join(cells)} |")
            sources.append(
                f"{run['date']}, commit {run['commit']}, {path.stem}, transformers {run['versions']['transformers']}: "
                f"`{run['command']}`"
            )
    return [*lines, "", *dict.fromkeys(sources)]


def _parity_cells(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the cells of each kind of weights: perplexities as "ours (transformers)", and counts of texts."""
    by_weights: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        weights, _, work = row["work"].partition(", ")
        by_weights.setdefault(weights, {})[re.sub(r"\d+", "N", work)] = row
    cells = {}
    for weights, found in by_weights.items():
        perplexities = [
            f"{found[text]['value']:.4f} ({found[text]['peer_value']:.4f})" for text in ("English", "Hindi")
        ]
        largest = f"{found['largest difference of a perplexity']['value']:.4f} %"
        counts = [
            _of(found.get("equal of N greedy texts")),
            f"{found['texts that differ by no tie']['value']:.0f}",
            _of(found.get("equal to llama.cpp of N greedy texts")),
        ]
        cells[weights] = [*perplexities, largest, *counts]
    return cells


def _of(row: dict[str, Any] | None) -> str:
    """Return "29 of 30" from a row that counts texts, or nothing where it was not measured."""
    return "" if row is None else f"{row['value']:.0f} of {re.findall(r'of ([0-9]+) ', row['work'])[0]}"


def speeds() -> list[str]:
    """Lines of a table: output tokens per second of each model that offline.py measured, by concurrent requests."""
    columns = ("1 request", "4 requests", "16 requests", "64 requests", "100 requests")
    lines = [
        f"| model or file | on | prompt / answer tokens | {' | '.join(columns)} | date |",
        f"|---|---|---|{'--:|' * (len(columns) + 1)}",
    ]
    runs = [(machine, run) for machine in ("h200", "cpu") for run in _read(f"offline/{machine}.json")["runs"]]
    # Files that can be fetched come first. A subject with a comma names a switch of the engine.
    runs = [each for each in runs if "," not in each[1]["subject"]]
    runs.sort(key=lambda each: not each[1]["subject"].startswith(("gemma-3-270m", "smollm2")))
    for machine, run in runs:
        on = "H200" if machine == "h200" else f"{run['machine']['cores']} cores, {run['machine']['cpu']}"
        rates: dict[str, dict[str, float]] = {}
        for row in run["rows"]:
            requests, _, lengths = row["work"].partition(", ")
            if row["unit"] == "output tokens/s" and lengths:
                rates.setdefault(re.sub(r" (in|out)", "", lengths), {})[requests] = row["value"]
        for lengths, found in rates.items():
            cells = [_number(found.get(column)) for column in columns]
            if any(cells):
                lines.append(f"| {run['subject']} | {on} | {lengths} | {' | '.join(cells)} | {run['date']} |")
    return lines


TABLES = {
    "speeds": speeds,
    "real models": real_models,
    "gpu sharing": sharing,
    "Qwen2.5-1.5B levels": levels,
    "Qwen2.5-1.5B float16": precision,
    "Qwen2.5-1.5B batching": batching,
    "context of 1,048,700 tokens": context,
    "score sweep": sweep,
}
