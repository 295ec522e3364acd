"""What a GPU spends on a work, by counters that a fake NVML reads."""

from __future__ import annotations

import time

import machine
import pytest
from machine import EnergyMeter, Reading
from offline_work import Work, measure

WORK = Work(3, 8, 8, 10)
POWER_W = 500.0


class FakeGpu:
    """At a constant power, on a clock that a generator moves on."""

    now_s = 0.0

    def read(self) -> Reading:
        return Reading(self.now_s * POWER_W, 1_700.0)


def run(meter: EnergyMeter, gpu: FakeGpu, seconds: float) -> None:
    meter.begin()
    gpu.now_s += seconds
    time.sleep(0.05)  # the sampler has its own thread
    meter.end(30, seconds)


def test_power_and_tokens_per_joule_are_medians_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CLOCK_INTERVAL_S", 0.001)
    gpu = FakeGpu()
    meter = EnergyMeter(gpu.read)
    for seconds in (2.0, 4.0, 3.0):
        run(meter, gpu, seconds)
    spent = meter.spent()
    assert spent is not None
    assert (spent.power_w, spent.clock_mhz) == (POWER_W, 1_700.0)
    assert spent.tokens_per_joule == 30 / (3.0 * POWER_W)
    assert meter.spent() is None, "these calls were read before"


def test_call_shorter_than_the_counter_resolves_has_no_power() -> None:
    gpu = FakeGpu()
    meter = EnergyMeter(gpu.read)
    for seconds in (2.0, 0.9):
        run(meter, gpu, seconds)
    assert meter.spent() is None


def test_meter_takes_no_time_of_the_work() -> None:
    """Reading the counter takes 0.2 s here, generating none."""

    def read() -> Reading:
        time.sleep(0.2)
        return Reading(0.0, 0.0)

    [measured] = measure([WORK], lambda prompts, out: len(prompts) * out, 2, 1, 300, meter=EnergyMeter(read))
    assert min(measured.rates) > 30 / 0.1
