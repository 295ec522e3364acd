"""How numbers and facts of a result are written for people: the console tables and the HTML report use these."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from meltcore.results.percentiles import TOO_SMALL
from meltcore.results.schema import (
    Distribution,
    EvalScore,
    Evaluation,
    Fingerprint,
    LevelResult,
    RunResult,
    SpeedSum,
)

NOT_MEASURED = "–"
# Of what a load generator was told, that which makes a workload.
_LOAD = ("workload", "concurrency", "rates", "requests", "max_tokens", "extra_body")


def number(value: float | None) -> str:
    """1234.5 -> "1,234"; small values keep two or three significant digits; None -> a dash."""
    if value is None:
        return NOT_MEASURED
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """0.9951 -> "99.51 %". Never rounds an incomplete share up to 100 %."""
    if share is None:
        return NOT_MEASURED
    text = f"{100 * share:.2f}"
    if share < 1 and text == "100.00":
        text = "99.99"
    return f"{text.removesuffix('.00')} %"


def change(share: float | None) -> str:
    """0.0512 -> "+5.1 %"; None -> a dash."""
    return NOT_MEASURED if share is None else f"{100 * share:+.1f} %"


def percentile(distribution: Distribution, name: str) -> str:
    """One percentile ("p50") as text, "n too small" where the sample does not carry it."""
    if distribution.n == 0:
        return NOT_MEASURED
    value = getattr(distribution, name)
    return TOO_SMALL if value is None else number(value)


def duration(seconds: float) -> str:
    """Seconds for people: "0.4 s", "12 s", "4 min 5 s", "2 h 3 min"."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(started: str) -> str:
    """A run's ISO time for people."""
    return datetime.fromisoformat(started).astimezone(UTC).strftime("%d %B %Y, %H:%M:%S UTC")


def setting(value: object) -> str:
    """The value of a setting, nested ones in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {setting(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(setting(inner) for inner in value) or "none"
    return "none" if value is None else str(value)


def gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def counted(names: Sequence[str]) -> str:
    """ "2 × NVIDIA H200, NVIDIA L4": each name once, in the order they come; empty of none."""
    return ", ".join(
        name if names.count(name) == 1 else f"{names.count(name)} × {name}" for name in dict.fromkeys(names)
    )


def load_of(level: LevelResult) -> str:
    """What was asked of the server on this level: "400 at once", "12.5 requests/s"."""
    if level.load_kind == "open" and level.rate_per_s is not None:
        return f"{number(level.rate_per_s)} requests/s"
    return f"{level.concurrency:,} at once"


def load_words(load: dict[str, Any]) -> str:
    """What a server was loaded with; empty where it is not known."""
    return ", ".join(f"{name.replace('_', ' ')} {setting(load[name])}" for name in _LOAD if load.get(name))


def fingerprint_rows(fingerprint: Fingerprint) -> list[tuple[str, str]]:
    """(name, value) pairs, one GPU a row."""
    rows = [
        ("CPU", f"{fingerprint.cpu}, {fingerprint.cores} cores usable"),
        ("Memory", gibibytes(fingerprint.memory_bytes)),
    ]
    for index, gpu in enumerate(fingerprint.gpus):
        rows.append((f"GPU {index}", f"{gpu.name}, {gibibytes(gpu.memory_bytes)}, {gpu.uuid}"))
    if not fingerprint.gpus:
        rows.append(("GPU", "none"))
    if fingerprint.gpu_driver:
        rows.append(("GPU driver", fingerprint.gpu_driver))
    rows += [
        ("System", f"{fingerprint.kernel}, Python {fingerprint.python}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in fingerprint.versions.items())),
        ("Git revision", fingerprint.git_revision or "not a checkout"),
        ("Arguments", " ".join(fingerprint.arguments) or "none"),
        ("Seed", "none" if fingerprint.seed is None else str(fingerprint.seed)),
        ("Taken", fingerprint.taken),
    ]
    return rows


def reasons_to_distrust(result: RunResult) -> list[str]:
    """Everything known that should make a reader doubt this run's numbers, the run's own reasons first."""
    reasons = list(result.reasons)
    if result.status == "partial" and result.verdict != "PARTIAL":
        reasons.append("The run ended early; it never enters a comparison.")
    reasons += levels_to_distrust(result.levels)
    reasons += [f"API check {check.name}: {check.detail}" for check in result.checks if check.status == "FAIL"]
    return list(dict.fromkeys(reasons))


def levels_to_distrust(levels: Sequence[LevelResult]) -> list[str]:
    """A line for each level that is not OK, and for each in which a request failed, with the reasons why."""
    reasons = []
    for level in levels:
        if level.verdict != "OK":
            why = "; ".join(level.reasons) or "no reason recorded"
            reasons.append(f"{load_of(level)}: {level.verdict}: {why}")
        elif level.failed:
            why = ", ".join(f"{count:,} x {reason}" for reason, count in level.failures.items())
            reasons.append(f"{load_of(level)}: {level.failed:,} of {level.requests:,} requests failed ({why})")
    return reasons


def evaluation_line(evaluation: Evaluation) -> str:
    """One sentence: the share right with its interval, and failures where there were any."""
    line = (
        f"{evaluation.right:,} of {evaluation.asked:,} right: {percent(evaluation.share)} "
        f"(95 % interval {percent(evaluation.low)} to {percent(evaluation.high)})"
    )
    if evaluation.strict_right is not None:
        line += f"; {evaluation.strict_right:,} by strict extraction"
    return f"{line}, {evaluation.failed:,} requests failed" if evaluation.failed else line


def speed_sum_line(found: SpeedSum) -> str:
    """One sentence: both weighted sums, and what they are not."""
    return (
        f"speed sum: {number(found.total_tokens_per_s)} tok/s of prompts and answers together, "
        f"{number(found.output_tokens_per_s)} of answers alone (weights 1, 1, 2, 2, 4, 4, 8; answers unchecked)"
    )


def eval_score_line(found: EvalScore) -> str:
    """One sentence: both ways to count, or why the score is zero."""
    if found.zero_because:
        return f"score: 0, because of {'; '.join(found.zero_because)}"
    return (
        f"score: {number(found.total_tokens_per_s)} by prompts and answers together (the public harness's way), "
        f"{number(found.output_tokens_per_s)} by answers alone (the written rule); weights 1, 1, 2, 2, 4, 4, 8"
    )
