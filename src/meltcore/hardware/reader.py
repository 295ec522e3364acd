"""One GPU, read once: every metric as a number, NOT_APPLICABLE or UNKNOWN."""

import math
import time
from collections.abc import Callable, Sequence

import pynvml
from pynvml import NVMLError

from meltcore.hardware.gpm import GpmWindow
from meltcore.hardware.metrics import BY_KEY, NOT_APPLICABLE, UNKNOWN, Absent, Metric, Value
from meltcore.hardware.nvml import Nvml, Reading
from meltcore.hardware.products import Product, lacks
from meltcore.hardware.recording import Sample
from meltcore.hardware.select import Gpu
from meltcore.hardware.throttle import words

_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND)

# Field ids with what turns their unit into ours.
FIELDS: dict[str, tuple[int, float]] = {
    "memory_temperature_c": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 1.0),
    "power_w": (pynvml.NVML_FI_DEV_POWER_INSTANT, 1e-3),
    "energy_j": (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 1e-3),
    # Time spent slowed down, in ns: these miss nothing, where the reasons are only those of the moment.
    "sw_thermal_slowdown_s": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, 1e-9),
    "hw_thermal_slowdown_s": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, 1e-9),
    "hw_power_brake_s": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, 1e-9),
}

Question = Callable[[], Sequence[Reading]]


class GpuReader:
    """Reads one GPU over and over. What never changes is read once, here."""

    def __init__(self, nvml: Nvml, gpu: Gpu) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._gpm = GpmWindow(nvml, gpu)
        self._gpm.read(time.monotonic())  # opens the first window
        self._link_max = _ask(lambda: nvml.pcie_link_max(gpu.board), 2)

    def read(self, position: int, xids: list[int] | Absent) -> Sample:
        """A sample of now. `position` is the GPU's in the recording; `xids` are the watch's news of it."""
        began_s = time.monotonic()
        window, window_s = self._gpm.read(began_s)
        readings = {**self._board_readings(), **window}
        reasons = self._clock_reasons()
        lost = any(isinstance(reading, NVMLError) and reading.value in _LOST for reading in readings.values())
        return Sample(
            t_s=began_s,
            gpu=position,
            read_s=time.monotonic() - began_s,
            values={key: _value(BY_KEY[key], readings[key], self._gpu.info.product) for key in BY_KEY},
            clock_reasons=reasons,
            xids=xids,
            gpm_window_s=window_s,
            lost=lost,
        )

    def _board_readings(self) -> dict[str, Reading]:
        nvml, board = self._nvml, self._gpu.board
        questions: tuple[tuple[tuple[str, ...], Question], ...] = (
            (("temperature_c",), lambda: (nvml.temperature_c(board),)),
            (("sm_clock_mhz",), lambda: (nvml.sm_clock_mhz(board),)),
            (("memory_clock_mhz",), lambda: (nvml.memory_clock_mhz(board),)),
            (("memory_used_bytes", "memory_total_bytes"), lambda: nvml.memory_bytes(self._gpu.handle)),
            (("ecc_corrected",), lambda: (nvml.ecc_errors(board, uncorrected=False),)),
            (("ecc_uncorrected",), lambda: (nvml.ecc_errors(board, uncorrected=True),)),
            (("pcie_generation", "pcie_width"), lambda: nvml.pcie_link(board)),
            (("pcie_replays",), lambda: (nvml.pcie_replays(board),)),
            (("nvml_utilization_percent",), lambda: (nvml.utilization_percent(self._gpu.handle),)),
            (tuple(FIELDS), lambda: _scaled(nvml.fields(board, [field for field, _ in FIELDS.values()]))),
        )
        readings: dict[str, Reading] = dict(zip(("pcie_generation_max", "pcie_width_max"), self._link_max, strict=True))
        for keys, question in questions:
            readings.update(zip(keys, _ask(question, len(keys)), strict=True))
        return readings

    def _clock_reasons(self) -> list[str] | Absent:
        try:
            return words(self._nvml.clock_reasons(self._gpu.board))
        except NVMLError:
            return UNKNOWN  # every product gives reasons


def _ask(question: Question, answers: int) -> Sequence[Reading]:
    try:
        return question()
    except NVMLError as error:
        return (error,) * answers


def _scaled(readings: Sequence[Reading]) -> list[Reading]:
    scales = (scale for _, scale in FIELDS.values())
    return [
        reading if isinstance(reading, NVMLError) else reading * scale
        for reading, scale in zip(readings, scales, strict=True)
    ]


def _value(metric: Metric, reading: Reading, product: Product) -> Value:
    if not isinstance(reading, NVMLError):
        return reading if math.isfinite(reading) else UNKNOWN
    unsupported = reading.value == pynvml.NVML_ERROR_NOT_SUPPORTED
    if unsupported and metric.feature is not None and lacks(product, metric.feature):
        return NOT_APPLICABLE
    return UNKNOWN
