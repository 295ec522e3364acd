"""Scripted GPUs: every reading is known; some are refused, some change over time, and a GPU can be lost.

`sampler_command` and `cli_command` put scripted GPUs behind the sampler and behind any `meltcore` command.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import pynvml
from pynvml import NVMLError

from meltcore.common.gpus.driver import Nvml, Reading
from meltcore.common.gpus.reader import FIELDS, GPM_METRIC_IDS
from meltcore.measure.node.monitor import sampler

_GIB = 2**30
_Value = TypeVar("_Value")
HEALTHY: dict[str, float] = {
    "temperature_c": 45,
    "memory_temperature_c": 50,
    "power_w": 500,
    "energy_j": 1e6,
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 3201,
    "clock_reasons": 0,
    "sw_thermal_slowdown_s": 0,
    "hw_thermal_slowdown_s": 0,
    "hw_power_brake_s": 0,
    "memory_used_bytes": 12 * _GIB,
    "memory_total_bytes": 141 * _GIB,
    "ecc_corrected": 3,
    "ecc_uncorrected": 0,
    "pcie_generation": 5,
    "pcie_width": 16,
    "pcie_generation_max": 5,
    "pcie_width_max": 16,
    "pcie_replays": 7,
    "nvml_utilization_percent": 100,
    "sm_active_percent": 90,
    "sm_occupancy_percent": 40,
    "tensor_percent": 60,
    "dram_bandwidth_percent": 70,
    "pcie_tx_mib_per_s": 11,
    "pcie_rx_mib_per_s": 12,
    "nvlink_tx_mib_per_s": 13,
    "nvlink_rx_mib_per_s": 14,
}
# Further readings of a snapshot, of an H200 on an NVSwitch baseboard.
HEALTHY_STATE: dict[str, float] = {
    "cores": 132 * 128,
    "sm_clock_max_mhz": 1980,
    "memory_clock_max_mhz": 3201,
    "memory_bus_bits": 6144,
    "power_limit_w": 700,
    "power_limit_default_w": 700,
    "gpu_pcie_generation_max": 5,
    "ecc_on": 1,
    "ecc_corrected_lifetime": 3,
    "ecc_uncorrected_lifetime": 0,
    "rows_remapped_corrected": 0,
    "rows_remapped_uncorrected": 0,
    "row_remap_pending": 0,
    "row_remap_failed": 0,
    "mig_on": 0,
    "persistence": 1,
    "recovery_action": 0,
    "nvlinks": 18,
    "nvlink_speed_mbps": 26562,
    "nvlink_errors": 0,
    "fabric_state": 3,
    "fabric_status": 0,
    "fabric_health": 0,
}
_ALL = {**HEALTHY, **HEALTHY_STATE}
_CLI = """
import json, sys
from meltcore.measure.node.monitor import sampler
sampler.SAMPLER_COMMAND = json.loads(sys.argv[1])
from meltcore.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


class ReadingChange(msgspec.Struct):
    """From `after_s` on, counted from the start of the FakeNvml, the reading `key` is `value`."""

    after_s: float
    key: str
    value: float


class FakeGpu(msgspec.Struct, kw_only=True):
    """A scripted GPU. `readings` replace HEALTHY's; `refused` maps a reading or a method to the NVML error it raises.

    `links_down`: NVLinks that are down. `link_peers`: the bus id at the end of each NVLink; empty: all end in a switch.
    `processes`: ids of compute processes. `mig_instances`: the
    UUIDs of MIG devices with their GPU instances. `xids`: (GPU instance, XID) pairs, each reported once.
    """

    name: str = "NVIDIA H200"
    uuid: str = "GPU-00000000-fake"
    architecture: int = pynvml.NVML_DEVICE_ARCH_HOPPER
    readings: dict[str, float] = msgspec.field(default_factory=dict)
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    changes: list[ReadingChange] = msgspec.field(default_factory=list)
    bus_id: str = "0000:1b:00.0"
    capability: tuple[int, int] = (9, 0)
    links_down: list[int] = msgspec.field(default_factory=list)
    link_peers: list[str] = msgspec.field(default_factory=list)
    processes: list[int] = msgspec.field(default_factory=list)
    mig_instances: dict[str, int] = msgspec.field(default_factory=dict)
    xids: list[tuple[int, int]] = msgspec.field(default_factory=list)
    lost_after_s: float | None = None
    slow_call_s: float = 0.0
    vbios: str = "96.00.A5.00.01"
    inforom: str = "G525.0200.00.05"


