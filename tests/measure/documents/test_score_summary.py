"""Totals of a score, and the three expectations with their limits."""

import pytest
from sample_scores import sample_device, sample_health, sample_scored_run

from meltcore.measure.documents.score import GpuScore, MetricRow, Spread, WindowExpectation
from meltcore.measure.documents.values.scores import expectations, totals, totals_line


def judged(*devices: GpuScore) -> list[WindowExpectation]:
    return expectations(sample_scored_run(list(devices)).score)


def device(active: float | None = 94.3, temperature: float = 64.0, **changes: object) -> GpuScore:
    rows = [MetricRow(key="temperature_c", name="GPU temperature", unit="°C", mean=60, maximum=temperature)]
    rows += [MetricRow(key="nvml_utilization_percent", name="NVML utilization", unit="%", mean=99.3)]
    found = sample_device(health=sample_health(metrics=rows), lines=None, **changes)
    if found.sustained is not None and active is not None:
        found.sustained.utilization = {"sm_active_percent": active}
    return found


def spread(variation: float = 0.015, change: float | None = 0.007, drifts: bool = False) -> Spread:
    return Spread(bucket_s=10.0, rates=[1.0], variation=variation, change=change, drifts=drifts)


def test_healthy_run_passes_all_three_and_says_what_was_seen() -> None:
    found = judged(device(spread=spread()))
    assert [each.verdict for each in found] == ["PASS"] * 3
    assert [(each.name, each.expected) for each in found] == [
        ("utilization", "above 90 %"),
        ("temperature", "below 85 °C"),
        ("throughput", "stable"),
    ]
    assert found[0].seen == "94.3 % (NVML GPU utilization 99.3 %, which is not judged)"
    assert found[1].seen == "64 °C"
    assert found[2].seen == "varies by 1.5 %, last third +0.7 %"
    assert "at most 5 % of the mean, last third at most 3 % below" in found[2].rule


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({"active": 90.0}, ["FAIL", "PASS", "PASS"]),
        ({"active": 90.1}, ["PASS", "PASS", "PASS"]),
        ({"active": None}, ["NOT MEASURED", "PASS", "PASS"]),
        ({"temperature": 85.0}, ["PASS", "FAIL", "PASS"]),
        ({"temperature": 84.9}, ["PASS", "PASS", "PASS"]),
        ({"spread": spread(variation=0.051)}, ["PASS", "PASS", "FAIL"]),
        ({"spread": spread(variation=0.05)}, ["PASS", "PASS", "PASS"]),
        ({"spread": spread(change=-0.04, drifts=True)}, ["PASS", "PASS", "FAIL"]),
        ({"spread": spread(change=None)}, ["PASS", "PASS", "NOT MEASURED"]),
        ({"spread": None}, ["PASS", "PASS", "NOT MEASURED"]),
        ({"sustained": None}, ["NOT MEASURED"] * 3),
    ],
)
def test_each_expectation_has_its_limit(changes: dict[str, object], verdicts: list[str]) -> None:
    found = judged(device(**({"spread": spread()} | changes)))  # type: ignore[arg-type]
    assert [each.verdict for each in found] == verdicts


def test_nvml_utilization_never_passes_for_sm_activity() -> None:
    found = judged(device(active=None))[0]
    assert (found.verdict, found.seen) == (
        "NOT MEASURED",
        "not measured (NVML GPU utilization 99.3 %, which is not judged)",
    )


def test_worst_device_counts_and_an_unmeasured_one_prevents_a_pass() -> None:
    cool, hot = device(spread=spread()), device(active=50.0, temperature=91.0, spread=spread(0.2))
    found = judged(cool, hot)
    assert [each.verdict for each in found] == ["FAIL"] * 3
    assert [each.seen.split(" (")[0] for each in found] == ["50.0 %", "91 °C", "varies by 20.0 %, last third +0.7 %"]
    unknown = device(active=None, spread=None)
    assert [each.verdict for each in judged(cool, unknown)] == ["NOT MEASURED", "PASS", "NOT MEASURED"]
    assert judged(hot, unknown)[0].verdict == "FAIL"


def test_totals_are_of_all_windows_of_all_devices() -> None:
    first, second = sample_device(), sample_device(label="GPU 1", sustained=None)
    found = totals(sample_scored_run([first, second], output_tokens_per_s=None).score)
    assert first.sustained is not None
    assert found.sustained_generations == first.sustained.finished
    assert found.generations == 2 * sum(level.finished for level in first.levels) + first.sustained.finished
    assert found.prompt_tokens == 2 * sum(each.prompt_tokens for each in first.levels) + first.sustained.prompt_tokens
    assert found.output_tokens == 2 * sum(each.output_tokens for each in first.levels) + first.sustained.output_tokens
    assert f"Generations: {found.generations:,} completed requests" in totals_line(found)
