"""Wraps the calls of NVML. Each method reads one value in Meltcore's units or raises pynvml's NVMLError.

No other module calls NVML. `FakeNvml` of `tests/doubles/fake_gpu.py` implements the same methods from a script.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar

import pynvml
from pynvml import NVMLError

from meltcore.common.errors import MeltcoreError
from meltcore.common.process import call_with_timeout

Reading: TypeAlias = float | NVMLError  # one of several values that are read in one call; each can fail alone

START_LIMIT_S = 60.0  # NVML takes several seconds on a machine of eight GPUs without persistence mode
CALL_LIMIT_S = 10.0  # NVML returns within milliseconds; waking a sleeping GPU takes two or three seconds
SLOW_CALL_S = 4.0  # a healthy driver answers sooner, also about a GPU that sleeps

# A GPU that no program can use, by NVML's error, and what to do about it.
UNUSABLE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "is lost: it fell off the bus, or the driver gave up on it; drain and reboot the node"
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: "needs a reset: drain the node, then run `nvidia-smi --gpu-reset` or reboot",
}

_NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_START_REMEDIES = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "its kernel module and its library have different versions, as after an update: reboot, or reload the module"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "give this user or container access to /dev/nvidia*",
}
_FIELD_TYPES = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}

Item = TypeVar("Item")
_Result = TypeVar("_Result")


class DriverStartError(MeltcoreError):
    """Reports that the NVIDIA driver does not start. Its cause is the error of NVML."""


class NoDriverError(DriverStartError):
    """Reports that this machine has no NVIDIA driver."""


class GpuLostError(MeltcoreError):
    """Reports a GPU that the driver lists but can no longer reach, or that needs a reset."""


class Nvml:
    """Reads GPUs through NVML.

    `device` is the handle of a whole GPU, `handle` the handle of a GPU or of a MIG device.
    """

    def __init__(self) -> None:
        """Start NVML.

        Raises NoDriverError if the driver is not installed or not loaded. Raises DriverStartError if it is faulty.
        """
        try:
            pynvml.nvmlInit()
        except NVMLError as error:
            if error.value in _NO_DRIVER:
                raise NoDriverError(
                    f"no NVIDIA driver here ({error}), so there is no GPU to read: install or load the driver; "
                    "give a container its GPUs (docker run --gpus all)"
                ) from error
            remedy = _START_REMEDIES.get(error.value, "look in the kernel log (dmesg)")
            raise DriverStartError(f"the NVIDIA driver does not start: {str(error).rstrip('.')}; {remedy}") from error

    def close(self) -> None:
        """Shut NVML down."""
        pynvml.nvmlShutdown()

    def driver(self) -> str:
        """Return the version of the driver."""
        return _text(pynvml.nvmlSystemGetDriverVersion())

    def cuda_driver(self) -> str:
        """Return the newest CUDA version that the driver supports, such as 13.0."""
        version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return f"{version // 1000}.{version % 1000 // 10}"

    def count(self) -> int:
        """Return the number of GPUs that the driver knows, including GPUs to which a cgroup denies access."""
        return int(pynvml.nvmlDeviceGetCount())

    def device(self, index: int) -> Any:
        """Return the handle of the GPU with this index in NVML's order."""
        return pynvml.nvmlDeviceGetHandleByIndex(index)

    def device_by_uuid(self, uuid: str) -> Any:
        """Return the handle of a GPU or a MIG device by its UUID."""
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def gpus(self) -> list[Any]:
        """Return handles of the GPUs in NVML's order, along the PCI bus.

        NVML also lists GPUs to which a cgroup denies access. They are left out, as in CUDA. Raises GpuLostError if a
        GPU is lost or needs a reset.
        """
        handles = []
        for index in range(self.count()):
            try:
                handles.append(self.device(index))
            except NVMLError as error:
                if error.value in UNUSABLE:
                    raise GpuLostError(f"GPU {index} {UNUSABLE[error.value]}") from error
                if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                    raise
        return handles

    def mig_devices(self, device: Any) -> list[Any]:
        """Return handles of a GPU's MIG devices. The list is empty if MIG is off or unsupported."""
        try:
            count = pynvml.nvmlDeviceGetMaxMigDeviceCount(device)
        except NVMLError as error:
            if error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return []
            raise
        handles = []
        for index in range(count):
            try:
                handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
            except NVMLError as error:
                # NOT_FOUND is an unused index; with MIG off every index gives NOT_SUPPORTED.
                if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED):
                    raise
        return handles

    def gpu_instance(self, mig_device: Any) -> int:
        """Return the GPU instance id of a MIG device."""
        return int(pynvml.nvmlDeviceGetGpuInstanceId(mig_device))

    def name(self, handle: Any) -> str:
        """Return the name of the GPU type, such as NVIDIA H200."""
        return _text(pynvml.nvmlDeviceGetName(handle))

    def uuid(self, handle: Any) -> str:
        """Return the UUID. It begins with "GPU-" or "MIG-"."""
        return _text(pynvml.nvmlDeviceGetUUID(handle))

    def architecture(self, device: Any) -> int:
        """Return the architecture as a constant NVML_DEVICE_ARCH_*."""
        return int(pynvml.nvmlDeviceGetArchitecture(device))

    def temperature_c(self, device: Any) -> float:
        """Return the temperature of the GPU in degrees Celsius."""
        return float(pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU))

    def sm_clock_mhz(self, device: Any) -> float:
        """Return the current SM clock in MHz."""
        return float(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))

    def memory_clock_mhz(self, device: Any) -> float:
        """Return the current memory clock in MHz."""
        return float(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_MEM))

    def clock_reasons(self, device: Any) -> int:
        """Return the bit mask of the clock event reasons; `metrics.clock_reason_names` gives their names."""
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(device))

    def memory_bytes(self, handle: Any) -> tuple[int, int]:
        """Return (used, total) bytes of memory of a GPU or a MIG device."""
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.used), int(memory.total)

    def ecc_errors(self, device: Any, *, is_uncorrected: bool, is_lifetime: bool = False) -> int:
        """Return the ECC errors since the driver was loaded (volatile), or over the GPU's lifetime (aggregate)."""
        bit = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED if is_uncorrected else pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        counter = pynvml.NVML_AGGREGATE_ECC if is_lifetime else pynvml.NVML_VOLATILE_ECC
        return int(pynvml.nvmlDeviceGetTotalEccErrors(device, bit, counter))

    def pcie_link(self, device: Any) -> tuple[int, int]:
        """Return the current (generation, width) of the PCIe link. An idle GPU lowers the generation to save power."""
        return pynvml.nvmlDeviceGetCurrPcieLinkGeneration(device), pynvml.nvmlDeviceGetCurrPcieLinkWidth(device)

    def pcie_link_max(self, device: Any) -> tuple[int, int]:
        """Return the maximum PCIe (generation, width) of this GPU in this machine."""
        return pynvml.nvmlDeviceGetMaxPcieLinkGeneration(device), pynvml.nvmlDeviceGetMaxPcieLinkWidth(device)

    def pcie_replays(self, device: Any) -> int:
        """Return the number of PCIe replays that the GPU has counted."""
        return int(pynvml.nvmlDeviceGetPcieReplayCounter(device))

    def utilization_percent(self, handle: Any) -> float:
        """Return NVML's GPU utilization in percent. `metrics.UTILIZATION_NOTE` says what it means."""
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)

    def fields(self, device: Any, ids: Sequence[int]) -> list[Reading]:
        """Return the values of the fields NVML_FI_* `ids`, in their order and in NVML's units.

        One call reads all of them.
        """
        return [_field_reading(value) for value in pynvml.nvmlDeviceGetFieldValues(device, list(ids))]

    def vbios(self, device: Any) -> str:
        """Return the VBIOS version."""
        return _text(pynvml.nvmlDeviceGetVbiosVersion(device))

    def inforom(self, device: Any) -> str:
        """Return the version of the infoROM image, or "none" for a GPU without one."""
        try:
            return _text(pynvml.nvmlDeviceGetInforomImageVersion(device))
        except NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
                raise
            return "none"

    def fabric(self, device: Any) -> tuple[int, int, int]:
        """Return (state NVML_GPU_FABRIC_STATE_*, NVML's status, health mask) of the registration with NVSwitches.

        The state of a GPU that has no such fabric is 0.
        """
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        try:
            pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
        except NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
                raise
            return pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, 0, 0
        return int(info.state), int(info.status), int(info.healthMask)

    def bus_id(self, device: Any) -> str:
        """Return the PCI bus id in the kernel's form: 0000:1b:00.0."""
        return short_bus_id(_text(pynvml.nvmlDeviceGetPciInfo(device).busId))

    def compute_capability(self, device: Any) -> tuple[int, int]:
        """Return the compute capability of the GPU as (major, minor)."""
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
        return int(major), int(minor)

    def cores(self, device: Any) -> int:
        """Return the number of CUDA cores (FP32 units) of the whole GPU."""
        return int(pynvml.nvmlDeviceGetNumGpuCores(device))

    def sm_clock_max_mhz(self, device: Any) -> float:
        """Return the maximum SM clock in MHz."""
        return float(pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM))

    def memory_clock_max_mhz(self, device: Any) -> float:
        """Return the maximum memory clock in MHz."""
        return float(pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_MEM))

    def memory_bus_bits(self, device: Any) -> int:
        """Return the width of the memory bus in bits."""
        return int(pynvml.nvmlDeviceGetMemoryBusWidth(device))

    def power_limits_w(self, device: Any) -> tuple[float, float]:
        """Return the power limits of the GPU in watts: (enforced, default)."""
        enforced = pynvml.nvmlDeviceGetEnforcedPowerLimit(device)
        return enforced / 1e3, pynvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1e3

    def gpu_pcie_generation_max(self, device: Any) -> int:
        """Return the maximum PCIe generation that the GPU itself supports, whatever its slot supports."""
        return int(pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(device))

    def ecc_mode(self, device: Any) -> int:
        """Return 1 if ECC is on, else 0."""
        return int(pynvml.nvmlDeviceGetEccMode(device)[0])

    def remapped_rows(self, device: Any) -> tuple[int, int, int, int]:
        """Return four numbers on remapped memory rows.

        They are (rows remapped for correctable errors, rows remapped for uncorrectable errors, 1 if a remapping is
        pending, 1 if a remapping has failed).
        """
        corrected, uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(device)
        return int(corrected), int(uncorrected), int(pending), int(failed)

    def mig_mode(self, device: Any) -> int:
        """Return 1 if MIG is on, else 0."""
        return int(pynvml.nvmlDeviceGetMigMode(device)[0])

    def persistence(self, device: Any) -> int:
        """Return 1 if persistence mode is on, else 0."""
        return int(pynvml.nvmlDeviceGetPersistenceMode(device))

    def processes(self, handle: Any) -> list[int]:
        """Return the ids of the compute processes on a GPU or MIG device, as the driver numbers them."""
        return [int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]

    def process_bytes(self, handle: Any) -> dict[int, int]:
        """Return the bytes of memory of the compute processes on a GPU or MIG device, by process id.

        Processes whose bytes the driver does not report are left out.
        """
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return {int(each.pid): int(each.usedGpuMemory) for each in processes if each.usedGpuMemory is not None}

    def recovery_action(self, device: Any) -> int:
        """Return the recommended action NVML_GPU_RECOVERY_ACTION_*, or 0 if none is recommended."""
        return int(_number(self.fields(device, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]))

    def nvlinks(self, device: Any) -> int:
        """Return the number of NVLinks of the GPU, including links that are down."""
        return int(_number(self.fields(device, [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT])[0]))

    def nvlink_up(self, device: Any, link: int) -> bool:
        """Return whether an NVLink is active."""
        return bool(pynvml.nvmlDeviceGetNvLinkState(device, link))

    def nvlink_speed_mbps(self, device: Any, link: int) -> float:
        """Return the speed of an NVLink in 10^6 bytes per second in one direction."""
        return self._link_field(device, link, pynvml.NVML_FI_DEV_NVLINK_GET_SPEED)

    def nvlink_peer(self, device: Any, link: int) -> str:
        """Return the bus id of the GPU at the other end of an NVLink, or `switch`."""
        if pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "switch"
        return short_bus_id(_text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link).busId))

    def nvlink_errors(self, device: Any, link: int) -> int:
        """Return the number of errors of an NVLink since the driver was loaded.

        The number is the sum of replays, recoveries and flit CRC errors. Since Blackwell, NVML no longer has these
        counters (nvml.h). For Blackwell and later GPUs the number is the sum of recoveries and effective errors.
        """
        counters = (pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
                    pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT)  # fmt: skip
        try:
            return sum(int(pynvml.nvmlDeviceGetNvLinkErrorCounter(device, link, counter)) for counter in counters)
        except NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
                raise
        fields = (
            pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
            pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
        )
        return sum(int(self._link_field(device, link, field)) for field in fields)

    def _link_field(self, device: Any, link: int, field: int) -> float:
        """Return the value of a field NVML_FI_* for one link."""
        return _number(_field_reading(pynvml.nvmlDeviceGetFieldValues(device, [(field, link)])[0]))

    def common_ancestor(self, device: Any, other: Any) -> int:
        """Return the level (NVML_TOPOLOGY_*) at which the PCIe paths of two GPUs meet."""
        return int(pynvml.nvmlDeviceGetTopologyCommonAncestor(device, other))

    def gpm_supported(self, device: Any) -> bool:
        """Return whether the GPU has GPM counters."""
        return bool(pynvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice)

    def gpm_buffer(self) -> Any:
        """Allocate a buffer for one reading of the GPM counters."""
        return pynvml.nvmlGpmSampleAlloc()

    def gpm_take(self, device: Any, gpu_instance: int | None, buffer: Any) -> None:
        """Store the current GPM counters of a MIG GPU instance in `buffer`. None means the whole GPU."""
        if gpu_instance is None:
            pynvml.nvmlGpmSampleGet(device, buffer)
        else:
            pynvml.nvmlGpmMigSampleGet(device, gpu_instance, buffer)

    def gpm_metrics(self, earlier: Any, later: Any, ids: Sequence[int]) -> list[Reading]:
        """Return the metrics NVML_GPM_METRIC_* `ids`, in order, for the time between two readings of the counters."""
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(ids)
        request.sample1, request.sample2 = earlier, later
        for index, metric_id in enumerate(ids):
            request.metrics[index].metricId = metric_id
        pynvml.nvmlGpmMetricsGet(request)
        return [_to_reading(metric.nvmlReturn, metric.value) for metric in request.metrics[: len(ids)]]

    def xid_events(self) -> Any:
        """Create an event set, with which the XID errors of GPUs can be registered."""
        return pynvml.nvmlEventSetCreate()

    def watch_xids(self, device: Any, events: Any) -> None:
        """Register a GPU's XID errors with an event set."""
        pynvml.nvmlDeviceRegisterEvents(device, pynvml.nvmlEventTypeXidCriticalError, events)

    def next_xid(self, events: Any) -> tuple[int, int, int] | None:
        """Return the next unread event, or None if there is none.

        An event is (identity of the GPU, MIG GPU instance, XID). The instance is 0xFFFFFFFF if the event concerns the
        whole GPU.
        """
        try:
            event = pynvml.nvmlEventSetWait_v2(events, 0)
        except NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        return self.identity(event.device), int(event.gpuInstanceId), int(event.eventData)

    def identity(self, handle: Any) -> int:
        """Return a number that is equal for two handles of the same device, and only for those."""
        return ctypes.cast(handle, ctypes.c_void_p).value or 0

    def slow_call_s(self, _device: Any) -> float:
        """Return 0, since these calls are not timed. NvmlWithTimeout times them."""
        return 0.0


