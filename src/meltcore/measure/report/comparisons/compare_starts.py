"""Judges two sets of server starts: REGRESSION, IMPROVEMENT, NO EVIDENCE or UNDERPOWERED, by one metric on one load.

A change counts if it is above the least effect, above the noise of the old server, and significant (Mann-Whitney and
the bootstrap interval). All other metrics are shown and not judged, because one of twenty metrics is easily significant
by chance.

Stored sets are also printed: one in full, or several with one line per set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from rich.console import Console
from rich.markup import escape

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.comparison import Better, ComparedMetric, ComparisonResult, Difference, Limits, StartSet
from meltcore.measure.documents.schema import LevelResult, RunResult
from meltcore.measure.documents.values.formatting import (
    NOT_MEASURED,
    fingerprint_rows,
    format_counts,
    format_load,
    format_number,
    format_percent,
    format_setting,
    format_time,
)
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.load.tasks.task import Metric, all_metrics, task_of
from meltcore.measure.report.comparisons.compare_runs import (
    LevelKey,
    comparability_notes,
    environment_changes,
    level_key,
    metrics_of,
)
from meltcore.measure.report.comparisons.statistics import CONFIDENCE, Change, compare_samples, noise_floor
from meltcore.measure.report.page.console import print_blocks
from meltcore.measure.report.page.page import Column, Facts, Row, Table, Text, numeric_columns

MIN_STARTS_PER_SIDE = 4  # per side: below it no order of the values reaches p < 0.05
_LOAD_SETTINGS = ("workload", "seed", "max_tokens", "num_prompts", "temperature", "extra_body", "stream")
NOT_INTERLEAVED = (
    "Not interleaved: the two sets were taken at different times, so the change contains what happened in between."
)


def compare_starts(
    old: StartSet,
    new: StartSet,
    *,
    control: StartSet | None = None,
    order: str = "",
    metric: str | None = None,
    load: int | None = None,
    limits: Limits | None = None,
    force: bool = False,
) -> ComparisonResult:
    """Return the comparison of two sets of server starts, with a verdict on one metric.

    `control` holds starts of `old`'s server before the comparison. `order` says how starts were interleaved, such as
    "ABBA". A `metric` of None judges the throughput of the task. `load` is the concurrency of the level that gives the
    verdict; None picks the highest concurrency that both sets have. Raises ConfigError for an unknown metric, for a
    load that was not measured, and, without `force`, for sets that are not comparable.
    """
    reasons = start_set_comparability_notes(old, new)
    if reasons and not force:
        raise ConfigError(f"these sets do not compare: {'; '.join(reasons)}. --force shows them all the same")
    limits = limits or Limits()
    judged_metric = metrics_of(old.starts[0].levels[0])[0] if metric is None else find_metric(metric)
    level_id = _primary_key(old, new, load)
    rows = _compare_common_loads(old, new)
    primary = next((row for row_level, row in rows if row_level == level_id and row.metric == judged_metric.name), None)
    if primary is None:
        raise ConfigError(
            f"{judged_metric.name} is not known of every start at this load, so it cannot give the verdict"
        )
    control_row = None if control is None else _compare_metric(control, old, level_id, judged_metric)
    noise = noise_level(primary, control_row)
    verdict_name, reason = verdict(primary, noise, limits)
    return ComparisonResult(
        verdict=verdict_name,
        reason=reason,
        old_name=old.name,
        new_name=new.name,
        old_command=old.command,
        new_command=new.command,
        taken=new.taken,
        fingerprint=new.starts[0].fingerprint,
        load=dict(new.load),
        order=order,
        noise=noise,
        limits=limits,
        primary=primary,
        control=control_row,
        rows=[row for _, row in rows],
        differences=[
            Difference(name=name, old=old_value, new=new_value)
            for name, old_value, new_value in environment_changes(old.starts[0], new.starts[0])
        ],
        doubts=reasons,
        cautions=_cautions(order, old, new, control_row, limits),
    )


def verdict(row: ComparedMetric, noise: float | None, limits: Limits) -> tuple[Verdict, str]:
    """Return the verdict on one metric, and its reason in one sentence."""
    num_starts = min(len(row.old_values), len(row.new_values))
    if row.change is None or row.low is None or row.high is None or row.p is None or noise is None:
        return "UNDERPOWERED", f"{num_starts} start per side says nothing about the spread between starts."
    if num_starts < MIN_STARTS_PER_SIDE:
        return (
            "UNDERPOWERED",
            f"{num_starts} starts per side cannot reach p < {limits.alpha:g}; take {MIN_STARTS_PER_SIDE} or more.",
        )
    magnitude, floor = abs(row.change), max(limits.least_effect, noise)
    is_significant = row.p < limits.alpha and not row.low <= 0 <= row.high
    if is_significant and magnitude > floor:
        is_better = (row.change > 0) == (row.better == "higher")
        direction: Verdict = "IMPROVEMENT" if is_better else "REGRESSION"
        return direction, (
            f"A change of {100 * row.change:+.1f} % is above the least effect ({100 * limits.least_effect:g} %) and "
            f"above A's own noise ({100 * noise:.1f} %), p = {row.p:.3g}."
        )
    if is_significant:
        threshold_name = "the least effect" if limits.least_effect >= noise else "A's own noise"
        return "NO EVIDENCE", f"The change is significant, and no larger than {threshold_name} ({100 * floor:.1f} %)."
    if -limits.must_find < row.low and row.high < limits.must_find:
        return "NO EVIDENCE", f"Not significant, and a change of {100 * limits.must_find:g} % or more is ruled out."
    return "UNDERPOWERED", (
        f"Not significant, and changes from {100 * row.low:+.1f} % to {100 * row.high:+.1f} % remain possible: "
        f"more starts, or a quieter machine, are needed to rule out {100 * limits.must_find:g} %."
    )


def noise_level(row: ComparedMetric, control: ComparedMetric | None) -> float | None:
    """Return the noise of the old server as a relative change, or None if there are too few starts.

    The noise is the larger of two values: the change expected from the spread of the control starts, and the measured
    change between the control starts and the old set. Without a control, it is the change expected from the spread of
    the old set.
    """
    spread = noise_floor(
        row.old_values if control is None else control.old_values, len(row.old_values), len(row.new_values)
    )
    if spread is None or control is None or control.change is None:
        return spread
    return max(spread, abs(control.change))


def start_set_comparability_notes(old: StartSet, new: StartSet) -> list[str]:
    """Return the reasons why two sets are not comparable: different workloads, or incomplete measurements."""
    reasons = [
        reason
        for index in range(max(len(old.starts), len(new.starts)))
        for reason in comparability_notes(
            old.starts[min(index, len(old.starts) - 1)], new.starts[min(index, len(new.starts) - 1)]
        )
    ]
    for name in _LOAD_SETTINGS:
        before, after = old.load.get(name), new.load.get(name)
        if (
            old.load and new.load and format_setting(before) != format_setting(after)
        ):  # a stored set has lists for tuples
            reasons.append(f"the load's {name} differs: {format_setting(before)} against {format_setting(after)}")
    return list(dict.fromkeys(reasons))


def find_metric(name: str) -> Metric:
    """Return the metric of a name in upper or lower case, with or without its unit.

    Raises ConfigError for an unknown name.
    """
    normalized = name.casefold().replace("_", " ")
    for metric in all_metrics():
        if normalized in (metric.name.casefold(), metric.name.casefold().removesuffix(" ms")):
            return metric
    raise ConfigError(f"no metric {name!r}; there are {', '.join(metric.name for metric in all_metrics())}")


def _primary_key(old: StartSet, new: StartSet, load: int | None) -> LevelKey:
    """Return the key of the level that gives the verdict."""
    new_levels = {level_key(level) for level in new.starts[0].levels}
    common_levels = [level for level in old.starts[0].levels if level_key(level) in new_levels]
    if load is not None:
        common_levels = [level for level in common_levels if level.concurrency == load]
    if not common_levels:
        load_note = "" if load is None else f" at concurrency {load}"
        raise ConfigError(f"the sets have no level in common{load_note}")
    return level_key(max(common_levels, key=lambda level: (level.concurrency, level.rate_per_s or 0.0)))


def _compare_common_loads(old: StartSet, new: StartSet) -> list[tuple[LevelKey, ComparedMetric]]:
    """Return the comparison of each metric on each common load. A metric is left out if a start has no value for it."""
    rows = []
    for level in old.starts[0].levels:
        for metric in metrics_of(level):
            row = _compare_metric(old, new, level_key(level), metric)
            if row is not None:
                rows.append((level_key(level), row))
    return rows


def _compare_metric(old: StartSet, new: StartSet, key: LevelKey, metric: Metric) -> ComparedMetric | None:
    old_values, new_values = _start_values(old.starts, key, metric), _start_values(new.starts, key, metric)
    if old_values is None or new_values is None:
        return None
    change: Change = compare_samples(old_values, new_values)
    return ComparedMetric(
        load=format_load(next(level for level in old.starts[0].levels if level_key(level) == key)),
        metric=metric.name,
        better=cast(Better, metric.better),
        old_values=old_values,
        new_values=new_values,
        old=change.old,
        new=change.new,
        change=change.change,
        low=change.low,
        high=change.high,
        p=change.p,
    )


def _start_values(starts: Sequence[RunResult], key: LevelKey, metric: Metric) -> list[float] | None:
    """Return one value of the metric per start, or None if any start has no finite value."""
    values: list[float] = []
    for start in starts:
        level: LevelResult | None = next((level for level in start.levels if level_key(level) == key), None)
        value = None if level is None else metric.value(level)
        if value is None or not math.isfinite(value):
            return None
        values.append(value)
    return values


def _cautions(order: str, old: StartSet, new: StartSet, control: ComparedMetric | None, limits: Limits) -> list[str]:
    cautions = [] if order else [NOT_INTERLEAVED]
    if control is not None and control.p is not None and control.p < limits.alpha and control.change is not None:
        cautions.append(
            f"A against A differs too: {100 * control.change:+.1f} % between its starts before the comparison and "
            f"those within it (p = {control.p:.3g}). The machine itself moved."
        )
    if len(old.starts) != len(new.starts):
        cautions.append(f"Unequal numbers of starts: {len(old.starts)} against {len(new.starts)}.")
    cautions.append(
        f"Intervals are of {100 * CONFIDENCE:.0f} %, by bootstrap over starts. Only the primary metric is judged: "
        "among the others, one in twenty looks different by chance."
    )
    return cautions


def print_start_set(start_set: StartSet, console: Console) -> None:
    """Print the machine, the command, and each metric's mean and spread over the starts."""
    rows = []
    for level in start_set.starts[0].levels:
        for metric in metrics_of(level):
            values = [
                value
                for same_level in _levels_with_same_load(start_set, level)
                if (value := metric.value(same_level)) is not None
            ]
            if values:
                rows.append(Row([format_load(level), metric.name, *_metric_cells(values, metric.name)]))
        rows[-1:] = [Row(row.cells, ends_group=True) for row in rows[-1:]]
    columns = [Column("load"), Column("metric", align="left"), *numeric_columns("mean", "spread", "least", "most", "n")]
    title = Text(f"{start_set.name}, {len(start_set.starts)} starts, taken {start_set.taken}")
    facts = Facts(fingerprint_rows(start_set.starts[0].fingerprint), console=True)
    print_blocks([title, Text(start_set.command or "no command kept"), facts, Table(columns, rows)], console)


