"""The one seam to NVML: each method is one question, answered in our units or by pynvml's NVMLError.

`fake.FakeNvml` answers the same questions from a script. Nothing else in the package calls pynvml's functions.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import pynvml
from pynvml import NVMLError

from meltcore.errors import MeltcoreError

Reading: TypeAlias = float | NVMLError  # of several values asked at once, each may fail alone

_FIELD_TYPES = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


class NoDriverError(MeltcoreError):
    """There is no NVIDIA driver to ask."""


class Nvml:
    """NVML, initialised. A handle stands for a board or for a MIG slice of one."""

    def __init__(self) -> None:
        """Raises NoDriverError where the driver's library is absent or cannot start."""
        try:
            pynvml.nvmlInit()
        except NVMLError as error:
            raise NoDriverError(f"no NVIDIA driver here ({error}); there is no GPU to read") from error

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def driver(self) -> str:
        return _text(pynvml.nvmlSystemGetDriverVersion())

    def boards(self) -> list[Any]:
        """Handles of all GPUs in NVML's order, which is that of the PCI bus and of nvidia-smi."""
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def slices(self, board: Any) -> list[Any]:
        """Handles of a board's MIG slices; none where MIG is off or unheard of."""
        try:
            places = pynvml.nvmlDeviceGetMaxMigDeviceCount(board)
        except NVMLError as error:
            if error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return []
            raise
        found = []
        for place in range(places):
            try:
                found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, place))
            except NVMLError as error:
                # An empty place answers NOT_FOUND, each place of a board with MIG off NOT_SUPPORTED.
                if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED):
                    raise
        return found

    def gpu_instance(self, mig_slice: Any) -> int:
        return int(pynvml.nvmlDeviceGetGpuInstanceId(mig_slice))

    def name(self, handle: Any) -> str:
        return _text(pynvml.nvmlDeviceGetName(handle))

    def uuid(self, handle: Any) -> str:
        return _text(pynvml.nvmlDeviceGetUUID(handle))

    def architecture(self, board: Any) -> int:
        return int(pynvml.nvmlDeviceGetArchitecture(board))

    def temperature_c(self, board: Any) -> float:
        return float(pynvml.nvmlDeviceGetTemperature(board, pynvml.NVML_TEMPERATURE_GPU))

    def sm_clock_mhz(self, board: Any) -> float:
        return float(pynvml.nvmlDeviceGetClockInfo(board, pynvml.NVML_CLOCK_SM))

    def memory_clock_mhz(self, board: Any) -> float:
        return float(pynvml.nvmlDeviceGetClockInfo(board, pynvml.NVML_CLOCK_MEM))

    def clock_reasons(self, board: Any) -> int:
        """The bit mask that throttle.words reads."""
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(board))

    def memory_bytes(self, handle: Any) -> tuple[int, int]:
        """(used, total) of a board or a slice."""
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.used), int(memory.total)

    def ecc_errors(self, board: Any, *, uncorrected: bool) -> int:
        """Volatile count: since the driver was loaded."""
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED if uncorrected else pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        return int(pynvml.nvmlDeviceGetTotalEccErrors(board, kind, pynvml.NVML_VOLATILE_ECC))

    def pcie_link(self, board: Any) -> tuple[int, int]:
        """(generation, width) now; an idle GPU lowers its generation to save power."""
        return pynvml.nvmlDeviceGetCurrPcieLinkGeneration(board), pynvml.nvmlDeviceGetCurrPcieLinkWidth(board)

    def pcie_link_max(self, board: Any) -> tuple[int, int]:
        """(generation, width) that this GPU reaches in this machine."""
        return pynvml.nvmlDeviceGetMaxPcieLinkGeneration(board), pynvml.nvmlDeviceGetMaxPcieLinkWidth(board)

    def pcie_replays(self, board: Any) -> int:
        return int(pynvml.nvmlDeviceGetPcieReplayCounter(board))

    def utilization_percent(self, board: Any) -> float:
        return float(pynvml.nvmlDeviceGetUtilizationRates(board).gpu)

    def fields(self, board: Any, ids: Sequence[int]) -> list[Reading]:
        """NVML_FI_* values in their own units, in one call."""
        return [_field(value) for value in pynvml.nvmlDeviceGetFieldValues(board, list(ids))]

    def gpm_supported(self, board: Any) -> bool:
        return bool(pynvml.nvmlGpmQueryDeviceSupport(board).isSupportedDevice)

    def gpm_buffer(self) -> Any:
        return pynvml.nvmlGpmSampleAlloc()

    def gpm_take(self, board: Any, gpu_instance: int | None, buffer: Any) -> None:
        """Fill `buffer` with the counters of now, of the whole board or of one MIG GPU instance."""
        if gpu_instance is None:
            pynvml.nvmlGpmSampleGet(board, buffer)
        else:
            pynvml.nvmlGpmMigSampleGet(board, gpu_instance, buffer)

    def gpm_metrics(self, earlier: Any, later: Any, ids: Sequence[int]) -> list[Reading]:
        """NVML_GPM_METRIC_* over the time between two filled buffers."""
        question = pynvml.c_nvmlGpmMetricsGet_t()
        question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(ids)
        question.sample1, question.sample2 = earlier, later
        for place, metric_id in enumerate(ids):
            question.metrics[place].metricId = metric_id
        pynvml.nvmlGpmMetricsGet(question)
        return [_checked(metric.nvmlReturn, metric.value) for metric in question.metrics[: len(ids)]]

    def xid_events(self) -> Any:
        """A fresh event set, to watch boards with."""
        return pynvml.nvmlEventSetCreate()

    def watch_xids(self, board: Any, events: Any) -> None:
        pynvml.nvmlDeviceRegisterEvents(board, pynvml.nvmlEventTypeXidCriticalError, events)

    def next_xid(self, events: Any) -> tuple[int, int, int] | None:
        """(identity of the board, MIG GPU instance or 0xFFFFFFFF for all, XID) of an event not yet told, if any."""
        try:
            event = pynvml.nvmlEventSetWait_v2(events, 0)
        except NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        return self.identity(event.device), int(event.gpuInstanceId), int(event.eventData)

    def identity(self, handle: Any) -> int:
        """A number that two handles share exactly if they stand for the same device."""
        return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _field(value: Any) -> Reading:
    name = _FIELD_TYPES.get(value.valueType)
    if value.nvmlReturn == pynvml.NVML_SUCCESS and name is None:
        return NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    return _checked(value.nvmlReturn, getattr(value.value, name or "dVal"))


def _checked(status: int, value: float) -> Reading:
    return float(value) if status == pynvml.NVML_SUCCESS else NVMLError(status)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