class NvmlWithTimeout(Nvml):
    """Forwards each call to `inner` with a time limit, because a driver call may never return on a dying GPU.

    A call past its limit raises NVML's TIMEOUT, which readers report as unreadable, and the GPU is not read again. The
    thread of such a call continues until the process ends. `slow_call_s` names a GPU whose calls take longer than
    `slow_s`.
    """

    def __init__(self, inner: Nvml, limit_s: float = CALL_LIMIT_S, slow_s: float = SLOW_CALL_S) -> None:
        self._inner = inner
        self._limit_s = limit_s
        self._slow_s = slow_s
        self._stuck: list[Any] = []
        self._slow: list[tuple[Any, float]] = []

    def __getattribute__(self, name: str) -> Any:
        """Return the attribute of `inner`. Methods get the time limit, but for `identity`, which calls no driver."""
        if name.startswith("_") or name == "slow_call_s":
            return object.__getattribute__(self, name)
        method = getattr(self._inner, name)
        return method if name == "identity" else partial(self._call, method)

    def _call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        handle = arguments[0] if arguments else None
        if any(handle is stuck_handle for stuck_handle in self._stuck if handle is not None):
            raise NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        start_s = time.monotonic()
        try:
            return call_with_timeout(self._limit_s, partial(method, *arguments, **keywords))
        except TimeoutError:
            self._stuck.append(handle)
            raise NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        finally:
            took_s = time.monotonic() - start_s
            if took_s > self._slow_s:
                self._slow.append((handle, took_s))

    def slow_call_s(self, device: Any) -> float:
        """Return the seconds of the slowest call about a GPU if they exceed `slow_s`, else 0."""
        return max((took_s for handle, took_s in self._slow if handle is device), default=0.0)


