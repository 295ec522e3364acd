"""Two runs' levels side by side. Ratios only: one run an arm proves nothing, and the output says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meltcore.errors import ConfigError
from meltcore.results.schema import LevelResult, RunResult
from meltcore.results.wording import load_of

CAVEAT = (
    "One run an arm: these ratios hold no evidence of a difference. Repeat both runs, alternating, before concluding."
)
_NOT_NAMED = "not named"
# What a server says of itself, where it does.
SERVED = ("server_version", "device", "dtype", "tokenizer", "replicas", "max_model_len")


@dataclass(frozen=True)
class Metric:
    """A column: `better` says which direction is an improvement."""

    name: str
    value: Callable[[LevelResult], float | None]
    better: str  # "higher" or "lower"


METRICS = (
    Metric("output tok/s", lambda level: level.output_tokens_per_s, "higher"),
    Metric("total tok/s", lambda level: level.total_tokens_per_s, "higher"),
    Metric("TTFT p50 ms", lambda level: level.ttft_ms.p50, "lower"),
    Metric("TTFT p99 ms", lambda level: level.ttft_ms.p99, "lower"),
    Metric("ITL p50 ms", lambda level: level.itl_ms.p50, "lower"),
    Metric("ITL p99 ms", lambda level: level.itl_ms.p99, "lower"),
    Metric("E2E p50 ms", lambda level: level.e2e_ms.p50, "lower"),
    Metric("accuracy", lambda level: level.accuracy, "higher"),
)


@dataclass(frozen=True)
class Row:
    """One metric on one level: both values and second / first (None where either is missing or the first is 0)."""

    load: str
    metric: str
    first: float | None
    second: float | None
    better: str

    @property
    def ratio(self) -> float | None:
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first


def compare(first: RunResult, second: RunResult, *, force: bool = False) -> list[Row]:
    """Rows for every load that both runs have. Raises ConfigError for runs that do not compare, unless `force`."""
    against = reasons_not_to_compare(first, second)
    if against and not force:
        raise ConfigError(f"these runs do not compare: {'; '.join(against)}. --force shows them all the same")
    others = {level_key(level): level for level in second.levels}
    pairs = [(level, others[level_key(level)]) for level in first.levels if level_key(level) in others]
    if not pairs:
        raise ConfigError("these runs have no level in common")
    rows = [
        Row(load_of(level), metric.name, metric.value(level), metric.value(other), metric.better)
        for level, other in pairs
        for metric in METRICS
    ]
    return rows + _sums(first, second)


def _sums(first: RunResult, second: RunResult) -> list[Row]:
    """What the levels of two evaluations add up to, where both have a score or both a speed sum."""
    rows = []
    for name in ("eval_score", "speed_sum"):
        found, other = getattr(first, name), getattr(second, name)
        if found is not None and other is not None:
            load = "score" if name == "eval_score" else "speed sum"
            rows += [
                Row(load, "prompts and answers", found.total_tokens_per_s, other.total_tokens_per_s, "higher"),
                Row(load, "answers alone", found.output_tokens_per_s, other.output_tokens_per_s, "higher"),
            ]
    return rows


def reasons_not_to_compare(first: RunResult, second: RunResult) -> list[str]:
    """Why two runs measured different things, or did not measure to the end."""
    reasons = []
    for name, run in (("the first", first), ("the second", second)):
        if run.status == "partial":
            reasons.append(f"{name} run is partial")
        if run.settings.get("debug"):
            reasons.append(f"{name} run's server had debug switches on: {', '.join(run.settings['debug'])}")
        bad = [load_of(level) for level in run.levels if level.verdict != "OK"]
        if bad:
            reasons.append(f"{name} run is not OK at {', '.join(bad)}")
    # Another's server does not say what its weights are: beside real ones that is shown as a change, no more.
    weights = [_weights(run) for run in (first, second)]
    if weights[0] != weights[1] and set(weights) != {"real", _NOT_NAMED}:
        reasons.append(f"the weights differ: {weights[0]} against {weights[1]}")
    others = {level_key(level): level for level in second.levels}
    for level in first.levels:
        other = others.get(level_key(level))
        if other is not None and (level.workload, level.requests) != (other.workload, other.requests):
            reasons.append(
                f"{load_of(level)} differs: {level.requests:,} of {level.workload or 'no named workload'} "
                f"against {other.requests:,} of {other.workload or 'no named workload'}"
            )
    return reasons


def environment_changes(first: RunResult, second: RunResult) -> list[tuple[str, str, str]]:
    """(name, first, second) of every fact of machine and versions that differs."""
    before, after = _environment(first), _environment(second)
    names = [*before, *(name for name in after if name not in before)]
    pairs = [(name, before.get(name, "none"), after.get(name, "none")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _environment(run: RunResult) -> dict[str, str]:
    found = run.fingerprint
    facts = {
        "CPU": f"{found.cpu}, {found.cores} cores",
        "GPUs": ", ".join(gpu.name for gpu in found.gpus) or "none",
        "GPU UUIDs": ", ".join(gpu.uuid for gpu in found.gpus) or "none",
        "GPU driver": found.gpu_driver or "none",
        "kernel": found.kernel,
        "python": found.python,
        "git revision": found.git_revision or "none",
        "seed": str(found.seed),
        "model": str(run.settings.get("model", _NOT_NAMED)),
        "weights": _weights(run),
    }
    served = {f"server's {name}": str(run.settings[name]) for name in SERVED if name in run.settings}
    return facts | served | found.versions


def _weights(run: RunResult) -> str:
    return str(run.settings.get("weights", _NOT_NAMED))


def level_key(level: LevelResult) -> tuple[str, int, float | None]:
    return level.load_kind, level.concurrency, level.rate_per_s
