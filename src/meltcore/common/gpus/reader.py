"""Reads one GPU. Each metric is a number, NOT_APPLICABLE or UNKNOWN."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pynvml
from pynvml import NVMLError

from meltcore.common.gpus.driver import Nvml, Reading
from meltcore.common.gpus.gpu_types import Feature, GpuType, lacks_feature
from meltcore.common.gpus.metrics import (
    METRIC_BY_KEY,
    NOT_APPLICABLE,
    UNKNOWN,
    Absent,
    GpuMetric,
    Value,
    clock_reason_names,
)
from meltcore.common.gpus.select import GpuDevice

_LOST_ERRORS = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND)

# NVML field ids, each with the factor from NVML's unit to the metric's.
FIELDS: dict[str, tuple[int, float]] = {
    "memory_temperature_c": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 1.0),
    "power_w": (pynvml.NVML_FI_DEV_POWER_INSTANT, 1e-3),
    "energy_j": (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 1e-3),
    # Nanoseconds slowed down. The counters miss nothing; the clock reasons are those of one moment.
    "sw_thermal_slowdown_s": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, 1e-9),
    "hw_thermal_slowdown_s": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, 1e-9),
    "hw_power_brake_s": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, 1e-9),
}

# GPM readings closer together than this give unreliable means (NVML API reference, GPM).
MIN_GPM_WINDOW_S = 0.1
GPM_METRIC_IDS: dict[str, int] = {
    "sm_active_percent": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_percent": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor_percent": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_bandwidth_percent": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "pcie_tx_mib_per_s": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_rx_mib_per_s": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_tx_mib_per_s": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_rx_mib_per_s": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}


class Sample(msgspec.Struct, kw_only=True, tag="sample"):
    """One reading of one GPU.

    `gpu` is an index into RecordingStart.gpus. `t_s` is the time before the first value, and `read_s` the duration of
    the whole reading. `clock_reasons` are names of metrics.py. `xids` are the critical errors since the previous
    sample. `gpm_window_s` is the length of the window of the GPM means. `lost` marks the last sample of a GPU that fell
    off the bus. `hung` marks a sample without values: the driver had not answered for `read_s`.
    """

    t_s: float
    gpu: int
    read_s: float
    values: dict[str, Value]
    clock_reasons: list[str] | Absent
    xids: list[int] | Absent
    gpm_window_s: float | None = None
    lost: bool = False
    hung: bool = False


class GpmWindow:
    """Reads the GPM performance counters (Hopper and later) as means over a window of at least MIN_GPM_WINDOW_S.

    The window of a sample is the shortest that is long enough. If samples come more often, their windows overlap. A
    reading of the counters is therefore kept until a later one is old enough.
    """

    def __init__(self, nvml: Nvml, gpu: GpuDevice) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._held_buffers: deque[tuple[float, Any]] = deque()
        self._free_buffers: list[Any] = []
        (is_supported,) = _read_or_errors(lambda: (nvml.gpm_supported(gpu.device),), 1)
        error = None if is_supported else NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._unsupported_error = is_supported if isinstance(is_supported, NVMLError) else error

    def read(self, now_s: float) -> tuple[dict[str, Reading], float | None]:
        """Return the GPM metrics by key, and the length of their window in seconds.

        If there is no window yet, each value is NVML's NO_DATA error and the length is None. Other failures give the
        driver's error for each value.
        """
        if self._unsupported_error is not None:
            return dict.fromkeys(GPM_METRIC_IDS, self._unsupported_error), None
        try:
            buffer = self._take_counters()
            self._held_buffers.append((now_s, buffer))
            while len(self._held_buffers) > 2 and now_s - self._held_buffers[1][0] >= MIN_GPM_WINDOW_S:
                self._free_buffers.append(self._held_buffers.popleft()[1])
            start_s, earlier = self._held_buffers[0]
            if now_s - start_s < MIN_GPM_WINDOW_S:
                return dict.fromkeys(GPM_METRIC_IDS, NVMLError(pynvml.NVML_ERROR_NO_DATA)), None
            values = self._nvml.gpm_metrics(earlier, buffer, list(GPM_METRIC_IDS.values()))
        except NVMLError as error:
            return dict.fromkeys(GPM_METRIC_IDS, error), None
        return dict(zip(GPM_METRIC_IDS, values, strict=True)), now_s - start_s

    def _take_counters(self) -> Any:
        buffer = self._free_buffers.pop() if self._free_buffers else self._nvml.gpm_buffer()
        try:
            self._nvml.gpm_take(self._gpu.device, self._gpu.gpu_instance, buffer)
        except NVMLError:
            self._free_buffers.append(buffer)
            raise
        return buffer


class GpuReader:
    """Reads one GPU repeatedly. Values that never change are read once, in the constructor."""

    def __init__(self, nvml: Nvml, gpu: GpuDevice) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._gpm = GpmWindow(nvml, gpu)
        self._gpm.read(time.monotonic())  # starts the first window
        self._link_max = _read_or_errors(lambda: nvml.pcie_link_max(gpu.device), 2)

    def read(self, gpu_index: int, xids: list[int] | Absent) -> Sample:
        """Return a sample of all metrics, which is taken now.

        Args:
            gpu_index: index of the GPU among the GPUs of the recording.
            xids: new XIDs of the GPU from the XidWatch.
        """
        start_s = time.monotonic()
        window, window_s = self._gpm.read(start_s)
        readings = {**self._readings(), **window}
        try:
            reasons: list[str] | Absent = clock_reason_names(self._nvml.clock_reasons(self._gpu.device))
        except NVMLError:
            reasons = UNKNOWN  # every GPU type reports reasons
        return Sample(
            t_s=start_s,
            gpu=gpu_index,
            read_s=time.monotonic() - start_s,
            values={
                key: _to_value(metric, readings[key], self._gpu.info.gpu_type) for key, metric in METRIC_BY_KEY.items()
            },
            clock_reasons=reasons,
            xids=xids,
            gpm_window_s=window_s,
            lost=any(isinstance(reading, NVMLError) and reading.value in _LOST_ERRORS for reading in readings.values()),
        )

    def _readings(self) -> dict[str, Reading]:
        nvml, device, handle = self._nvml, self._gpu.device, self._gpu.handle
        calls: tuple[tuple[tuple[str, ...], Callable[[], Sequence[Reading]]], ...] = (
            (("temperature_c",), lambda: (nvml.temperature_c(device),)),
            (("sm_clock_mhz",), lambda: (nvml.sm_clock_mhz(device),)),
            (("memory_clock_mhz",), lambda: (nvml.memory_clock_mhz(device),)),
            (("memory_used_bytes", "memory_total_bytes"), lambda: nvml.memory_bytes(handle)),
            (("ecc_corrected",), lambda: (nvml.ecc_errors(device, is_uncorrected=False),)),
            (("ecc_uncorrected",), lambda: (nvml.ecc_errors(device, is_uncorrected=True),)),
            (("pcie_generation", "pcie_width"), lambda: nvml.pcie_link(device)),
            (("pcie_replays",), lambda: (nvml.pcie_replays(device),)),
            (("nvml_utilization_percent",), lambda: (nvml.utilization_percent(handle),)),
            (tuple(FIELDS), lambda: _scale_readings(nvml.fields(device, [field for field, _ in FIELDS.values()]))),
        )
        readings: dict[str, Reading] = dict(zip(("pcie_generation_max", "pcie_width_max"), self._link_max, strict=True))
        for keys, call in calls:
            readings.update(zip(keys, _read_or_errors(call, len(keys)), strict=True))
        return readings


def _read_or_errors(call: Callable[[], Sequence[Reading]], count: int) -> Sequence[Reading]:
    try:
        return call()
    except NVMLError as error:
        return (error,) * count


def _scale_readings(readings: Sequence[Reading]) -> list[Reading]:
    scales = (scale for _, scale in FIELDS.values())
    return [
        reading if isinstance(reading, NVMLError) else reading * scale
        for reading, scale in zip(readings, scales, strict=True)
    ]


def _to_value(metric: GpuMetric, reading: Reading, gpu_type: GpuType) -> Value:
    if isinstance(reading, NVMLError):
        return absent_value(reading, gpu_type, metric.feature)
    return reading if math.isfinite(reading) else UNKNOWN


def memory_or_host_bytes(nvml: Nvml, handle: Any, name: str) -> tuple[int, int]:
    """Return (used, total) bytes of a GPU's memory, or of the host's memory for a GPU type that shares it.

    Raises NVMLError if the driver does not report the memory of another type.
    """
    from meltcore.common.host_memory import host_available_bytes, host_total_bytes  # the sampler needs none of it

    try:
        used_bytes, total_bytes = nvml.memory_bytes(handle)
    except NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED or not lacks_feature(GpuType(name, None), "own_memory"):
            raise
        used_bytes = total_bytes = 0
    if total_bytes or not lacks_feature(GpuType(name, None), "own_memory"):
        return used_bytes, total_bytes
    host_bytes = host_total_bytes()
    return host_bytes - host_available_bytes(), host_bytes


def absent_value(error: NVMLError, gpu_type: GpuType, feature: Feature | None) -> Absent:
    """Return NOT_APPLICABLE if both the driver and the table say that `gpu_type` lacks `feature`, else UNKNOWN."""
    is_unsupported = error.value == pynvml.NVML_ERROR_NOT_SUPPORTED
    return NOT_APPLICABLE if is_unsupported and feature is not None and lacks_feature(gpu_type, feature) else UNKNOWN