def connect(start: Callable[[], Nvml], limit_s: float = START_LIMIT_S) -> NvmlWithTimeout:
    """Load the driver's library by calling `start`. Return the library's calls, each with a time limit.

    Raises the errors of `start`, and MeltcoreError if `start` takes longer than `limit_s`.
    """
    try:
        return NvmlWithTimeout(call_with_timeout(limit_s, start))
    except TimeoutError as error:
        raise MeltcoreError(f"the NVIDIA driver does not answer: {error}; look in the kernel log") from error


def map_concurrently(function: Callable[[Item], _Result], items: Sequence[Item]) -> list[_Result]:
    """Call `function` on every item in threads, and return the results in the order of the items.

    Reading one item after another would take long: eight GPUs have 144 NVLinks.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        return list(pool.map(function, items))


def short_bus_id(bus_id: str) -> str:
    """Convert NVML's form of a PCI bus id to the kernel's form: four digits of domain, not eight, in lower case."""
    domain, _, bus_and_device = bus_id.partition(":")
    return f"{domain[-4:]}:{bus_and_device}".lower()


def _field_reading(value: Any) -> Reading:
    name = _FIELD_TYPES.get(value.valueType)
    if value.nvmlReturn == pynvml.NVML_SUCCESS and name is None:
        return NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    return _to_reading(value.nvmlReturn, getattr(value.value, name or "dVal"))


def _to_reading(status: int, value: float) -> Reading:
    return float(value) if status == pynvml.NVML_SUCCESS else NVMLError(status)


def _number(reading: Reading) -> float:
    if isinstance(reading, NVMLError):
        raise reading
    return reading


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
