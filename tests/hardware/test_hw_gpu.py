"""The seam against a real driver."""

import time
from pathlib import Path

import pytest

from meltcore.hardware.metrics import METRICS, UNKNOWN
from meltcore.hardware.monitor import Monitor
from meltcore.hardware.sampler import Setup
from meltcore.hardware.summary import summarise


@pytest.mark.gpu
def test_a_real_gpu_is_sampled_and_can_be_judged(tmp_path: Path) -> None:
    with Monitor(Setup(path=str(tmp_path / "s.jsonl"), gpus="0")) as monitor:
        time.sleep(2.0)
        summary = summarise(monitor.stop())
    assert 15 <= summary.samples <= 21
    needed = [metric.key for metric in METRICS if metric.judged]
    assert [key for key in needed if summary.metrics[key].absent == UNKNOWN] == []
    assert (summary.clock_reasons_unknown, summary.xids_unknown) == (0, 0)
    power, energy = summary.metrics["power_w"], summary.metrics["energy_j"]
    assert power.mean is not None
    assert 5 < power.mean < 2000
    if energy.increase is not None:
        assert energy.increase / summary.duration_s == pytest.approx(power.mean, rel=0.5), "watts agree with joules"
