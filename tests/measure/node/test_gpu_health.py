"""Summary and verdict, from samples made by hand."""

from collections.abc import Mapping

import pytest
from hardware_tools import INTERVAL_S, run_of, sample

from meltcore.common.gpus.metrics import METRICS, NOT_APPLICABLE, UNKNOWN, Value
from meltcore.common.gpus.reader import Sample
from meltcore.measure.node.monitor.summary import HealthReport, judge_health, summarize


def verdict(samples: list[Sample]) -> HealthReport:
    return judge_health(summarize(samples), INTERVAL_S)


def with_one(
    values: Mapping[str, Value] | None = None, count: int = 100, at: int = 50, **others: object
) -> list[Sample]:
    """A healthy run whose sample `at` differs."""
    samples = run_of(count)
    samples[at] = sample(at, values, **others)
    return samples


def stepping(key: str, before: float, after: float, count: int = 100) -> list[Sample]:
    return [sample(index, {key: before if index < count // 2 else after}) for index in range(count)]


def test_levels_have_mean_and_maximum_and_counters_have_increase() -> None:
    levels = [
        sample(index, {"power_w": power, "energy_j": 1000 + index * 60}) for index, power in enumerate((600, 700, 650))
    ]
    summary = summarize(levels)
    assert (summary.metrics["power_w"].mean, summary.metrics["power_w"].maximum) == (650, 700)
    assert summary.metrics["energy_j"].increase == 120
    assert summary.metrics["energy_j"].mean is None
    assert (summary.samples, summary.duration_s) == (3, pytest.approx(0.2))


def test_unreadable_values_are_counted_and_left_out_of_mean() -> None:
    values: list[Value] = [UNKNOWN, 40, 60, NOT_APPLICABLE]
    temperature = summarize([sample(n, {"temperature_c": value}) for n, value in enumerate(values)]).metrics[
        "temperature_c"
    ]
    assert (temperature.mean, temperature.readable, temperature.unknown) == (50, 2, 1)
    assert temperature.absent is None


def test_metric_without_numbers_has_a_reason() -> None:
    summary = summarize(run_of(3, values={"ecc_corrected": NOT_APPLICABLE, "power_w": UNKNOWN}))
    assert summary.metrics["ecc_corrected"].absent == NOT_APPLICABLE
    assert summary.metrics["power_w"].absent == UNKNOWN


def test_clock_reasons_are_counted() -> None:
    samples = [sample(0), sample(1, clock_reasons=["SW_POWER_CAP"]), sample(2, clock_reasons=UNKNOWN)]
    summary = summarize(samples)
    assert (summary.clock_reasons, summary.clock_reasons_unknown) == ({"SW_POWER_CAP": 1}, 1)


def test_quiet_run_is_healthy() -> None:
    assert verdict(run_of(100)) == HealthReport(verdict="HEALTHY", reasons=[])


def test_power_cap_is_healthy() -> None:
    assert verdict(run_of(100, clock_reasons=["SW_POWER_CAP"])).verdict == "HEALTHY"


@pytest.mark.parametrize("kind", ["corrected", "uncorrected"])
def test_only_new_ecc_errors_degrade(kind: str) -> None:
    assert verdict(run_of(100, values={f"ecc_{kind}": 12})).verdict == "HEALTHY"
    found = verdict(stepping(f"ecc_{kind}", 12, 14))
    assert found == HealthReport(verdict="DEGRADED", reasons=[f"2 new ECC errors, {kind}"])


def test_ecc_errors_are_found_across_unreadable_samples() -> None:
    samples = stepping("ecc_uncorrected", 0, 1)
    samples[50] = sample(50, {"ecc_uncorrected": UNKNOWN})
    assert verdict(samples).reasons == ["1 new ECC error, uncorrected"]


def test_xid_degrades_and_is_named() -> None:
    found = verdict(with_one(xids=[31, 31, 200]))
    assert found == HealthReport(
        verdict="DEGRADED", reasons=["XID 31 (a program's bad memory access) x 2", "XID 200 x 1"]
    )


@pytest.mark.parametrize("reason", ["HW_SLOWDOWN", "HW_THERMAL_SLOWDOWN", "HW_POWER_BRAKE", "SW_THERMAL_SLOWDOWN"])
def test_slowdown_degrades(reason: str) -> None:
    found = verdict(with_one(clock_reasons=["SW_POWER_CAP", reason]))
    assert found == HealthReport(verdict="DEGRADED", reasons=[f"{reason} in 1 of 100 samples"])


def test_slowdown_between_two_samples_degrades() -> None:
    found = verdict(stepping("hw_thermal_slowdown_s", 5.0, 5.012))
    assert found == HealthReport(verdict="DEGRADED", reasons=["hardware thermal slowdown for 0.012 s in total"])


def test_falling_clock_under_load_degrades() -> None:
    found = verdict(stepping("sm_clock_mhz", 1980, 1410, count=200))
    assert found.verdict == "DEGRADED"
    assert found.reasons == ["the SM clock drifted from 1980 to 1410 MHz under load, without a power cap"]


def test_boost_step_power_cap_idle_and_short_run_are_no_drift() -> None:
    assert verdict(stepping("sm_clock_mhz", 1980, 1920, count=200)).verdict == "HEALTHY"
    assert verdict(stepping("sm_clock_mhz", 1980, 1410, count=40)).verdict == "HEALTHY"
    falling = [(index, {"sm_clock_mhz": 1980 - 5 * index}) for index in range(200)]
    assert verdict([sample(n, values, clock_reasons=["SW_POWER_CAP"]) for n, values in falling]).verdict == "HEALTHY"
    assert verdict([sample(n, values, clock_reasons=["GPU_IDLE"]) for n, values in falling]).verdict == "HEALTHY"
    unloaded = [sample(n, {**values, "sm_active_percent": 3}) for n, values in falling]
    assert verdict(unloaded).verdict == "HEALTHY"


def test_lost_gpu_degrades() -> None:
    gone: dict[str, Value] = dict.fromkeys((metric.key for metric in METRICS), UNKNOWN)
    samples = [*run_of(10), sample(10, gone, lost=True, clock_reasons=UNKNOWN)]
    found = verdict(samples)
    assert found.verdict == "DEGRADED"
    assert found.reasons == ["the GPU was lost: it fell off the bus, or the driver gave up on it"]


@pytest.mark.parametrize(
    ("values", "others", "reason"),
    [
        ({"ecc_uncorrected": UNKNOWN}, {}, "ECC errors, uncorrected: unreadable in 100 of 100 samples"),
        ({"sm_clock_mhz": UNKNOWN}, {}, "SM clock: unreadable in 100 of 100 samples"),
        ({}, {"clock_reasons": UNKNOWN}, "clock reasons: unreadable in 100 of 100 samples"),
        ({}, {"xids": UNKNOWN}, "XID errors: unreadable in 100 of 100 samples"),
    ],
)
def test_unreadable_required_metric_is_unknown(
    values: dict[str, Value], others: dict[str, object], reason: str
) -> None:
    assert verdict(run_of(100, values=values, **others)) == HealthReport(verdict="UNKNOWN", reasons=[reason])


def test_not_applicable_metrics_are_neutral() -> None:
    none = {metric.key: NOT_APPLICABLE for metric in METRICS if metric.feature is not None}
    assert verdict(run_of(100, values=none)).verdict == "HEALTHY"


def test_rare_unreadable_sample_stays_healthy() -> None:
    assert verdict(with_one({"ecc_corrected": UNKNOWN})).verdict == "HEALTHY"


def test_nvml_utilization_is_never_judged() -> None:
    for value in (0, 100, UNKNOWN):
        assert verdict(run_of(100, values={"nvml_utilization_percent": value})).verdict == "HEALTHY"


def test_event_outweighs_unreadable_metric_and_both_are_listed() -> None:
    found = verdict(run_of(100, values={"ecc_corrected": UNKNOWN}, xids=[79]))
    assert found.verdict == "DEGRADED"
    assert found.reasons[0].startswith("XID 79")
    assert found.reasons[1].startswith("ECC errors, corrected: unreadable")


def test_no_sample_and_gap_in_samples_are_unknown() -> None:
    assert verdict([]) == HealthReport(verdict="UNKNOWN", reasons=["no sample was taken"])
    holed = [*run_of(50), *(sample(index) for index in range(80, 120))]
    assert verdict(holed) == HealthReport(verdict="UNKNOWN", reasons=["no sample for 3.1 s"])
    slow = [sample(index, t_s=index * 5.0) for index in range(10)]
    assert judge_health(summarize(slow), 5.0).verdict == "HEALTHY", "samples meant to be far apart are no hole"


def test_driver_that_answers_late_or_not_at_all_is_a_finding() -> None:
    values: dict[str, Value] = {metric.key: UNKNOWN for metric in METRICS}
    late = verdict(with_one(read_s=5.25))
    assert (late.verdict, late.reasons) == ("DEGRADED", ["the driver took 5.2 s to answer about it (limit 4 s)"])
    hung = verdict([*run_of(100), sample(101, values, read_s=12.0, clock_reasons=UNKNOWN, hung=True)])
    assert hung.verdict == "DEGRADED"
    assert hung.reasons[0] == "the driver took 12.0 s to answer about it (limit 4 s), and has not answered since"
    assert verdict(with_one(read_s=3.0)).verdict == "HEALTHY", "waking a GPU takes as long"
