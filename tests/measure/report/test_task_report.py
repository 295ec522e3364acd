"""Tables, page and comparison of a load on translation, transcription and synthesis."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from sample_results import sample_level, sample_run

from meltcore.measure.documents.comparison import StartSet
from meltcore.measure.documents.schema import Distribution, LevelResult, TaskLoad
from meltcore.measure.report.comparisons.compare_runs import compare_runs
from meltcore.measure.report.comparisons.compare_starts import compare_starts
from meltcore.measure.report.load.levels import levels_tables, load_charts
from meltcore.measure.report.load.run import run_tiles
from meltcore.measure.report.page.console import print_table
from meltcore.measure.report.render import render

WIDE = Distribution(n=10_000, p50=12_345.0, p99=58_123.0)
UNITS: dict[str, str] = {"translation": "sentences/s", "transcription": "RTFx", "synthesis": "audio s/s"}


def task_level(task: str, rate: float, concurrency: int = 10, **changes: object) -> LevelResult:
    load = TaskLoad(task=task, work=rate * 60, work_per_s=rate)
    if task == "translation":
        load.source, load.source_per_s, load.source_unit = 50_000, 5123.0, "character"
    if task == "synthesis":
        load.first_audio_ms, load.real_time_factor = WIDE, Distribution(n=10_000, p50=0.12, p99=0.34)
    level = sample_level(concurrency, task=load, output_tokens_per_s=0.0, e2e_ms=WIDE, accuracy=None, **changes)
    for part in (level.steady, *level.timeline):
        assert part is not None
        part.work_per_s, part.output_tokens_per_s = 1.1 * rate, 0.0
    return level


def printed(levels: list[LevelResult]) -> str:
    console = Console(file=io.StringIO(), width=80)
    for table in levels_tables(levels):
        print_table(table, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", list(UNITS))
def test_table_of_a_task_has_its_metrics_and_fits_80_columns(task: str) -> None:
    text = printed([task_level(task, 4321.0, 10_000, requests=10_000, succeeded=10_000)])
    assert "…" not in text
    assert "tok/s" not in text
    for number in ("4,321", "12,345", "58,123", "10,000", *(["0.12", "0.34"] if task == "synthesis" else [])):
        assert number in text
    assert ("5,123" in text) is ("characters/s" in text) is (task == "translation")


def test_tasks_have_tables_and_tiles_of_their_own() -> None:
    levels = [sample_level(10), task_level("transcription", 4000.0), task_level("transcription", 2000.0, 20)]
    assert len(levels_tables(levels)) == 2
    best = [tile for tile in run_tiles(sample_run(levels)) if tile[0].startswith("Best")]
    assert [(label, text) for label, _, text in best] == [
        ("Best throughput", "output tok/s, concurrency 10"),
        ("Best throughput, transcription", "RTFx, concurrency 10"),
    ]
    assert best[1][1] == "4,000"
    by_load = levels_tables([task_level("transcription", 1.0, concurrency) for concurrency in (16, 8)])[0]
    assert [str(row.cells[0].text) for row in by_load.rows] == [
        "transcription, concurrency 8",
        "transcription, concurrency 16",
    ]


def test_chart_of_one_dot_is_left_to_the_table() -> None:
    levels = [task_level("transcription", 1.0, concurrency) for concurrency in (8, 16)]
    both = [figure.title for figure in load_charts(levels)]
    lone = [
        figure.title for figure in load_charts([levels[0], msgspec.structs.replace(levels[1], requests=0, steady=None)])
    ]
    assert set(both) - set(lone) == {"RTFx: audio seconds transcribed per second"}


@pytest.mark.parametrize(("task", "unit"), UNITS.items())
def test_page_of_a_task_uses_its_words(task: str, unit: str) -> None:
    html = render(sample_run([task_level(task, 4321.0), task_level(task, 5432.0, 20)]))
    assert unit in html
    assert "5,432" in html
    for word in ("output tok/s", "Inter-token", "Events per token", "Time to first token", ">TTFT"):
        assert word not in html
    assert ("Time to first audio against load" in html) is (task == "synthesis")
    assert ("characters/s of source" in html) is (task == "translation")


@pytest.mark.parametrize(("task", "unit"), UNITS.items())
def test_throughput_of_a_task_gives_the_verdict(task: str, unit: str) -> None:
    def a_set(rate: float) -> StartSet:
        spread = (0.0, 0.004, -0.004, 0.002, -0.002, 0.006)
        starts = [sample_run([task_level(task, rate * (1 + each))]) for each in spread]
        return StartSet(name="set", command="", taken="2026-11-21T12:00:00Z", load={}, starts=starts)

    result = compare_starts(a_set(100), a_set(80))
    assert (result.verdict, result.primary.name) == ("REGRESSION", f"{unit}, {task}, concurrency 10")
    assert "TTFT p50 ms" not in {row.metric for row in result.rows}
    judged = compare_starts(a_set(100), a_set(80), metric="e2e p50")
    assert judged.verdict in ("UNDERPOWERED", "NO EVIDENCE")


def test_ratios_of_tasks_have_no_rows_of_other_tasks() -> None:
    first, second = (sample_run([task_level("translation", rate)]) for rate in (100.0, 150.0))
    rows = {row.metric: row for row in compare_runs(first, second)}
    assert rows["sentences/s"].ratio == 1.5
    assert rows["source char/s"].ratio == 1.0
    assert rows["source tok/s"].ratio is None
    assert not {"RTFx", "output tok/s", "ITL p50 ms"} & set(rows)


def test_levels_of_one_load_compare_within_their_task() -> None:
    run = sample_run([sample_level(10), task_level("translation", 100.0), task_level("transcription", 50.0)])
    rows = compare_runs(run, run)
    assert {"output tok/s", "sentences/s", "RTFx"} <= {row.metric for row in rows}
    assert {row.ratio for row in rows if row.first} == {1.0}