class FakeNvml(Nvml):
    """Implements Nvml from a script. The handle of a GPU is its FakeGpu, that of a MIG device its UUID."""

    def __init__(self, gpus: Sequence[FakeGpu], clock: Callable[[], float] = time.monotonic) -> None:
        self._gpus = list(gpus)
        self._clock = clock
        self._start_s = clock()
        self.gpm_buffers = 0

    def close(self) -> None:
        """Does nothing."""

    def driver(self) -> str:
        return "580.00.00"

    def cuda_driver(self) -> str:
        return "13.0"

    def count(self) -> int:
        return len(self._gpus)

    def device(self, index: int) -> Any:
        return self._gpus[index]

    def device_by_uuid(self, uuid: str) -> Any:
        return next(handle for gpu in self._gpus for handle in (gpu, *gpu.mig_instances) if self.uuid(handle) == uuid)

    def gpus(self) -> list[Any]:
        return list(self._gpus)

    def mig_devices(self, device: Any) -> list[Any]:
        return list(device.mig_instances)

    def gpu_instance(self, mig_device: Any) -> int:
        return int(self._device(mig_device).mig_instances[mig_device])

    def name(self, handle: Any) -> str:
        return self._device(handle).name + (" MIG 1g.18gb" if isinstance(handle, str) else "")

    def uuid(self, handle: Any) -> str:
        return handle if isinstance(handle, str) else handle.uuid

    def slow_call_s(self, device: Any) -> float:
        return float(device.slow_call_s)

    def identity(self, handle: Any) -> int:
        return id(handle)

    def memory_bytes(self, handle: Any) -> tuple[int, int]:
        device = self._device(handle)
        used, total = self._integers(device, "memory_used_bytes", "memory_total_bytes")
        return (used, total) if handle is device else (used // 8, total // 8)

    def ecc_errors(self, device: Any, *, is_uncorrected: bool, is_lifetime: bool = False) -> int:
        key = f"ecc_{'uncorrected' if is_uncorrected else 'corrected'}{'_lifetime' if is_lifetime else ''}"
        return int(self._reading(device, key))

    def pcie_link(self, device: Any) -> tuple[int, int]:
        generation, width = self._integers(device, "pcie_generation", "pcie_width")
        return generation, width

    def pcie_link_max(self, device: Any) -> tuple[int, int]:
        generation, width = self._integers(device, "pcie_generation_max", "pcie_width_max")
        return generation, width

    def utilization_percent(self, handle: Any) -> float:
        if isinstance(handle, str):
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._reading(handle, "nvml_utilization_percent")

    def fields(self, device: Any, ids: Sequence[int]) -> list[Reading]:
        keys = {field: (key, scale) for key, (field, scale) in FIELDS.items()}
        readings = ((self._reading_or_error(device, keys[field][0]), keys[field][1]) for field in ids)
        return [reading if isinstance(reading, NVMLError) else reading / scale for reading, scale in readings]

    def power_limits_w(self, device: Any) -> tuple[float, float]:
        return self._reading(device, "power_limit_w"), self._reading(device, "power_limit_default_w")

    def remapped_rows(self, device: Any) -> tuple[int, int, int, int]:
        keys = ("rows_remapped_corrected", "rows_remapped_uncorrected", "row_remap_pending", "row_remap_failed")
        corrected, uncorrected, pending, failed = self._integers(device, *keys)
        return corrected, uncorrected, pending, failed

    def fabric(self, device: Any) -> tuple[int, int, int]:
        state, status, health = self._integers(device, "fabric_state", "fabric_status", "fabric_health")
        return state, status, health

    def processes(self, handle: Any) -> list[int]:
        return self._value(self._device(handle), "processes", lambda device: list(device.processes))

    def process_bytes(self, handle: Any) -> dict[int, int]:
        used_bytes, _ = self.memory_bytes(handle)
        return dict.fromkeys(self.processes(handle), used_bytes)

    def nvlink_up(self, device: Any, link: int) -> bool:
        return self._value(device, "nvlink_up", lambda device: link not in device.links_down)

    def nvlink_speed_mbps(self, device: Any, link: int) -> float:
        return self._reading(device, "nvlink_speed_mbps")

    def nvlink_peer(self, device: Any, link: int) -> str:
        return self._value(device, "nvlink_peer", lambda gpu: gpu.link_peers[link] if gpu.link_peers else "switch")

    def nvlink_errors(self, device: Any, link: int) -> int:
        return int(self._reading(device, "nvlink_errors"))

    def common_ancestor(self, device: Any, other: Any) -> int:
        return self._value(device, "common_ancestor", lambda _device: int(pynvml.NVML_TOPOLOGY_SYSTEM))

    def gpm_buffer(self) -> Any:
        self.gpm_buffers += 1
        return {}

    def gpm_take(self, device: Any, gpu_instance: int | None, buffer: Any) -> None:
        self._refuse(device, "gpm_take")
        buffer.update(device=device, fraction=1.0 if gpu_instance is None else 1 / 8)

    def gpm_metrics(self, earlier: Any, later: Any, ids: Sequence[int]) -> list[Reading]:
        assert earlier["device"] is later["device"], "both samples must be of one GPU"
        keys = {metric_id: key for key, metric_id in GPM_METRIC_IDS.items()}
        readings = (self._reading_or_error(later["device"], keys[metric_id]) for metric_id in ids)
        return [reading if isinstance(reading, NVMLError) else reading * later["fraction"] for reading in readings]

    def xid_events(self) -> Any:
        return []

    def watch_xids(self, device: Any, events: Any) -> None:
        self._refuse(device, "watch_xids")
        events.append(id(device))

    def next_xid(self, events: Any) -> tuple[int, int, int] | None:
        for gpu in self._gpus:
            if id(gpu) in events and gpu.xids:
                self._refuse(gpu, "next_xid")
                return id(gpu), *gpu.xids.pop(0)
        return None

    def _device(self, handle: Any) -> FakeGpu:
        return next(
            gpu for gpu in self._gpus if handle is gpu or (isinstance(handle, str) and handle in gpu.mig_instances)
        )

    def _integers(self, device: FakeGpu, *keys: str) -> list[int]:
        return [int(self._reading(device, key)) for key in keys]

    def _reading_or_error(self, device: Any, key: str) -> Reading:
        try:
            return self._reading(device, key)
        except NVMLError as error:
            return error

    def _reading(self, device: FakeGpu, key: str) -> float:
        self._refuse(device, key)
        passed_s = self._clock() - self._start_s
        changed = [change.value for change in device.changes if change.key == key and passed_s >= change.after_s]
        return float(changed[-1] if changed else device.readings.get(key, _ALL[key]))

    def _value(self, device: Any, method: str, value: Callable[[FakeGpu], _Value]) -> _Value:
        self._refuse(device, method)
        return value(device)

    def _refuse(self, device: FakeGpu, method: str) -> None:
        """Raises the scripted error of a reading or method, and GPU_IS_LOST once the GPU is lost."""
        if device.lost_after_s is not None and self._clock() - self._start_s >= device.lost_after_s:
            raise NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if method in device.refused:
            raise NVMLError(device.refused[method])


def _define_simple_methods() -> None:
    """Defines the methods of FakeNvml that return one reading or one field of the FakeGpu."""
    readings: dict[str, tuple[str, type]] = {
        **{key: (key, float) for key in ("temperature_c", "sm_clock_mhz", "memory_clock_mhz", "sm_clock_max_mhz")},
        **{key: (key, float) for key in ("memory_clock_max_mhz",)},
        **{key: (key, int) for key in ("clock_reasons", "pcie_replays", "cores", "memory_bus_bits", "persistence")},
        **{key: (key, int) for key in ("gpu_pcie_generation_max", "recovery_action", "nvlinks")},
        "ecc_mode": ("ecc_on", int),
        "mig_mode": ("mig_on", int),
    }
    values: dict[str, Callable[[FakeGpu], Any]] = {
        "architecture": lambda device: device.architecture,
        "vbios": lambda device: device.vbios,
        "inforom": lambda device: device.inforom,
        "bus_id": lambda device: device.bus_id,
        "compute_capability": lambda device: device.capability,
        "gpm_supported": lambda device: device.architecture >= pynvml.NVML_DEVICE_ARCH_HOPPER,
    }
    for name, (key, convert) in readings.items():
        setattr(FakeNvml, name, lambda self, device, key=key, convert=convert: convert(self._reading(device, key)))
    for name, value in values.items():
        setattr(FakeNvml, name, lambda self, device, name=name, value=value: self._value(device, name, value))


_define_simple_methods()


def sampler_command(gpus: Sequence[FakeGpu]) -> list[str]:
    """Returns a value for `meltcore.measure.node.monitor.sampler.SAMPLER_COMMAND` that samples scripted GPUs."""
    return [sys.executable, __file__, msgspec.json.encode(list(gpus)).decode()]


def cli_command(gpus: Sequence[FakeGpu], *arguments: str) -> list[str]:
    """Returns a command line that runs `meltcore ARGUMENTS` in a new process with scripted GPUs."""
    return [sys.executable, "-c", _CLI, msgspec.json.encode(sampler_command(gpus)).decode(), *arguments]


if __name__ == "__main__":
    sampler.main(lambda: FakeNvml(msgspec.json.decode(sys.argv[1], type=list[FakeGpu])))
