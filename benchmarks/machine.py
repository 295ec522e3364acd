"""The GPU as NVML sees it: the name of its result files, and what it spends while an engine works.

Needs only nvidia-ml-py, so that it imports beside any engine.
"""

from __future__ import annotations

import os
import re
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class EnergyMeter:
    """Watches one GPU while a work is measured. A thread reads its clock."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._calls: list[tuple[int, float, float]] = []  # tokens, seconds, joules
        self._clocks_mhz: list[float] = []

    def begin(self) -> None:
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._before = self._read().joules
        self._sampler.start()

    def end(self, tokens: int, seconds: float) -> None:
        joules = self._read().joules - self._before
        self._ended.set()
        self._sampler.join(timeout=10)
        self._calls.append((tokens, seconds, joules))

    def spent(self) -> Spent | None:
        """Medians over the calls since the last one that was asked for. None where one was too short."""
        calls, clocks = self._calls, self._clocks_mhz
        self._calls, self._clocks_mhz = [], []
        if not calls or min(seconds for _, seconds, _ in calls) < SHORTEST_S:
            return None
        return Spent(
            statistics.median(joules / seconds for _, seconds, joules in calls),
            statistics.median(clocks),
            statistics.median(tokens / joules for tokens, _, joules in calls),
        )

    def _sample(self) -> None:
        while not self._ended.wait(CLOCK_INTERVAL_S):
            self._clocks_mhz.append(self._read().clock_mhz)
