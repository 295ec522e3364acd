"""The report: whole, self-contained, and honest about what is missing."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_results import sample_level, sample_run

from meltcore.cli.main import main
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import ClientLoad, Distribution
from meltcore.measure.report.render import render

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Balanced(HTMLParser):
    """Fails on any tag closed out of order or left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def drawings(html: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def test_page_is_self_contained_and_well_formed() -> None:
    html = render(sample_run())
    parser = _Balanced()
    parser.feed(html)
    assert parser.open == []
    assert "<script" not in html
    assert not re.search(r"""(src|href)=|url\(|@import""", html)


def test_every_level_has_its_row_and_its_time_line() -> None:
    html = render(sample_run())
    for load in ("concurrency 10", "concurrency 100", "concurrency 400", "concurrency 1,000", "concurrency 10,000"):
        assert f'<th scope="row">{load}</th>' in html
    assert len(drawings(html)) == 4 + 5


def test_drawn_points_lie_on_the_paper() -> None:
    levels = [sample_level(n) for n in (1, 3, 2000)] + [sample_level(50_000, steady=None)]
    for drawing in drawings(render(sample_run(levels))):
        _, _, width, height = map(float, drawing.attrib["viewBox"].split())
        for shape in drawing.iter():
            points = shape.attrib.get("points", "").split()
            places = [tuple(map(float, point.split(","))) for point in points]
            places += [
                (float(shape.attrib[x]), float(shape.attrib[y]))
                for x, y in (("x", "y"), ("cx", "cy"))
                if x in shape.attrib
            ]
            assert all(0 <= x <= width and 0 <= y <= height for x, y in places), shape.attrib


def test_percentile_the_sample_does_not_carry_is_words_not_a_number() -> None:
    html = render(sample_run([sample_level(10)]))
    assert "n too small" in html.split("What the words mean")[0]


def test_reasons_to_distrust_come_first() -> None:
    bad = sample_level(10, verdict="CLIENT_BOUND", reasons=["event loop late by 80 ms"])
    lossy = sample_level(20, failed=3, failures={"timeout": 3})
    html = render(sample_run([bad, lossy], status="partial", verdict="PARTIAL", reasons=["interrupted"]))
    top = html.split("Throughput and latency")[0]
    for words in ("interrupted", "event loop late by 80 ms", "3 of 200 requests failed (3 x timeout)"):
        assert words in top
    assert "No reason found" not in html


def test_clean_run_says_that_nothing_was_found() -> None:
    assert "No reason found to distrust" in render(sample_run())


def test_levels_in_full_are_sorted_by_load() -> None:
    details = render(sample_run([sample_level(20), sample_level(8), sample_level(100)])).split("Each level in full")[1]
    assert re.findall(r"<summary>concurrency (\d+)", details) == ["8", "20", "100"]


def test_cautions_stand_in_the_verdict_once_per_kind() -> None:
    machine = {"one machine": "shared the 2 cores", "short level": "the level lasted 1.3 s; limit 10 s"}
    levels = [sample_level(10), *(sample_level(load, cautions=machine) for load in (20, 30))]
    assert "(2 more levels too)" in render(sample_run([*levels, sample_level(40, cautions=machine)]))
    top = render(sample_run(levels)).split("Throughput and latency")[0]
    assert '<p class="badge unsure">OK, 2 cautions</p>' in top
    assert "concurrency 20: the level lasted 1.3 s; limit 10 s (1 more level too)" in top
    assert "No reason found to distrust" not in top
    one = render(sample_run([sample_level(10, cautions={"steal": "3 % of the time; limit 2 %"})]))
    assert '<p class="badge unsure">OK, 1 caution</p>' in one
    failed = render(sample_run([sample_level(10, cautions=machine)], verdict="FAILED"))
    assert '<p class="badge bad">FAILED</p>' in failed
    assert "shared the 2 cores" in failed


NEITHER = "The load generator was neither late nor out of CPU."


def test_level_too_short_to_measure_the_client_is_not_said_to_be_measured() -> None:
    short = sample_level(10, client=ClientLoad(cpu_utilization=None))
    assert NEITHER in render(sample_run([sample_level(20)]))
    both = render(sample_run([short, sample_level(20)]))
    words = "concurrency 10: too short to measure whether the load generator was late or out of CPU."
    assert f"{words} In the other levels it was neither." in both
    alone = render(sample_run([short]))
    assert words in alone
    assert "neither" not in alone
    assert "not measured: the level was too short" in alone


def test_text_from_a_server_cannot_become_markup() -> None:
    attack = '<img src=x onerror="alert(1)">'
    bad = sample_level(10, failed=1, failures={attack: 1}, workload=attack)
    html = render(sample_run([bad], notes=[attack], settings={"model": attack}))
    assert "<img" not in html
    assert "&lt;img" in html


@pytest.mark.parametrize(
    "level",
    [
        sample_level(10, timeline=[], steady=None, client=None, accuracy=None, events_per_token=None),
        sample_level(1, ttft_ms=Distribution(), itl_ms=Distribution(), e2e_ms=Distribution(), output_tokens_per_s=0.0),
        sample_level(0, load_kind="open", rate_per_s=12.5, slo={"ttft": 2000.0}, goodput_per_s=11.0),
        sample_level(5, ttft_ms=Distribution(n=20, mean=0.0, min=0.0, max=0.0, p50=0.0)),
    ],
    ids=["little recorded", "all failed", "open loop", "zero latency"],
)
def test_unusual_levels_render(level: object) -> None:
    html = render(sample_run([level]))  # type: ignore[list-item]
    parser = _Balanced()
    parser.feed(html)
    assert parser.open == []


def test_run_without_levels_renders() -> None:
    html = render(sample_run([], command="eval"))
    assert "199 of 200 correct" in html
    assert "<svg" not in html


def test_verb_draws_a_run_folder_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    folder.write_result(sample_run())
    assert main(["report", str(folder.path)]) == 0
    assert folder.report_path.read_text() == render(sample_run())
    assert str(folder.report_path) in capsys.readouterr().out


def test_one_level_alone_gets_no_chart_against_load() -> None:
    html = render(sample_run([sample_level(10)]))
    assert "against load" not in html
    assert len(drawings(html)) == 1


def test_closed_and_open_loops_are_drawn_apart() -> None:
    opened = [sample_level(10, load_kind="open", rate_per_s=rate) for rate in (5.0, 50.0)]
    html = render(sample_run([sample_level(10), sample_level(100), *opened]))
    assert html.count("Concurrent requests") == 4
    assert html.count("Requests per second offered") == 4


def test_no_line_joins_levels_of_different_workloads() -> None:
    levels = [sample_level(n, workload="problems:mixed") for n in (10, 100)]
    levels += [sample_level(n, workload="problems:short") for n in (1000, 10_000)]
    html = render(sample_run(levels))
    throughput = drawings(html)[0]
    assert [len(line.attrib["points"].split()) for line in throughput.iter("polyline")] == [2, 2, 2, 2]
    assert "Lines break where the workload changes" in html
    assert "Lines break" not in render(sample_run())


def test_settings_that_were_not_given_are_left_out() -> None:
    html = render(sample_run([], settings={"model": "m", "quantization": "none", "slo_ms": {}, "num_prompts": []}))
    assert "<dt>model</dt><dd>m</dd><dt>quantization</dt><dd>none</dd></dl>" in html
