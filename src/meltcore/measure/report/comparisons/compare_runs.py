"""Compares two stored runs by ratios, level by level. One run per side cannot prove a difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import LevelResult, RunResult
from meltcore.measure.documents.values.formatting import NOT_MEASURED, format_load, format_number, format_percent
from meltcore.measure.load.tasks.task import Metric, task_of
from meltcore.measure.report.page.console import print_blocks
from meltcore.measure.report.page.page import Block, Box, Cell, Column, Row, Table, Text, numeric_columns

CAVEAT = (
    "One run per side: these ratios hold no evidence of a difference. Repeat both runs, alternating, before concluding."
)
Changes = Sequence[tuple[str, str, str]]
LevelKey = tuple[str, str, int, float | None]
_NOT_STATED = "not named"
# What a server states about itself, where it does.
SERVER_SETTINGS = ("server_version", "device", "dtype", "tokenizer", "replicas", "max_model_len", "hf_overrides")


def metrics_of(level: LevelResult) -> list[Metric]:
    """Return the metrics of the task of a level, its throughput first."""
    task = task_of(level)
    return [*task.own_metrics, *task.shared_metrics]


@dataclass(frozen=True)
class MetricRatio:
    """One metric on one level in two runs.

    `ratio` is None if either value is missing or the first value is 0.
    """

    load: str
    metric: str
    first: float | None
    second: float | None
    better: str

    @property
    def ratio(self) -> float | None:
        """The second value divided by the first value, or None if it is undefined."""
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first


def compare_runs(first: RunResult, second: RunResult, *, force: bool = False) -> list[MetricRatio]:
    """Compare two runs on every load that both have. Return one ratio per metric and load.

    Without `force`, raises ConfigError for runs that are not comparable.
    """
    reasons = comparability_notes(first, second)
    if reasons and not force:
        raise ConfigError(f"these runs do not compare: {'; '.join(reasons)}. --force shows them all the same")
    second_levels = {level_key(level): level for level in second.levels}
    level_pairs = [
        (level, second_levels[level_key(level)]) for level in first.levels if level_key(level) in second_levels
    ]
    if not level_pairs:
        raise ConfigError("these runs have no level in common")
    rows = [
        MetricRatio(format_load(level), metric.name, metric.value(level), metric.value(second_level), metric.better)
        for level, second_level in level_pairs
        for metric in metrics_of(level)
    ]
    return rows + _weighted_ratios(first, second)


def _weighted_ratios(first: RunResult, second: RunResult) -> list[MetricRatio]:
    """Return the ratios of the weighted sums of two evaluations, if both have a score or both a weighted throughput."""
    rows = []
    for name in ("eval_score", "weighted_throughput"):
        first_sum, second_sum = getattr(first, name), getattr(second, name)
        if first_sum is not None and second_sum is not None:
            load = "score" if name == "eval_score" else "weighted throughput"
            rows += [
                MetricRatio(
                    load, "prompts and answers", first_sum.total_tokens_per_s, second_sum.total_tokens_per_s, "higher"
                ),
                MetricRatio(
                    load, "answers alone", first_sum.output_tokens_per_s, second_sum.output_tokens_per_s, "higher"
                ),
            ]
    return rows


def print_ratios(rows: Sequence[MetricRatio], reasons: Sequence[str], changes: Changes) -> None:
    """Print the reasons why the runs are not comparable, the changes of the environment, the ratios, and the caveat."""
    table_rows = []
    for index, row in enumerate(rows):
        format_value = format_percent if row.metric == "accuracy" else format_number
        cells: list[str | Cell] = [
            row.load,
            row.metric,
            format_value(row.first),
            format_value(row.second),
            _ratio_cell(row),
            f"{row.better} is better",
        ]
        table_rows.append(Row(cells, ends_group=index + 1 == len(rows) or rows[index + 1].load != row.load))
    columns = [*numeric_columns("load"), Column("metric", align="left"), *numeric_columns("A", "B", "B / A", " ")]
    blocks: list[Block] = [Box("bad", "These runs do not compare", items=reasons)] if reasons else []
    blocks += [Text(f"changed: {name}: {before} -> {after}") for name, before, after in changes]
    print_blocks([*blocks, Table(columns, table_rows), Text(CAVEAT)], Console())


def _ratio_cell(row: MetricRatio) -> Cell:
    """Return the ratio, green where the second run is better and red where it is worse."""
    if row.ratio is None or row.ratio == 1:
        return Cell(NOT_MEASURED if row.ratio is None else f"{row.ratio:.3f}")
    return Cell(f"{row.ratio:.3f}", style="good" if (row.ratio > 1) == (row.better == "higher") else "warning")


def ratios_json(rows: Sequence[MetricRatio], reasons: Sequence[str], changes: Changes) -> str:
    """Return the ratios of two runs as a JSON text."""
    document = {
        "does_not_compare": list(reasons),
        "changes": [{"name": name, "first": before, "second": after} for name, before, after in changes],
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "caveat": CAVEAT,
    }
    return json.dumps(document, indent=2)


def comparability_notes(first: RunResult, second: RunResult) -> list[str]:
    """Return the reasons why two runs are not comparable: different workloads, or an incomplete measurement."""
    reasons = []
    for name, run in (("the first", first), ("the second", second)):
        if run.status == "partial":
            reasons.append(f"{name} run is partial")
        if run.settings.get("debug"):
            reasons.append(f"{name} run's server had debug switches on: {', '.join(run.settings['debug'])}")
        failed_loads = [format_load(level) for level in run.levels if level.verdict != "OK"]
        if failed_loads:
            reasons.append(f"{name} run is not OK at {', '.join(failed_loads)}")
    # Other servers do not state their weights: against real ones that is shown as a change, no more.
    weights = [_weights(run) for run in (first, second)]
    if weights[0] != weights[1] and set(weights) != {"real", _NOT_STATED}:
        reasons.append(f"the weights differ: {weights[0]} against {weights[1]}")
    second_levels = {level_key(level): level for level in second.levels}
    for level in first.levels:
        second_level = second_levels.get(level_key(level))
        if second_level is not None and _amount(level) != _amount(second_level):
            reasons.append(
                f"{format_load(level)} differs: {level.requests:,} of {level.workload or 'no named workload'} "
                f"against {second_level.requests:,} of {second_level.workload or 'no named workload'}"
            )
    return reasons


def _amount(level: LevelResult) -> tuple[str, int, float | None]:
    """Return the workload of a level and how much of it was sent: a number of requests, or a time."""
    return level.workload, level.requests if level.send_s is None else 0, level.send_s


def environment_changes(first: RunResult, second: RunResult) -> list[tuple[str, str, str]]:
    """Return the facts of the machine and versions that differ: (name, first value, second value) each."""
    before, after = _environment(first), _environment(second)
    names = [*before, *(name for name in after if name not in before)]
    facts = [(name, before.get(name, "none"), after.get(name, "none")) for name in names]
    return [fact for fact in facts if fact[1] != fact[2]]


def _environment(run: RunResult) -> dict[str, str]:
    fingerprint = run.fingerprint
    facts = {
        "CPU": f"{fingerprint.cpu}, {fingerprint.cores} cores",
        "GPUs": ", ".join(gpu.name for gpu in fingerprint.gpus) or "none",
        "GPU UUIDs": ", ".join(gpu.uuid for gpu in fingerprint.gpus) or "none",
        "GPU driver": fingerprint.gpu_driver or "none",
        "kernel": fingerprint.kernel,
        "python": fingerprint.python,
        "git revision": fingerprint.git_revision or "none",
        "seed": str(fingerprint.seed),
        "model": str(run.settings.get("model", _NOT_STATED)),
        "weights": _weights(run),
    }
    server_settings = {f"server's {name}": str(run.settings[name]) for name in SERVER_SETTINGS if name in run.settings}
    return facts | server_settings | fingerprint.versions


def _weights(run: RunResult) -> str:
    return str(run.settings.get("weights", _NOT_STATED))


def level_key(level: LevelResult) -> LevelKey:
    """Return the task and the load of a level, which identify it across runs."""
    return task_of(level).name, level.load_kind, level.concurrency, level.rate_per_s
