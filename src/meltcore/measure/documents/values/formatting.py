"""Formats numbers and facts of a result as text, for console tables and HTML reports."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from meltcore.common.sizes import size_text
from meltcore.measure.documents.schema import (
    ClientLoad,
    Distribution,
    EvalScore,
    Evaluation,
    Fingerprint,
    LevelResult,
    RunResult,
    WeightedThroughput,
)
from meltcore.measure.documents.values.percentiles import TOO_SMALL

NOT_MEASURED = "–"


def client_line(levels: Sequence[LevelResult]) -> str:
    """Return a sentence which says that the load generator was neither late nor out of CPU.

    The sentence names levels that were too short to measure the load generator. No level may be CLIENT_BOUND.
    """
    unmeasured_loads = [format_load(level) for level in levels if not _is_measured(level.client)]
    if not unmeasured_loads:
        return "The load generator was neither late nor out of CPU."
    too_short_note = (
        f"{', '.join(unmeasured_loads)}: too short to measure whether the load generator was late or out of CPU."
    )
    return (
        too_short_note
        if len(unmeasured_loads) == len(levels)
        else f"{too_short_note} In the other levels it was neither."
    )


def _is_measured(client: ClientLoad | None) -> bool:
    return client is not None and client.loop_lag_p99_ms is not None and client.cpu_utilization is not None


# The load generator's settings that define a workload.
_LOAD_SETTINGS = ("workload", "concurrency", "request_rate", "num_prompts", "max_tokens", "extra_body")


def format_number(value: float | None) -> str:
    """Format 1234.5 as "1,234", and None as a dash. Small values have two or three significant digits."""
    if value is None:
        return NOT_MEASURED
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def format_percent(ratio: float | None) -> str:
    """Format 0.9951 as "99.51 %". Never rounds a ratio below 1 up to 100 %."""
    if ratio is None:
        return NOT_MEASURED
    text = f"{100 * ratio:.2f}"
    if ratio < 1 and text == "100.00":
        text = "99.99"
    return f"{text.removesuffix('.00')} %"


def format_change(ratio: float | None) -> str:
    """Format 0.0512 as "+5.1 %", and None as a dash."""
    return NOT_MEASURED if ratio is None else f"{100 * ratio:+.1f} %"


def format_percentile(distribution: Distribution, name: str) -> str:
    """Format one percentile ("p50"). Returns "n too small" if there are too few samples for it."""
    if distribution.n == 0:
        return NOT_MEASURED
    value = getattr(distribution, name)
    return TOO_SMALL if value is None else format_number(value)


def format_duration(seconds: float) -> str:
    """Format seconds: "0.4 s", "12 s", "4 min 5 s", "2 h 3 min"."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    return f"{minutes} min {seconds_left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_time(started: str) -> str:
    """Format the ISO time of a run as a date and time in UTC."""
    return datetime.fromisoformat(started).astimezone(UTC).strftime("%d %B %Y, %H:%M:%S UTC")


def format_setting(value: object) -> str:
    """Format the value of a setting, nested values in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {format_setting(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(format_setting(inner) for inner in value) or "none"
    return "none" if value is None else str(value)


def format_counts(names: Sequence[str], separator: str = ", ") -> str:
    """Format names with their counts ("2 × NVIDIA H200, NVIDIA L4"), in order of appearance, or "" for none."""
    return separator.join(
        name if names.count(name) == 1 else f"{names.count(name)} × {name}" for name in dict.fromkeys(names)
    )


def format_load(level: LevelResult) -> str:
    """Format the load of a level: "concurrency 400", "12.5 requests/s", "translation, concurrency 32"."""
    task_text = "" if level.task is None else f"{level.task.task}, "
    if level.load_kind == "open" and level.rate_per_s is not None:
        return f"{task_text}{format_number(level.rate_per_s)} requests/s"
    return f"{task_text}concurrency {level.concurrency:,}"


def format_load_settings(load: dict[str, Any]) -> str:
    """Format the load on a server, or "" if it is unknown."""
    return ", ".join(
        f"{name.replace('_', ' ')} {format_setting(load[name])}" for name in _LOAD_SETTINGS if load.get(name)
    )


def fingerprint_rows(fingerprint: Fingerprint) -> list[tuple[str, str]]:
    """Return a fingerprint as (name, value) pairs: CPU, memory, one pair per GPU, system, versions, arguments, seed."""
    rows = [
        ("CPU", f"{fingerprint.cpu}, {fingerprint.cores} cores usable"),
        ("Memory", size_text(fingerprint.memory_bytes)),
    ]
    for index, gpu in enumerate(fingerprint.gpus):
        rows.append((f"GPU {index}", f"{gpu.name}, {size_text(gpu.memory_bytes)}, {gpu.uuid}"))
    if not fingerprint.gpus:
        rows.append(("GPU", "none"))
    if fingerprint.gpu_driver:
        rows.append(("GPU driver", fingerprint.gpu_driver))
    rows += [
        ("System", f"{fingerprint.kernel}, Python {fingerprint.python}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in fingerprint.versions.items())),
        ("Git revision", fingerprint.git_revision or "not a checkout"),
        ("Arguments", shlex.join(fingerprint.arguments) or "none"),
        ("Seed", "none" if fingerprint.seed is None else str(fingerprint.seed)),
        ("Taken", fingerprint.taken),
    ]
    return rows


def result_warnings(result: RunResult) -> list[str]:
    """Return all reasons to doubt the numbers of a run. The reasons that the result records come first."""
    reasons = list(result.reasons)
    if result.status == "partial" and result.verdict != "PARTIAL":
        reasons.append("The run ended early; it never enters a comparison.")
    reasons += level_warnings(result.levels)
    reasons += [f"API check {check.name}: {check.detail}" for check in result.checks if check.status == "FAIL"]
    return list(dict.fromkeys(reasons))


def level_warnings(levels: Sequence[LevelResult]) -> list[str]:
    """Return one line per level that is not OK or has failed requests, with the reasons."""
    warnings = []
    for level in levels:
        if level.verdict != "OK":
            reasons = "; ".join(level.reasons) or "no reason recorded"
            warnings.append(f"{format_load(level)}: {level.verdict}: {reasons}")
        elif level.failed:
            failures = ", ".join(f"{count:,} x {reason}" for reason, count in level.failures.items())
            warnings.append(
                f"{format_load(level)}: {level.failed:,} of {level.requests:,} requests failed ({failures})"
            )
    return warnings


def caution_lines(levels: Sequence[LevelResult]) -> list[str]:
    """Return one line per kind of caution, with the first level that has it and the number of the others."""
    by_kind: dict[str, list[str]] = {}
    for level in levels:
        for kind, text in level.cautions.items():
            by_kind.setdefault(kind, []).append(f"{format_load(level)}: {text}")
    return [
        lines[0] + f" ({len(lines) - 1} more level{'s' * (len(lines) > 2)} too)" * (len(lines) > 1)
        for lines in by_kind.values()
    ]


def evaluation_line(evaluation: Evaluation) -> str:
    """Return one sentence: the accuracy with its interval, and the number of failed requests if any."""
    line = (
        f"{evaluation.correct:,} of {evaluation.total:,} correct: {format_percent(evaluation.accuracy)} "
        f"(95 % interval {format_percent(evaluation.ci_low)} to {format_percent(evaluation.ci_high)})"
    )
    if evaluation.strict_correct is not None:
        line += f"; {evaluation.strict_correct:,} by strict extraction"
    return f"{line}, {evaluation.failed:,} requests failed" if evaluation.failed else line


def weighted_throughput_line(throughput: WeightedThroughput) -> str:
    """Return one sentence with the weighted rates of all tokens and of output tokens, for unchecked answers."""
    return (
        f"weighted throughput: {format_number(throughput.total_tokens_per_s)} tok/s of prompts and answers together, "
        f"{format_number(throughput.output_tokens_per_s)} of answers alone "
        "(weights 1, 1, 2, 2, 4, 4, 8; answers unchecked)"
    )


def eval_score_line(score: EvalScore) -> str:
    """Return one sentence with the score in all tokens and in output tokens per second, or why the score is zero."""
    if score.zero_reasons:
        return f"score: 0, because of {'; '.join(score.zero_reasons)}"
    return (
        f"score: {format_number(score.total_tokens_per_s)} by prompts and answers together (the public harness's way), "
        f"{format_number(score.output_tokens_per_s)} by answers alone (the written rule); weights 1, 1, 2, 2, 4, 4, 8"
    )
