"""Judges two sets of server starts: REGRESSION, IMPROVEMENT, NO EVIDENCE or UNDERPOWERED, by one metric on one load.

A verdict needs three things at once: a change above the least effect, a change above what the same server shows against
itself, and significance (Mann-Whitney and the bootstrap interval). All other metrics are shown and not judged, so that
looking at twenty of them finds no false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from meltcore.errors import ConfigError
from meltcore.report.compare import METRICS, Metric, environment_changes, level_key, reasons_not_to_compare
from meltcore.report.statistics import CONFIDENCE, Change, compare_samples, noise_floor
from meltcore.results.judgement import Better, Difference, JudgedRow, Judgement, JudgementWord, Limits
from meltcore.results.schema import LevelResult, RunResult
from meltcore.results.starts import StartSet
from meltcore.results.wording import load_of, setting

LEAST_STARTS = 4  # a side: below it no arrangement of the values reaches p < 0.05
PRIMARY_METRIC = "output tok/s"
_LOAD_SETTINGS = ("workload", "seed", "max_tokens", "requests", "temperature", "extra_body", "stream")
NOT_INTERLEAVED = "Not interleaved: the two sets were taken at different times, so what changed in between is in it."


def judge(
    old: StartSet,
    new: StartSet,
    *,
    control: StartSet | None = None,
    order: str = "",
    metric: str = PRIMARY_METRIC,
    load: int | None = None,
    limits: Limits | None = None,
    force: bool = False,
) -> Judgement:
    """`control`: starts of `old`'s server before the comparison. `order`: how starts were interleaved, as "ABBA".

    `load` picks the level whose `metric` gives the verdict, by its concurrency; None: the highest that both have.
    Raises ConfigError for sets that do not compare (unless `force`), an unknown metric, or a load not measured.
    """
    doubts = reasons_against(old, new)
    if doubts and not force:
        raise ConfigError(f"these sets do not compare: {'; '.join(doubts)}. --force shows them all the same")
    limits = limits or Limits()
    judged = find_metric(metric)
    key = _primary_key(old, new, load)
    rows = _rows(old, new)
    primary = next((row for at, row in rows if at == key and row.metric == judged.name), None)
    if primary is None:
        raise ConfigError(f"{judged.name} is not known of every start at this load, so it cannot give the verdict")
    against_itself = None if control is None else _row(control, old, key, judged)
    noise = noise_of(primary, against_itself)
    word, why = verdict(primary, noise, limits)
    return Judgement(
        verdict=word,
        why=why,
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
        control=against_itself,
        rows=[row for _, row in rows],
        differences=[Difference(name=n, old=a, new=b) for n, a, b in environment_changes(old.starts[0], new.starts[0])],
        doubts=doubts,
        cautions=_cautions(order, old, new, against_itself, limits),
    )


def verdict(row: JudgedRow, noise: float | None, limits: Limits) -> tuple[JudgementWord, str]:
    """The word for one row and, in a sentence, why."""
    starts = min(len(row.old_values), len(row.new_values))
    if row.change is None or row.low is None or row.high is None or row.p is None or noise is None:
        return "UNDERPOWERED", f"{starts} start a side says nothing about the spread between starts."
    if starts < LEAST_STARTS:
        return "UNDERPOWERED", f"{starts} starts a side cannot reach p < {limits.alpha:g}; take {LEAST_STARTS} or more."
    size, floor = abs(row.change), max(limits.least_effect, noise)
    significant = row.p < limits.alpha and not row.low <= 0 <= row.high
    if significant and size > floor:
        better = (row.change > 0) == (row.better == "higher")
        word: JudgementWord = "IMPROVEMENT" if better else "REGRESSION"
        return word, (
            f"A change of {100 * row.change:+.1f} % is above the least effect ({100 * limits.least_effect:g} %) and "
            f"above A's own noise ({100 * noise:.1f} %), p = {row.p:.3g}."
        )
    if significant:
        which = "the least effect" if limits.least_effect >= noise else "A's own noise"
        return "NO EVIDENCE", f"The change is significant, and no larger than {which} ({100 * floor:.1f} %)."
    if -limits.must_find < row.low and row.high < limits.must_find:
        return "NO EVIDENCE", f"Not significant, and a change of {100 * limits.must_find:g} % or more is ruled out."
    return "UNDERPOWERED", (
        f"Not significant, and changes from {100 * row.low:+.1f} % to {100 * row.high:+.1f} % remain possible: "
        f"more starts, or a quieter machine, are needed to rule out {100 * limits.must_find:g} %."
    )


def noise_of(row: JudgedRow, control: JudgedRow | None) -> float | None:
    """A's own noise: the larger of what its spread between starts makes likely and what A against A showed.

    Without a control the spread is that of the old set itself.
    """
    spread = noise_floor(
        row.old_values if control is None else control.old_values, len(row.old_values), len(row.new_values)
    )
    if spread is None or control is None or control.change is None:
        return spread
    return max(spread, abs(control.change))


def reasons_against(old: StartSet, new: StartSet) -> list[str]:
    """Why the sets measured different things, or did not measure to the end: each reason once, whichever start."""
    reasons = [
        reason
        for index in range(max(len(old.starts), len(new.starts)))
        for reason in reasons_not_to_compare(
            old.starts[min(index, len(old.starts) - 1)], new.starts[min(index, len(new.starts) - 1)]
        )
    ]
    for name in _LOAD_SETTINGS:
        before, after = old.load.get(name), new.load.get(name)
        if old.load and new.load and before != after:
            reasons.append(f"the load's {name} differs: {setting(before)} against {setting(after)}")
    return list(dict.fromkeys(reasons))


def find_metric(name: str) -> Metric:
    """By its name in a report, in any case, with or without its unit. Raises ConfigError."""
    wanted = name.casefold().replace("_", " ")
    for metric in METRICS:
        if wanted in (metric.name.casefold(), metric.name.casefold().removesuffix(" ms")):
            return metric
    raise ConfigError(f"no metric {name!r}; there are {', '.join(metric.name for metric in METRICS)}")


def _primary_key(old: StartSet, new: StartSet, load: int | None) -> tuple[str, int, float | None]:
    """The key of the level that is judged."""
    theirs = {level_key(level) for level in new.starts[0].levels}
    common = [level for level in old.starts[0].levels if level_key(level) in theirs]
    if load is not None:
        common = [level for level in common if level.concurrency == load]
    if not common:
        which = "" if load is None else f" at {load} at once"
        raise ConfigError(f"the sets have no level in common{which}")
    return level_key(max(common, key=lambda level: (level.concurrency, level.rate_per_s or 0.0)))


def _rows(old: StartSet, new: StartSet) -> list[tuple[tuple[str, int, float | None], JudgedRow]]:
    """Every metric of every common load that every start has a value of."""
    found = []
    for level in old.starts[0].levels:
        for metric in METRICS:
            row = _row(old, new, level_key(level), metric)
            if row is not None:
                found.append((level_key(level), row))
    return found


def _row(old: StartSet, new: StartSet, key: tuple[str, int, float | None], metric: Metric) -> JudgedRow | None:
    before, after = _values(old.starts, key, metric), _values(new.starts, key, metric)
    if before is None or after is None:
        return None
    found: Change = compare_samples(before, after)
    return JudgedRow(
        load=load_of(next(level for level in old.starts[0].levels if level_key(level) == key)),
        metric=metric.name,
        better=cast(Better, metric.better),
        old_values=before,
        new_values=after,
        old=found.old,
        new=found.new,
        change=found.change,
        low=found.low,
        high=found.high,
        p=found.p,
    )


def _values(starts: Sequence[RunResult], key: tuple[str, int, float | None], metric: Metric) -> list[float] | None:
    """One value a start; None where a start lacks one."""
    values: list[float] = []
    for start in starts:
        level: LevelResult | None = next((level for level in start.levels if level_key(level) == key), None)
        value = None if level is None else metric.value(level)
        if value is None or not math.isfinite(value):
            return None
        values.append(value)
    return values


def _cautions(order: str, old: StartSet, new: StartSet, control: JudgedRow | None, limits: Limits) -> list[str]:
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
