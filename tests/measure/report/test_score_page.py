"""The page of a GPU score: the number first, every doubt shown, nothing fetched."""

import re

import pytest
from sample_scores import sample_device, sample_health, sample_score_level, sample_scored_run

from meltcore.measure.documents.score import ScoredRun, Spread
from meltcore.measure.documents.values.percentiles import distribution
from meltcore.measure.report.render import render
from meltcore.measure.report.scores.score import format_percentile_ms, gpu_timeline_figure, score_charts


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html.split("</style>")[1]).split())


def test_number_stands_with_what_it_is_a_number_of() -> None:
    page = words(render(sample_scored_run()))
    assert "NVIDIA H200 32,000 output tokens per second gpu-score/1" in page
    assert "Qwen/Qwen3-0.6B · bfloat16 · dummy weights · engine 0.1.0+1f2e3d4c" in page
    assert "HEALTHY" in page
    assert "Tokens per joule 48.5" in page
    assert "NOT COMPARABLE" not in page


@pytest.mark.parametrize(("value_ms", "text"), [(9_999.0, "9,999 ms"), (10_000.0, "10.0 s"), (32_906.0, "32.9 s")])
def test_long_waits_stand_in_seconds(value_ms: float, text: str) -> None:
    assert format_percentile_ms(distribution([value_ms] * 200), "p50") == text


def test_wait_in_a_queue_is_called_one() -> None:
    assert "queueing" not in words(render(sample_scored_run()))
    device = sample_device(sustained=sample_score_level(10_000, 120.0, 165.0))
    assert re.search(r"TTFT p50 [^ ]+ m?s p99 [^ ]+ m?s, queueing", words(render(sample_scored_run([device]))))


def test_what_the_gpu_did_meanwhile_stands_in_a_line() -> None:
    health = sample_health(xids=[], clock_reasons={"SW_POWER_CAP": 1.0})
    page = words(render(sample_scored_run([sample_device(health=health)])))
    assert "In the sustained window: 655 W (at most 699), 58.2 °C (at most 61), clocks held by the power limit" in page
    assert "XID errors none in the whole run" in page
    unseen = words(render(sample_scored_run([sample_device(health=sample_health(xids=[74, 13]))])))
    assert "XID errors 74, 13 in the whole run" in unseen
    assert "XID errors" not in words(render(sample_scored_run([sample_device(health=sample_health(xids=None))])))


def test_nothing_is_fetched_and_no_script_runs() -> None:
    html = render(sample_scored_run())
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", html)


def test_score_that_compares_with_nothing_says_so_first() -> None:
    spread = Spread(bucket_s=10.0, rates=[20.0, 40.0], variation=0.3, change=-0.1)
    device = sample_device(name="Example CPU", label="CPU", uuid=None, health=None, spread=spread)
    device.engine_settings["device"] = "cpu"
    html = render(sample_scored_run([device], not_comparable=["measured on a CPU: the score is one of GPUs"]))
    page = words(html)
    assert "Throughput on the CPU: varies by 30.0 %, last third -10.0 %." in page
    assert not re.search("FAIL|NOT MEASURED|expected", page)
    assert page.index("NOT COMPARABLE: this number ranks with no other") < page.index("The ladder")
    assert '<p class="badge unsure">NOT COMPARABLE</p>' in html


@pytest.mark.parametrize(("verdict", "style"), [("DEGRADED", "bad"), ("UNKNOWN", "unsure"), ("HEALTHY", "good")])
def test_health_and_its_reasons_are_shown(verdict: str, style: str) -> None:
    health = sample_health(verdict=verdict, reasons=["HW_THERMAL_SLOWDOWN in 812 of 2950 samples"])
    html = render(sample_scored_run([sample_device(health=health)]))
    assert f'<p class="badge {style}">{verdict}</p>' in html
    assert "HW_THERMAL_SLOWDOWN in 812 of 2950 samples" in html


def test_utilization_is_shown_never_judged_and_the_page_says_why() -> None:
    page = words(render(sample_scored_run()))
    assert "NVML utilization shown, never judged 100 100 %" in page
    assert "a single thread on a single SM makes it 100 %" in page
    assert "NVLink sent NOT_APPLICABLE" in page


def test_run_that_failed_shows_why_and_no_number() -> None:
    device = sample_device(sustained=None, spread=None, failure="the engine ended by signal 9")
    result = sample_scored_run([device])
    result.verdict, result.reasons = "FAILED", ["GPU 0: the engine ended by signal 9"]
    html = render(result)
    assert "no score" in words(html)
    assert "<title>no score" in html
    assert '<p class="badge bad">FAILED</p>' in html
    assert html.count("the engine ended by signal 9") == 2


