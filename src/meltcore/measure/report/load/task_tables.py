"""The tables and facts of levels of translation, transcription and synthesis."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.schema import Distribution, LevelResult, Task, TaskLoad
from meltcore.measure.documents.values.definitions import DEFINITIONS, TASK_DEFINITIONS, Definition
from meltcore.measure.documents.values.formatting import format_load, format_number, format_percent
from meltcore.measure.documents.values.throughput import rate_of, throughput, throughput_unit
from meltcore.measure.report.page.page import Cell, Column, Row, Table, percentile_cell, verdict_cell

# Definitions of generation's metrics that hold for other tasks too.
_COMMON_KEYS = ("e2e_ms", "queue_delay_ms", "steady", "goodput_per_s", "peak_in_flight", "accuracy", "succeeded")
_TASK_KEYS: dict[Task, tuple[str, ...]] = {
    "translation": ("sentences_per_s", "source_per_s"),
    "transcription": ("rtfx",),
    "synthesis": ("audio_s_per_s", "first_audio_ms", "real_time_factor"),
}


def task_table(levels: Sequence[LevelResult]) -> Table:
    """Build a table with one row per level of one task: requests, accuracy, throughput, latencies."""
    unit = throughput_unit(levels[0])
    has_slo, has_accuracy = any(level.slo for level in levels), any(level.accuracy is not None for level in levels)
    loads = [level.task for level in levels if level.task is not None]
    source_head = f"source {' or '.join(sorted({load.source_unit or '' for load in loads}))}s/s"
    is_open = any(level.load_kind == "open" for level in levels)
    columns = [
        Column("Load", console="req/s" if is_open else "concur-\nrency"),
        Column("sent", "Requests"),
        Column("answered", "Requests", console=None),
        Column("failed", "Requests"),
        Column("peak in flight", "Requests", console="peak"),
        *([Column("Accuracy", console="accu-\nracy")] if has_accuracy else []),
        Column("whole", unit.unit, console=unit.short_unit),
        Column("steady", unit.unit, console=None),
        *([Column(source_head, console=source_head.replace(" ", "\n"))] if loads[0].source_unit else []),
        *_latency_columns(loads[0]),
        *([Column("Goodput, req/s", console="good\nreq/s")] if has_slo else []),
        Column("Verdict", console=" "),
    ]
    rows = [
        _level_row(level, load, has_accuracy=has_accuracy, has_slo=has_slo)
        for level, load in zip(levels, loads, strict=True)
    ]
    return Table(columns, rows, is_compact=True)


def task_distributions(level: LevelResult, load: TaskLoad) -> list[tuple[str, Distribution]]:
    """Return the distributions of a level by name, times in milliseconds."""
    named = [("End to end", level.e2e_ms), ("Queue delay", level.queue_delay_ms)]
    if load.task == "synthesis":
        named = [("First audio", load.first_audio_ms), *named, ("Real-time factor (ratio)", load.real_time_factor)]
    return named


def task_facts(load: TaskLoad) -> list[tuple[str, str]]:
    """Return what the succeeded requests of a level have done."""
    if load.task == "translation":
        counts = f"{load.work:,.0f} sentences with {load.source or 0:,} {load.source_unit}s"
        facts = [("Translated", f"{counts}; {format_number(load.source_per_s)} {load.source_unit}s/s of source")]
    else:
        verb = "Transcribed" if load.task == "transcription" else "Synthesized"
        facts = [(verb, f"{format_number(load.work)} s of audio")]
    return facts + ([("Answers without text", f"{load.empty_answers:,}")] if load.task != "synthesis" else [])


def relevant_definitions(tasks: Sequence[Task | None]) -> list[Definition]:
    """Return the definitions of the metrics of some tasks; None is generation."""
    keys = {key for task in tasks if task is not None for key in (*_TASK_KEYS[task], *_COMMON_KEYS)}
    common = [definition for definition in DEFINITIONS if None in tasks or not tasks or definition.key in keys]
    return [*(definition for definition in TASK_DEFINITIONS if definition.key in keys), *common]


def _latency_columns(load: TaskLoad) -> list[Column]:
    """Return the columns of the median and 99th percentile of each latency; a terminal has no room for three."""
    groups: list[tuple[str, str | None]] = [("End to end, ms", "E2E\np50 ms")]
    if load.task == "synthesis":
        groups = [("First audio, ms", "1st audio\np50 ms"), ("Real-time factor", "RTF\np50"), ("End to end, ms", None)]
    columns = []
    for group, console in groups:
        columns += [Column("p50", group, console), Column("p99", group, None if console is None else "\np99")]
    return columns


def _level_row(level: LevelResult, load: TaskLoad, *, has_accuracy: bool, has_slo: bool) -> Row:
    short_load = format_number(level.rate_per_s) if level.load_kind == "open" else f"{level.concurrency:,}"
    distributions = [level.e2e_ms]
    if load.task == "synthesis":
        distributions = [load.first_audio_ms, load.real_time_factor, level.e2e_ms]
    latencies = [percentile_cell(distribution, name) for distribution in distributions for name in ("p50", "p99")]
    steady = Cell("none", "faint") if level.steady is None else format_number(rate_of(level.steady))
    cells: list[str | Cell] = [
        Cell(format_load(level), console_text=short_load),
        f"{level.requests:,}",
        f"{level.succeeded:,}",
        failed_cell(level),
        f"{level.peak_in_flight:,}",
        *([format_percent(level.accuracy)] if has_accuracy else []),
        format_number(throughput(level)),
        steady,
        *([format_number(load.source_per_s)] if load.source_unit else []),
        *latencies,
        *([format_number(level.goodput_per_s)] if has_slo else []),
        verdict_cell(level.verdict),
    ]
    return Row(cells)


def failed_cell(level: LevelResult) -> Cell:
    """Return the cell with the failed requests of a level."""
    return Cell(f"{level.failed:,}", "warning" if level.failed else "")
