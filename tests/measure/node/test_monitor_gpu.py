"""The monitor with a real driver."""

import time
from pathlib import Path

import pytest

from meltcore.common.gpus.metrics import METRICS, UNKNOWN
from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings
from meltcore.measure.node.monitor.summary import summarize


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_real_gpu_is_sampled_and_judged(tmp_path: Path) -> None:
    with Monitor(SamplerSettings(path=str(tmp_path / "s.jsonl"), gpus="0")) as monitor:
        time.sleep(2.0)
        summary = summarize(monitor.stop())
    assert 15 <= summary.samples <= 21
    needed = [metric.key for metric in METRICS if metric.required]
    assert [key for key in needed if summary.metrics[key].absent == UNKNOWN] == []
    assert (summary.clock_reasons_unknown, summary.xids_unknown) == (0, 0)
    power, energy = summary.metrics["power_w"], summary.metrics["energy_j"]
    assert power.mean is not None
    assert 5 < power.mean < 2000
    if energy.increase is not None:
        assert energy.increase / summary.duration_s == pytest.approx(power.mean, rel=0.5), "watts agree with joules"