def test_devices_that_never_began_leave_a_page_too() -> None:
    device = sample_device(levels=[], sustained=None, spread=None, health=None, lines=None, failure="no memory")
    assert "no memory" in words(render(sample_scored_run([device])))


def test_several_gpus_add_up_and_each_has_its_time_figure() -> None:
    result = sample_scored_run([sample_device(30_000.0), sample_device(28_000.0, "GPU 1")])
    html = render(result)
    assert "2 × NVIDIA H200" in html
    assert "57,999" in words(html)
    assert html.count("the whole run over time") == 2


def test_time_lines_break_where_nothing_was_read() -> None:
    whole, holed = sample_device(), sample_device()
    assert whole.lines is not None
    assert holed.lines is not None
    whole.lines.values["sm_clock_mhz"] = [1980.0] * len(whole.lines.values["sm_clock_mhz"])
    assert str(gpu_timeline_figure(holed)).count("<polyline") == str(gpu_timeline_figure(whole)).count("<polyline") + 1


def test_what_a_product_does_not_count_has_no_strip() -> None:
    device = sample_device()
    assert device.lines is not None
    for key in [key for key in device.lines.values if key.endswith("_percent")]:
        del device.lines.values[key]
    drawn = str(gpu_timeline_figure(device))
    assert "power, W" in drawn
    assert "SM active" not in drawn


def test_utilization_stands_beside_the_throughput_and_nvmls_own_is_named_for_what_it_is() -> None:
    device = sample_device()
    for level in device.levels:
        level.utilization = {"sm_active_percent": 90.0, "nvml_utilization_percent": 99.0}
    throughput, panel = score_charts([device])[:2]
    assert (throughput.title, panel.title) == ("Output tokens per second", "Utilization")
    assert panel.legend == [
        ("SM active", 1, False),
        ("DRAM bandwidth", 2, False),
        ("tensor cores", 3, False),
        ("any kernel ran (NVML)", 4, True),
    ]
    assert "concurrency 400: any kernel ran (NVML) 99.0 %" in panel.chart
    assert "one thread makes it 100 %" in panel.note
    page = words(render(sample_scored_run([device])))
    assert re.search(r"10 3,365 90.0 \S+ \S+ 99.0 100 ", page)
    assert re.search(r"1,000 sustained 32,000 \S+ \S+ \S+ 100 ", page), "of the telemetry of its window"


def test_utilization_of_older_results_is_the_mean_of_whole_seconds_within_the_window() -> None:
    device = sample_device()
    level = device.levels[3]
    assert device.lines is not None
    values: list[float | None] = [0.0] * len(device.lines.values["power_w"])
    first = int(level.start_s + level.ramp_s) + 1
    values[first : int(level.end_s)] = [50.0, None, *[80.0] * (int(level.end_s) - first - 2)]
    device.lines.values["tensor_percent"] = values
    mean = (50 + 80 * (int(level.end_s) - first - 2)) / (int(level.end_s) - first - 1)
    assert device.mean_utilization(level, "tensor_percent") == pytest.approx(mean)
    assert device.mean_utilization(level, "nvml_utilization_percent") is None
    level.utilization = {"tensor_percent": 12.5}
    assert device.mean_utilization(level, "tensor_percent") == 12.5


def test_device_without_readings_has_no_utilization() -> None:
    device = sample_device(lines=None, health=None)
    assert "Utilization" not in [figure.title for figure in score_charts([device])]
    assert "any kernel ran (NVML)" not in words(render(sample_scored_run([device])))


def test_summary_counts_generations_and_judges_three_expectations() -> None:
    page = words(render(sample_scored_run()))
    assert re.search(r"Generations: 57,8\d\d completed requests \(40,2\d\d in the sustained window\)", page)
    assert "PASS temperature – expected below 85 °C: seen 61 °C" in page
    assert "FAIL utilization – expected above 90 %: seen 90.0 % (NVML" in page
    assert "PASS throughput – expected stable: seen varies by 0.4 %, last third -0.1 %" in page
    assert "throughput: rates of intervals of 10 s in the sustained window: standard deviation at most 5 %" in page
    nothing = sample_device(levels=[], sustained=None, spread=None, health=None, lines=None, failure="no memory")
    assert "Generations" not in words(render(sample_scored_run([nothing])))


def test_names_from_outside_are_escaped() -> None:
    result: ScoredRun = sample_scored_run([sample_device(name="<b>H200</b>")])
    assert "<b>H200" not in render(result)
