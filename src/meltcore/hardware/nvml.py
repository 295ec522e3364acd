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


class GpuLostError(MeltcoreError):
    """The driver counts a GPU that it cannot reach any more."""


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
        """Handles of the GPUs in NVML's order, which is that of the PCI bus.

        NVML also counts GPUs that a cgroup keeps from this job; they are left out, as CUDA leaves them out. Raises
        GpuLostError for one that is lost.
        """
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(pynvml.nvmlDeviceGetHandleByIndex(index))
            except NVMLError as error:
                if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                    raise GpuLostError(
                        f"GPU {index} is lost: it fell off the bus, or its driver gave it up; drain and reboot the node"
                    ) from error
                if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                    raise
        return found

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

    def cuda_driver(self) -> str:
        """The newest CUDA the driver runs, such as 13.0."""
        version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return f"{version // 1000}.{version % 1000 // 10}"

    def vbios(self, board: Any) -> str:
        return _text(pynvml.nvmlDeviceGetVbiosVersion(board))

    def bus_id(self, board: Any) -> str:
        """As the kernel names it: 0000:1b:00.0."""
        return short_bus_id(_text(pynvml.nvmlDeviceGetPciInfo(board).busId))

    def compute_capability(self, board: Any) -> tuple[int, int]:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(board)
        return int(major), int(minor)

    def cores(self, board: Any) -> int:
        """FP32 lanes of the whole GPU."""
        return int(pynvml.nvmlDeviceGetNumGpuCores(board))

    def sm_clock_max_mhz(self, board: Any) -> float:
        return float(pynvml.nvmlDeviceGetMaxClockInfo(board, pynvml.NVML_CLOCK_SM))

    def memory_clock_max_mhz(self, board: Any) -> float:
        return float(pynvml.nvmlDeviceGetMaxClockInfo(board, pynvml.NVML_CLOCK_MEM))

    def memory_bus_bits(self, board: Any) -> int:
        return int(pynvml.nvmlDeviceGetMemoryBusWidth(board))

    def power_limits_w(self, board: Any) -> tuple[float, float]:
        """(in force, the product's own)."""
        in_force = pynvml.nvmlDeviceGetEnforcedPowerLimit(board)
        return in_force / 1e3, pynvml.nvmlDeviceGetPowerManagementDefaultLimit(board) / 1e3

    def gpu_pcie_generation_max(self, board: Any) -> int:
        """What the GPU itself can do, in whatever slot."""
        return int(pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(board))

    def ecc_mode(self, board: Any) -> int:
        return int(pynvml.nvmlDeviceGetEccMode(board)[0])

    def ecc_lifetime(self, board: Any, *, uncorrected: bool) -> int:
        """Aggregate count: over the GPU's life."""
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED if uncorrected else pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        return int(pynvml.nvmlDeviceGetTotalEccErrors(board, kind, pynvml.NVML_AGGREGATE_ECC))

    def remapped_rows(self, board: Any) -> tuple[int, int, int, int]:
        """(for correctable errors, for uncorrectable ones, pending: 1 or 0, failed: 1 or 0)."""
        corrected, uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(board)
        return int(corrected), int(uncorrected), int(pending), int(failed)

    def mig_mode(self, board: Any) -> int:
        return int(pynvml.nvmlDeviceGetMigMode(board)[0])

    def persistence(self, board: Any) -> int:
        return int(pynvml.nvmlDeviceGetPersistenceMode(board))

    def processes(self, handle: Any) -> list[int]:
        """Ids of the processes that compute on a board or slice, as the driver numbers them."""
        return [int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]

    def recovery_action(self, board: Any) -> int:
        """NVML_GPU_RECOVERY_ACTION_*: 0 for none."""
        reading = self.fields(board, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
        if isinstance(reading, NVMLError):
            raise reading
        return int(reading)

    def nvlinks(self, board: Any) -> int:
        """How many links the GPU has, up or down."""
        reading = self.fields(board, [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT])[0]
        if isinstance(reading, NVMLError):
            raise reading
        return int(reading)

    def nvlink_up(self, board: Any, link: int) -> bool:
        return bool(pynvml.nvmlDeviceGetNvLinkState(board, link))

    def nvlink_speed_mbps(self, board: Any, link: int) -> float:
        """10^6 bytes a second, one way."""
        return self._of_link(board, link, pynvml.NVML_FI_DEV_NVLINK_GET_SPEED)

    def nvlink_peer(self, board: Any, link: int) -> str:
        """`switch`, or the bus id of the GPU at the other end."""
        if pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(board, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "switch"
        return short_bus_id(_text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(board, link).busId))

    def nvlink_errors(self, board: Any, link: int) -> int:
        """Replays, recoveries and flit CRC errors together, since the driver was loaded.

        From Blackwell on NVML has no such counters (nvml.h): there it is recoveries, and errors left after correction.
        """
        kinds = (pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
                 pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT)  # fmt: skip
        try:
            return sum(int(pynvml.nvmlDeviceGetNvLinkErrorCounter(board, link, kind)) for kind in kinds)
        except NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
                raise
        fields = (
            pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
            pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
        )
        return sum(int(self._of_link(board, link, field)) for field in fields)

    def _of_link(self, board: Any, link: int, field: int) -> float:
        """An NVML_FI_* value of one link."""
        reading = _field(pynvml.nvmlDeviceGetFieldValues(board, [(field, link)])[0])
        if isinstance(reading, NVMLError):
            raise reading
        return reading

    def common_ancestor(self, board: Any, other: Any) -> int:
        """NVML_TOPOLOGY_*: how far up the two PCIe paths meet."""
        return int(pynvml.nvmlDeviceGetTopologyCommonAncestor(board, other))

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


def short_bus_id(bus_id: str) -> str:
    """NVML writes eight digits of domain, in capitals; the kernel writes four, in small letters."""
    domain, _, rest = bus_id.partition(":")
    return f"{domain[-4:]}:{rest}".lower()


def _field(value: Any) -> Reading:
    name = _FIELD_TYPES.get(value.valueType)
    if value.nvmlReturn == pynvml.NVML_SUCCESS and name is None:
        return NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    return _checked(value.nvmlReturn, getattr(value.value, name or "dVal"))


def _checked(status: int, value: float) -> Reading:
    return float(value) if status == pynvml.NVML_SUCCESS else NVMLError(status)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
