"""What a GPU spends on a work, by counters that a fake NVML reads."""

from __future__ import annotations

import time
from types import SimpleNamespace

import machine
import pytest
from machine import Metered, Reading
from offline_work import Work

WORK = Work(3, 8, 8, 10)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which a generator moves on."""
    now_s = [0.0]
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    return now_s


def meter(clock: list[float], seconds: list[float], watts: float = 500.0) -> Metered:
    """Calls take `seconds` each, at a constant power."""
    durations = iter(seconds)

    def generate(prompts: list[list[int]], out: int) -> int:
        time.sleep(0.05)  # the sampler has its own thread
        clock[0] += next(durations)
        return len(prompts) * out

    return Metered(generate, lambda: Reading(clock[0] * watts, 1_700.0))


def run(metered: Metered, work: Work) -> int:
    return metered([[1]] * work.requests, work.out)


def test_power_and_tokens_per_joule_are_medians_of_the_calls(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CLOCK_INTERVAL_S", 0.001)
    metered = meter(clock, [1.0, 2.0, 4.0, 3.0])
    metered([[1]] * 3, 8)  # a warm-up has other output tokens
    assert [run(metered, WORK) for _ in range(3)] == [30] * 3
    spent = metered.spent(WORK)
    assert spent is not None
    assert (spent.power_w, spent.clock_mhz) == (500.0, 1_700.0)
    assert spent.tokens_per_joule == 30 / (3.0 * 500.0)
    assert metered.spent(WORK) is None, "these calls were read before"


def test_call_shorter_than_the_counter_resolves_has_no_power(clock: list[float]) -> None:
    metered = meter(clock, [2.0, 0.9])
    run(metered, WORK)
    run(metered, WORK)
    assert metered.spent(WORK) is None