def print_start_sets(start_sets: Sequence[StartSet], console: Console) -> None:
    """Print each set's name, number of starts, output rate at the highest load, machine, time and command."""
    if not start_sets:
        console.print("no baselines here; meltcore baseline save NAME --run FILE makes one")
    for start_set in start_sets:
        first_start = start_set.starts[0]
        machine = format_counts([gpu.name for gpu in first_start.fingerprint.gpus]) or first_start.fingerprint.cpu
        level = max(first_start.levels, key=lambda level: (level.concurrency, level.rate_per_s or 0.0))
        mean_rate = float(np.mean([same_level.throughput for same_level in _levels_with_same_load(start_set, level)]))
        rate_text = f"{format_number(mean_rate)} {task_of(level).unit.unit} {format_load(level)}"
        line = f"{len(start_set.starts)} starts, {rate_text}, on {machine}, "
        line += format_time(start_set.taken)
        console.print(f"[bold]{escape(start_set.name)}[/]  {escape(line)}", highlight=False, soft_wrap=True)
        console.print(f"  {escape(start_set.command)}", highlight=False, soft_wrap=True)


def _levels_with_same_load(start_set: StartSet, level: LevelResult) -> list[LevelResult]:
    """Return the levels of all starts that have the same load as `level`."""
    return [
        candidate
        for start in start_set.starts
        for candidate in start.levels
        if level_key(candidate) == level_key(level)
    ]


def _metric_cells(values: Sequence[float], metric: str) -> list[str]:
    format_value = format_percent if metric == "accuracy" else format_number
    mean = float(np.mean(values))
    spread = NOT_MEASURED if len(values) < 2 or mean == 0 else f"{100 * float(np.std(values, ddof=1)) / mean:.1f} %"
    return [format_value(mean), spread, format_value(min(values)), format_value(max(values)), str(len(values))]
