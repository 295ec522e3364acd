"""From samples to health, energy and time lines, on recordings made by hand."""

import pytest

from meltcore.bench.telemetry import health, lines, power_w, total_memory_bytes
from meltcore.hardware.fake import HEALTHY
from meltcore.hardware.metrics import METRICS, NOT_APPLICABLE, UNKNOWN, Value
from meltcore.hardware.recording import End, GpuInfo, Recording, Sample, Start

INTERVAL_S = 0.1


def sample(place: int, **values: Value) -> Sample:
    healthy: dict[str, Value] = {metric.key: HEALTHY[metric.key] for metric in METRICS}
    healthy["energy_j"] = 1e6 + 70.0 * place  # 700 W
    return Sample(gpu=0, t_s=100 + INTERVAL_S * place, read_s=0.001, values=healthy | values, clock_reasons=[], xids=[])


def recording(samples: list[Sample], *, mig: bool = False, ended: bool = True) -> Recording:
    gpu = GpuInfo(index=0, name="NVIDIA H200", uuid="GPU-0", architecture=9, mig=mig)
    start = Start(t_s=100, started="2026-11-21T12:00:00Z", interval_s=INTERVAL_S, driver="580", gpus=[gpu])
    end = End(t_s=200, late=0, cpu_s=1.0, why="asked") if ended else None
    return Recording(start=start, samples=samples, end=end)


RUN = (100.0, 140.0)


def test_power_is_the_energy_between_two_moments_that_need_not_be_samples() -> None:
    samples = [sample(place) for place in range(100)]
    assert power_w(recording(samples), 0, 101.03, 107.77) == pytest.approx(700.0)


@pytest.mark.parametrize("window", [(99.0, 105.0), (101.0, 110.5)])
def test_power_is_not_guessed_beyond_the_samples(window: tuple[float, float]) -> None:
    assert power_w(recording([sample(place) for place in range(100)]), 0, *window) is None


def test_power_of_a_slice_or_without_a_counter_is_not_measured() -> None:
    assert power_w(recording([sample(place) for place in range(100)], mig=True), 0, 101, 102) is None
    silent = [sample(place, energy_j=UNKNOWN) for place in range(100)]
    assert power_w(recording(silent), 0, 101, 102) is None


def test_clocks_are_judged_in_the_sustained_window_alone() -> None:
    """A level of little load may well run at another clock than a level of much."""
    samples = [sample(place, sm_clock_mhz=1980 if place < 200 else 1750) for place in range(400)]
    assert health(recording(samples), 0, RUN, (121.0, 140.0)).verdict == "HEALTHY"
    falling = [sample(place, sm_clock_mhz=1980 if place < 300 else 1750) for place in range(400)]
    found = health(recording(falling), 0, RUN, (121.0, 140.0))
    assert found.verdict == "DEGRADED"
    assert "the SM clock drifted from 1980 to 1750 MHz" in found.reasons[0]


def test_errors_count_from_the_whole_run() -> None:
    samples = [sample(place) for place in range(400)]
    samples[20].xids = [79]
    found = health(recording(samples), 0, RUN, (121.0, 140.0))
    assert (found.verdict, found.samples) == ("DEGRADED", 400)


def test_a_recording_that_stops_short_is_unknown() -> None:
    samples = [sample(place) for place in range(400)]
    found = health(recording(samples, ended=False), 0, RUN, None)
    assert found.verdict == "UNKNOWN"
    assert found.reasons == ["the sampler did not end in order: the recording stops short"]


def test_nvml_utilization_is_never_judged() -> None:
    samples = [sample(place, nvml_utilization_percent=UNKNOWN) for place in range(400)]
    found = health(recording(samples), 0, RUN, None)
    assert found.verdict == "HEALTHY"
    row = next(row for row in found.metrics if row.key == "nvml_utilization_percent")
    assert (row.absent, "never judged" in row.note) == (UNKNOWN, True)


def test_lines_are_means_of_buckets_with_holes_where_nothing_was_read() -> None:
    samples = [sample(place, power_w=100.0 * (place // 10), tensor_percent=NOT_APPLICABLE) for place in range(30)]
    del samples[10:20]
    found = lines(samples, 100.0, 4, 1.0)
    assert found["power_w"] == [0.0, None, 200.0, None]
    assert "tensor_percent" not in found


def test_memory_is_the_gpus_or_the_hosts_where_they_share_it() -> None:
    assert total_memory_bytes([sample(0)], 5) == HEALTHY["memory_total_bytes"]
    assert total_memory_bytes([sample(0, memory_total_bytes=NOT_APPLICABLE)], 5) == 5
    assert total_memory_bytes([sample(0, memory_total_bytes=UNKNOWN)], 5) is None
