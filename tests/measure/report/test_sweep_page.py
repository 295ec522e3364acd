"""The page of a sweep: one chart per temperature, every cell in the table, no score."""

import re
from pathlib import Path

import msgspec
import pytest
from sample_scores import sample_device, sample_score_level, sample_scored_run

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.score import GpuScore, ScoredRun, SweepGrid
from meltcore.measure.documents.values.documents import open_document
from meltcore.measure.documents.values.scores import NamedScore
from meltcore.measure.report.page.charts_isometric import isometric_bars
from meltcore.measure.report.render import render
from meltcore.measure.report.scores.leaderboard import newest_runs_and_references, sort_by_score
from meltcore.measure.report.scores.score import level_line
from meltcore.measure.report.scores.sweep import sweep_charts, temperature_lines

GRID = SweepGrid(concurrency=[1, 16], output_lens=[32, 512], temperatures=[0.0, 0.7], prompt_tokens=128, cell_s=5.0)


def device(**changes: object) -> GpuScore:
    cells = []
    for concurrency in GRID.concurrency:
        for length in GRID.output_lens:
            for temperature in GRID.temperatures:
                level = sample_score_level(concurrency, 5.0 * len(cells), 5.0)
                level.output_len, level.temperature = length, temperature
                level.output_tokens_per_s = concurrency * length * (1 - temperature / 2)
                cells.append(level)
    settings: dict[str, object] = {"levels": [], "sustained": None, "spread": None, "lines": None, "sweep": cells}
    return sample_device(**(settings | changes))


def sweep(**changes: object) -> ScoredRun:
    return sample_scored_run(
        [device(**changes)],
        workload="gpu-sweep/1",
        grid=GRID,
        not_comparable=["a sweep has no score and ranks with nothing"],
    )


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html.split("</style>")[1]).split())


def test_page_has_a_chart_per_temperature_and_every_cell() -> None:
    html = render(sweep())
    page = words(html)
    assert "meltcore load sweep" in page
    assert "gpu-sweep/1" in page
    assert "Output tokens per second, temperature 0 (greedy)" in page
    assert "Output tokens per second, temperature 0.7" in page
    assert html.count("<tr>") == 1 + 8
    assert "16 512 0.7 5,325 " in page
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", html)


def test_charts_share_a_scale_and_differ_in_color() -> None:
    first, second = sweep_charts(device(), GRID)
    assert "bar c1" in first.chart
    assert "bar c2" in second.chart
    assert "bar c2" not in first.chart
    ticks = [re.findall(r'class="tick" text-anchor="end">([\d.]+k)<', figure.chart) for figure in (first, second)]
    assert ticks[0] == ticks[1] != []
    assert "Concurrent requests 16, Output tokens per request 512: 8,192 tok/s" in first.chart
    assert first.chart.count("<title>") == 4


def test_higher_values_are_higher_and_back_bars_come_first() -> None:
    values = {(0, 0): 1.0, (1, 0): 8.0, (0, 1): 2.0}
    chart = isometric_bars(
        ["a", "b"], ["x", "y"], values, label="", row_title="R", column_title="C", unit="u", color=1, highest=8.0
    )
    order = re.findall(r"<title>R (\w), C (\w)", chart)
    assert order == [("b", "x"), ("a", "x"), ("a", "y")]
    tops = [
        min(float(pair.split(",")[1]) for pair in bar.split('points="')[3].split('"')[0].split())
        for bar in chart.split("<g>")[1:]
    ]
    assert tops[0] < tops[1]
    assert all(0 <= float(x) <= 520 for x in re.findall(r"[ \"]([\d.]+),[\d.]+", chart))


def test_what_a_temperature_costs_is_the_median_over_loads() -> None:
    assert temperature_lines(device(), GRID) == [
        "Temperature 0.7: 0.65 × the rate of temperature 0 (median of 4 loads, 0.65 to 0.65)."
    ]


def test_each_cell_is_one_line_while_it_runs() -> None:
    line = level_line("GPU 0", device().sweep[-1], is_sustained=True)
    assert " ".join(line.split()).startswith("GPU 0 concurrency 16 output length 512 temperature 0.7 5,325 tok/s ITL ")


def test_interrupted_sweep_shows_what_it_has() -> None:
    some = device()
    partial = device(sweep=some.sweep[:1], failure="interrupted")
    [chart] = sweep_charts(partial, GRID)
    assert chart.chart.count("<title>") == 1
    result = sweep(sweep=[], failure="interrupted")
    result.verdict, result.reasons = "PARTIAL", ["interrupted"]
    page = words(render(result))
    assert "PARTIAL" in page
    assert "Output tokens per second, temperature" not in page


def test_sweep_is_ranked_by_nothing(tmp_path: Path) -> None:
    result = sweep()
    result.score.output_tokens_per_s = None
    with pytest.raises(ConfigError, match="a sweep has no score"):
        sort_by_score([NamedScore("a", result), NamedScore("b", sample_scored_run())])
    folder = tmp_path / "20261125T000000Z-bench"
    folder.mkdir()
    (folder / "result.json").write_bytes(msgspec.json.encode(result))
    entries, notes = newest_runs_and_references(tmp_path)
    assert [each.name for each in entries] == ["h200"]
    assert "a sweep has no score" in notes[0]
    assert open_document(folder / "result.json").type is None
    assert main(["report", str(folder), "--export", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1 + 2
