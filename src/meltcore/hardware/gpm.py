"""GPM: the performance counters that NVML gives on Hopper and later, as means over the time between two readings."""

from collections import deque
from typing import Any

import pynvml
from pynvml import NVMLError

from meltcore.hardware.nvml import Nvml, Reading
from meltcore.hardware.select import Gpu

# Two readings nearer than this give unreliable means (NVML API reference, GPM).
MIN_WINDOW_S = 0.1

METRIC_IDS: dict[str, int] = {
    "sm_active_percent": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_percent": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor_percent": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_bandwidth_percent": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "pcie_tx_mib_per_s": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_rx_mib_per_s": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_tx_mib_per_s": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_rx_mib_per_s": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}


class GpmWindow:
    """Means over the shortest time back that is long enough.

    Readings are kept until one younger is old enough, so every sample has a window of at least MIN_WINDOW_S, also where
    samples come more often than that; windows then overlap.
    """

    def __init__(self, nvml: Nvml, gpu: Gpu) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._held: deque[tuple[float, Any]] = deque()
        self._free: list[Any] = []
        self._refusal = self._support()

    def _support(self) -> NVMLError | None:
        try:
            supported = self._nvml.gpm_supported(self._gpu.board)
        except NVMLError as error:
            return error
        return None if supported else NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def read(self, now_s: float) -> tuple[dict[str, Reading], float | None]:
        """(values by key, length of their window). Before there is a window every value is NVML's "no data"."""
        if self._refusal is not None:
            return dict.fromkeys(METRIC_IDS, self._refusal), None
        try:
            buffer = self._take()
            self._held.append((now_s, buffer))
            while len(self._held) > 2 and now_s - self._held[1][0] >= MIN_WINDOW_S:
                self._free.append(self._held.popleft()[1])
            began_s, earlier = self._held[0]
            if now_s - began_s < MIN_WINDOW_S:
                return dict.fromkeys(METRIC_IDS, NVMLError(pynvml.NVML_ERROR_NO_DATA)), None
            values = self._nvml.gpm_metrics(earlier, buffer, list(METRIC_IDS.values()))
        except NVMLError as error:
            return dict.fromkeys(METRIC_IDS, error), None
        return dict(zip(METRIC_IDS, values, strict=True)), now_s - began_s

    def _take(self) -> Any:
        buffer = self._free.pop() if self._free else self._nvml.gpm_buffer()
        try:
            self._nvml.gpm_take(self._gpu.board, self._gpu.gpu_instance, buffer)
        except NVMLError:
            self._free.append(buffer)
            raise
        return buffer
