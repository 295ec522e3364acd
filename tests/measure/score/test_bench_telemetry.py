"""From samples to health, energy and time series, on hand-made recordings."""

import pytest
from fake_gpu import HEALTHY

from meltcore.common.gpus.metrics import METRICS, NOT_APPLICABLE, UNKNOWN, Value
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import GpuInfo
from meltcore.measure.node.monitor.recording import Recording, RecordingEnd, RecordingStart
from meltcore.measure.score.assemble import gpu_health, power_w, time_series, total_memory_bytes, utilization

INTERVAL_S = 0.1


def sample(index: int, **values: Value) -> Sample:
    healthy: dict[str, Value] = {metric.key: HEALTHY[metric.key] for metric in METRICS}
    healthy["energy_j"] = 1e6 + 70.0 * index  # 700 W
    return Sample(gpu=0, t_s=100 + INTERVAL_S * index, read_s=0.001, values=healthy | values, clock_reasons=[], xids=[])


def recording(samples: list[Sample], *, mig: bool = False, ended: bool = True) -> Recording:
    gpu = GpuInfo(index=0, name="NVIDIA H200", uuid="GPU-0", architecture=9, mig=mig)
    start = RecordingStart(t_s=100, started="2026-11-21T12:00:00Z", interval_s=INTERVAL_S, driver="580", gpus=[gpu])
    end = RecordingEnd(t_s=200, missed=0, cpu_s=1.0, reason="stopped") if ended else None
    return Recording(start=start, samples=samples, end=end)


RUN = (100.0, 140.0)


def test_power_is_interpolated_between_samples() -> None:
    samples = [sample(index) for index in range(100)]
    assert power_w(recording(samples), 0, 101.03, 107.77) == pytest.approx(700.0)


@pytest.mark.parametrize("window", [(99.0, 105.0), (101.0, 110.5)])
def test_power_is_unknown_beyond_the_samples(window: tuple[float, float]) -> None:
    assert power_w(recording([sample(index) for index in range(100)]), 0, *window) is None


def test_power_of_a_mig_slice_or_without_a_counter_is_unknown() -> None:
    assert power_w(recording([sample(index) for index in range(100)], mig=True), 0, 101, 102) is None
    silent = [sample(index, energy_j=UNKNOWN) for index in range(100)]
    assert power_w(recording(silent), 0, 101, 102) is None


def test_clocks_are_judged_in_the_sustained_window_only() -> None:
    """Levels of different load have different clocks."""
    samples = [sample(index, sm_clock_mhz=1980 if index < 200 else 1750) for index in range(400)]
    assert gpu_health(recording(samples), 0, RUN, (121.0, 140.0)).verdict == "HEALTHY"
    falling = [sample(index, sm_clock_mhz=1980 if index < 300 else 1750) for index in range(400)]
    found = gpu_health(recording(falling), 0, RUN, (121.0, 140.0))
    assert found.verdict == "DEGRADED"
    assert "the SM clock drifted from 1980 to 1750 MHz" in found.reasons[0]


def test_errors_of_the_whole_run_count() -> None:
    samples = [sample(index) for index in range(400)]
    samples[20].xids = [79]
    found = gpu_health(recording(samples), 0, RUN, (121.0, 140.0))
    assert (found.verdict, found.samples) == ("DEGRADED", 400)


def test_incomplete_recording_is_unknown() -> None:
    samples = [sample(index) for index in range(400)]
    found = gpu_health(recording(samples, ended=False), 0, RUN, None)
    assert found.verdict == "UNKNOWN"
    assert found.reasons == ["the sampler did not exit normally: the recording is incomplete"]


def test_nvml_utilization_is_never_judged() -> None:
    samples = [sample(index, nvml_utilization_percent=UNKNOWN) for index in range(400)]
    found = gpu_health(recording(samples), 0, RUN, None)
    assert found.verdict == "HEALTHY"
    row = next(row for row in found.metrics if row.key == "nvml_utilization_percent")
    assert (row.absent, "never judged" in row.note) == (UNKNOWN, True)


def test_time_series_are_means_of_buckets_with_gaps() -> None:
    samples = [sample(index, power_w=100.0 * (index // 10), tensor_percent=NOT_APPLICABLE) for index in range(30)]
    del samples[10:20]
    found = time_series(samples, 100.0, 4, 1.0)
    assert found["power_w"] == [0.0, None, 200.0, None]
    assert "tensor_percent" not in found


def test_memory_is_the_gpus_or_shared_with_the_host() -> None:
    assert total_memory_bytes([sample(0)], 5) == HEALTHY["memory_total_bytes"]
    assert total_memory_bytes([sample(0, memory_total_bytes=NOT_APPLICABLE)], 5) == 5
    assert total_memory_bytes([sample(0, memory_total_bytes=UNKNOWN)], 5) is None


def test_utilization_is_the_mean_of_the_window_without_unreadable_metrics() -> None:
    samples = [
        sample(index, sm_active_percent=float(index), tensor_percent=UNKNOWN if index % 2 else 30.0,
               dram_bandwidth_percent=NOT_APPLICABLE, nvml_utilization_percent=100)
        for index in range(30)
    ]  # fmt: skip
    found = utilization(recording(samples), 0, 100.95, 102.05)
    expected = {"sm_active_percent": 15.0, "tensor_percent": 30.0, "nvml_utilization_percent": 100.0}
    assert found == pytest.approx(expected)
    assert list(found) == list(expected)
    assert utilization(recording(samples), 0, 200.0, 201.0) == {}
