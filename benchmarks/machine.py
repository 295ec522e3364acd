"""The GPU as NVML sees it: the name of its result files, and what it spends while an engine works.

Needs only nvidia-ml-py, so that it imports beside any engine.
"""

from __future__ import annotations

import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offline_work import Generate, Work

CLOCK_INTERVAL_S = 0.2
SHORTEST_S = 1.0  # NVML's energy counter moves about every 0.1 s


def machine_name(gpus: Sequence[str], used: int = 1) -> str:
    """The name of a result file: "h200", "h200-x8" for eight of them, "cpu" without a GPU."""
    if not gpus or used == 0:
        return "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower().removeprefix("nvidia ")).strip("-")
    return f"{name}-x{used}" if used > 1 else name


class Reading(NamedTuple):
    """NVML's counters now: energy in joules since the driver was loaded, the SM clock in MHz."""

    joules: float
    clock_mhz: float


class Gpu:
    """The first visible GPU. Raises NVMLError where there is none."""

    def __init__(self) -> None:
        import pynvml  # not every machine has it

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        self._nvml, self._handle = pynvml, by(int(first) if first.isdigit() else first)
        self.name: str = pynvml.nvmlDeviceGetName(self._handle)

    def read(self) -> Reading:
        joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        return Reading(joules, float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)))


class Spent(NamedTuple):
    """What a work took: mean power in W, median SM clock in MHz, and output tokens per joule of the GPU."""

    power_w: float
    clock_mhz: float
    tokens_per_joule: float

    def __str__(self) -> str:
        return f"{self.power_w:.0f} W, {self.clock_mhz:,.0f} MHz, {self.tokens_per_joule:.1f} tokens per joule"


class _Call(NamedTuple):
    requests: int
    out: int
    tokens: int
    seconds: float
    joules: float
    clocks_mhz: list[float]


class Metered:
    """A `generate` that also records the energy of its calls."""

    def __init__(self, generate: Generate, read: Callable[[], Reading]) -> None:
        self._generate, self._read = generate, read
        self._calls: list[_Call] = []

    def __call__(self, prompts: list[list[int]], out: int) -> int:
        clocks: list[float] = []
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(CLOCK_INTERVAL_S):
                clocks.append(self._read().clock_mhz)

        sampler = threading.Thread(target=sample, daemon=True)
        before, started = self._read().joules, time.perf_counter()
        sampler.start()
        try:
            tokens = self._generate(prompts, out)
        finally:
            seconds, joules = time.perf_counter() - started, self._read().joules - before
            ended.set()
            sampler.join(timeout=10)
        self._calls.append(_Call(len(prompts), out, tokens, seconds, joules, clocks))
        return tokens

    def spent(self, work: Work) -> Spent | None:
        """Medians over the calls of a work since the last one that was asked for. None where one was too short."""
        calls = [call for call in self._calls if (call.requests, call.out) == (work.requests, work.out)]
        self._calls.clear()
        if not calls or min(call.seconds for call in calls) < SHORTEST_S:
            return None
        return Spent(
            statistics.median(call.joules / call.seconds for call in calls),
            statistics.median(clock for call in calls for clock in call.clocks_mhz),
            statistics.median(call.tokens / call.joules for call in calls),
        )
