"""Builds a leaderboard of GPU scores, best first, with the reasons why results must not be ranked together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.score import Score
from meltcore.measure.documents.values.formatting import format_change, format_duration, format_number
from meltcore.measure.documents.values.scores import (
    COMPARABILITY_FIELDS,
    NamedScore,
    differences,
    read_score,
    shipped_references,
)
from meltcore.measure.report.page.charts import Bar, bar_chart
from meltcore.measure.report.page.page import (
    Box,
    Cell,
    Column,
    Figure,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
    numeric_columns,
    verdict_cell,
)

FORCED_WARNING = "FORCED: these results must not be ranked together"
_MAX_RUNS_READ = 20  # runs that the leaderboard without arguments reads
_MAX_BAR_CHARS = 20  # characters of the longest bar on the console
_REFERENCE_SUFFIX = ", shipped reference"
_MAX_NAME_CHARS = 62  # characters above a bar of a chart


# What must agree between results, and the plural of its name. References of the package may have another engine.
_SAME_ENGINE: tuple[str, Callable[[Score], str]] = ("engine versions", lambda score: score.engine)


def newest_runs_and_references(folder: Path) -> tuple[list[NamedScore], list[str]]:
    """Return the newest comparable runs of `folder` with the shipped references, and notes on other runs.

    All results have the workload of the newest run with a comparable score. The runs also have its engine version.
    Without such a run, the result is the first reference and the references that are comparable with it.
    """
    notes: list[str] = []
    runs: list[NamedScore] = []
    for path in sorted(folder.glob("*-bench*"), reverse=True)[:_MAX_RUNS_READ]:
        try:
            named_score = read_score(str(path))
        except ConfigError as error:
            notes.append(f"Left out: {error}.")
            continue
        reasons = list(named_score.score.not_comparable)
        if named_score.score.output_tokens_per_s is None and not reasons:
            reasons = ["it has no score"]
        if runs and not reasons:
            reasons = ranking_notes([runs[0], named_score])
        if reasons:
            notes.append(f"Left out: {named_score.name}: {'; '.join(reasons)}.")
        else:
            runs.append(named_score)
    references = shipped_references()
    first_score = [*runs, *references][0]
    comparable_references = [
        reference for reference in references if not differences(first_score.score, reference.score)
    ]
    if not runs:
        notes.append(f"No comparable run in {folder}: meltcore bench makes one.")
    return [*runs, *comparable_references], notes


def sort_by_score(entries: Sequence[NamedScore], *, force: bool = False) -> list[NamedScore]:
    """Return the results with a score, best first.

    Raises ConfigError if no result has a score, and, without `force`, for results that are not comparable.
    """
    reasons = ranking_notes(entries)
    if reasons and not force:
        raise ConfigError(
            f"these results do not rank: {'; '.join(reasons)}. --force draws them all the same, and marks the chart"
        )
    entries_with_score = [entry for entry in entries if entry.score.output_tokens_per_s is not None]
    if not entries_with_score:
        raise ConfigError("none of these results has a score")
    return sorted(entries_with_score, key=lambda entry: -(entry.score.output_tokens_per_s or 0.0))


def ranking_notes(entries: Sequence[NamedScore]) -> list[str]:
    """Return the reasons why the results are not comparable, or an empty list if they are.

    Shipped references may have another engine version, which `leaderboard_notes` mentions.
    """
    reasons = [f"{entry.name}: {reason}" for entry in entries for reason in entry.score.not_comparable]
    for fact_name, fact in (*COMPARABILITY_FIELDS, _SAME_ENGINE):
        compared_entries = [entry for entry in entries if fact is not _SAME_ENGINE[1] or not entry.is_reference]
        if groups := _differing_groups(compared_entries, fact):
            reasons.append(f"the {fact_name} differ: {groups}")
    return reasons


def _differing_groups(entries: Sequence[NamedScore], fact: Callable[[Score], str]) -> str:
    """Return each value of the fact with the names of the entries that have it, or "" if all have the same value."""
    names_by_value: dict[str, list[str]] = {}
    for entry in entries:
        names_by_value.setdefault(fact(entry.score), []).append(entry.name)
    groups = ", ".join(f"{value} ({', '.join(names)})" for value, names in names_by_value.items())
    return groups if len(names_by_value) > 1 else ""


def leaderboard_notes(entries: Sequence[NamedScore]) -> list[str]:
    """Return the differences that do not prevent a ranking but may explain a difference in score."""
    notes = []
    if groups := _differing_groups(entries, lambda score: format_duration(score.duration_s)):
        notes.append(f"The runs were not equally long, and a short one may be over before a GPU is warm: {groups}.")
    if groups := _differing_groups(entries, lambda score: str(len(score.devices))):
        notes.append(f"A score is of all GPUs of its run together, and their numbers differ: {groups}.")
    groups = _differing_groups(entries, lambda score: score.engine)
    if groups and any(entry.is_reference for entry in entries):
        notes.append(f"A reference keeps the engine that it was measured with, and it differs: {groups}.")
    for package in ("torch", "triton"):
        versions = {entry.run.fingerprint.versions.get(package, "none") for entry in entries}
        if len(versions) > 1:
            notes.append(f"{package} was not the same: {', '.join(sorted(versions))}.")
    for entry in entries:
        if entry.score.health == "DEGRADED":
            notes.append(f"{entry.name}: a GPU was DEGRADED; its score is not that of a healthy one.")
        if any(device.is_shared for device in entry.score.devices):
            notes.append(f"{entry.name}: other programs held memory of a GPU, so its score may be too low.")
        if entry.run.verdict == "CLIENT_BOUND":
            notes.append(f"{entry.name}: the measurer was too late, so its score is too low.")
    return notes


def leaderboard_page(entries: Sequence[NamedScore], reasons: Sequence[str], notes: Sequence[str]) -> Page:
    """Build the page of sorted results.

    `reasons` say why the results must not be ranked. With any reason, every chart is marked.
    """
    best_score, is_forced = entries[0].score, bool(reasons)
    engines = {entry.score.engine for entry in entries}
    engine_detail = [f"engine {best_score.engine}"] if len(engines) == 1 else []  # else a note names them
    details = [best_score.workload, best_score.model, best_score.dtype, f"{best_score.weights} weights", *engine_detail]
    charts = [
        _bar_figure(entries, "Output tokens per second", 1, is_forced, lambda entry: entry.score.output_tokens_per_s),
        _bar_figure(entries, "Output tokens per joule", 3, is_forced, lambda entry: entry.score.tokens_per_joule),
    ]
    note = (
        "One run each says nothing about the spread between runs. Where a result is of several GPUs, watts and "
        "latencies are of the first."
    )
    columns = [
        Column("", align="text"),
        Column("Output tok/s", console="output tok/s"),
        Column("", console=" ", align="left"),
        Column("per GPU", console=None),
        Column("tok/J"),
        *numeric_columns("W", "Concurrency", "TTFT p50, ms", "ITL p50, ms", "Last third", console=None),
        Column("Health", console="health"),
        *(numeric_columns("Workload", "Engine", "Precision", "Weights", console=None) if is_forced else []),
    ]
    rows = [_row(entry, entries[0], is_forced) for entry in entries]
    return Page(
        title=f"meltcore leaderboard – {len(entries)} result{'s' * (len(entries) != 1)}",
        name="leaderboard",
        subtitle="" if is_forced else " · ".join(details),
        badge="FORCED" if is_forced else "",
        style="bad" if is_forced else "",
        sections=[
            Section(
                blocks=[*([Box("bad", FORCED_WARNING, items=reasons)] if is_forced else []),
                        *([Box("unsure", "Read with care", items=notes)] if notes else [])]
            ),
            Section(blocks=[Figures([figure for figure in charts if figure is not None], is_full_width=True)]),
            Section("Results", [Table(columns, rows, is_compact=True)]),
            Section(blocks=[Text(note, "small")], console=False),
        ],
        footer="drawn by meltcore leaderboard from result.json files on this machine · nothing was uploaded",
    )  # fmt: skip


def leaderboard_json(entries: Sequence[NamedScore], reasons: Sequence[str], notes: Sequence[str]) -> str:
    """Return the rows of the leaderboard as a JSON text."""
    facts = ("output_tokens_per_s", "tokens_per_joule", "health", "workload", "engine", "dtype", "weights")
    rows = [
        {"name": entry.name, "hardware": entry.hardware} | {fact: getattr(entry.score, fact) for fact in facts}
        for entry in entries
    ]
    return json.dumps({"does_not_rank": list(reasons), "notes": list(notes), "rows": rows}, indent=2)


def _bar_figure(
    entries: Sequence[NamedScore],
    title: str,
    color: int,
    is_forced: bool,
    get_value: Callable[[NamedScore], float | None],
) -> Figure | None:
    """Draw one bar per result. Returns None if no result has a value."""
    values = [get_value(entry) for entry in entries]
    highest = max((value for value in values if value is not None), default=0.0)
    if highest <= 0:
        return None
    bars = [
        Bar(
            entry.hardware,
            value,
            _shorten_name(entry) + _REFERENCE_SUFFIX * entry.is_reference,
            "" if value is None else f"{100 * value / highest:.0f} %",
            "DEGRADED" if entry.score.health == "DEGRADED" else "",
            is_faded=is_forced,
        )
        for entry, value in zip(entries, values, strict=True)
    ]
    footnote = FORCED_WARNING if is_forced else ""
    return Figure(
        title, bar_chart(bars, label="results, best first", color=color, footnote=footnote, is_forced=is_forced)
    )


def _row(entry: NamedScore, best: NamedScore, is_forced: bool) -> Row:
    score, first_device = entry.score, entry.score.devices[0]
    sustained, rate = first_device.sustained, score.output_tokens_per_s or 0.0
    assert sustained is not None, "a result with a score has a sustained run"
    cells: list[str | Cell] = [
        Cell(entry.hardware, small_print=entry.name + _REFERENCE_SUFFIX * entry.is_reference),
        format_number(rate),
        Cell("", console_text="█" * max(1, round(_MAX_BAR_CHARS * rate / (best.score.output_tokens_per_s or 1.0)))),
        format_number(rate / len(score.devices)),
        format_number(score.tokens_per_joule),
        format_number(sustained.power_w),
        f"{sustained.concurrency:,}",
        format_number(sustained.ttft_ms.p50),
        format_number(sustained.itl_ms.p50),
        format_change(None if first_device.spread is None else first_device.spread.change),
        verdict_cell(score.health),
    ]
    return Row([*cells, *([score.workload, score.engine, score.dtype, score.weights] if is_forced else [])])


def _shorten_name(entry: NamedScore) -> str:
    """Return the name, or its end if the name is too long for its line.

    The start is left out because run folders mostly differ in the end; the table has the whole name.
    """
    max_chars = max(12, _MAX_NAME_CHARS - len(entry.hardware) - (12 if entry.score.health == "DEGRADED" else 0))
    return entry.name if len(entry.name) <= max_chars else f"…{entry.name[1 - max_chars :]}"
