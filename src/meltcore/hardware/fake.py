"""A scripted machine for tests: GPUs whose every reading is known, some refused, some changing or lost on the way."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pynvml
from pynvml import NVMLError

from meltcore.hardware.gpm import METRIC_IDS
from meltcore.hardware.nvml import Nvml, Reading
from meltcore.hardware.reader import FIELDS

_GIB = 2**30
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
# What a snapshot asks beside that, of an H200 on an NVSwitch board.
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
}


class Change(msgspec.Struct):
    """From `after_s` on, counted from the machine's start, reading `key` is `value`."""

    after_s: float
    key: str
    value: float


class FakeGpu(msgspec.Struct, kw_only=True):
    """`readings` replace HEALTHY's. `refused` maps a reading, or a question, to the NVML error it gets.

    `links_down` are the NVLinks that are down; those that are up end in a switch. `processes` compute on it.
    `slices` maps the UUID of a MIG slice to its GPU instance. `xids` are told one at a time, to whoever watches.
    """

    name: str = "NVIDIA H200"
    uuid: str = "GPU-00000000-fake"
    architecture: int = pynvml.NVML_DEVICE_ARCH_HOPPER
    readings: dict[str, float] = msgspec.field(default_factory=dict)
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    changes: list[Change] = msgspec.field(default_factory=list)
    bus_id: str = "0000:1b:00.0"
    capability: tuple[int, int] = (9, 0)
    links_down: list[int] = msgspec.field(default_factory=list)
    processes: list[int] = msgspec.field(default_factory=list)
    slices: dict[str, int] = msgspec.field(default_factory=dict)
    xids: list[tuple[int, int]] = msgspec.field(default_factory=list)
    lost_after_s: float | None = None


class FakeNvml(Nvml):
    """Answers every question of Nvml from a script. A board's handle is its FakeGpu, a slice's its UUID."""

    def __init__(self, gpus: Sequence[FakeGpu], clock: Callable[[], float] = time.monotonic) -> None:
        self._gpus = list(gpus)
        self._clock = clock
        self._began_s = clock()
        self._watched: list[int] = []
        self.gpm_buffers = 0

    def close(self) -> None:
        pass

    def driver(self) -> str:
        return "580.00.00"

    def boards(self) -> list[Any]:
        return list(self._gpus)

    def slices(self, board: Any) -> list[Any]:
        return list(board.slices)

    def gpu_instance(self, mig_slice: Any) -> int:
        return int(self._board(mig_slice).slices[mig_slice])

    def name(self, handle: Any) -> str:
        return self._board(handle).name + (" MIG 1g.18gb" if isinstance(handle, str) else "")

    def uuid(self, handle: Any) -> str:
        return handle if isinstance(handle, str) else handle.uuid

    def architecture(self, board: Any) -> int:
        self._may_refuse(board, "architecture")
        return int(board.architecture)

    def temperature_c(self, board: Any) -> float:
        return self._reading(board, "temperature_c")

    def sm_clock_mhz(self, board: Any) -> float:
        return self._reading(board, "sm_clock_mhz")

    def memory_clock_mhz(self, board: Any) -> float:
        return self._reading(board, "memory_clock_mhz")

    def clock_reasons(self, board: Any) -> int:
        return int(self._reading(board, "clock_reasons"))

    def memory_bytes(self, handle: Any) -> tuple[int, int]:
        board = self._board(handle)
        used, total = (int(self._reading(board, key)) for key in ("memory_used_bytes", "memory_total_bytes"))
        return (used, total) if handle is board else (used // 8, total // 8)

    def ecc_errors(self, board: Any, *, uncorrected: bool) -> int:
        return int(self._reading(board, "ecc_uncorrected" if uncorrected else "ecc_corrected"))

    def pcie_link(self, board: Any) -> tuple[int, int]:
        return int(self._reading(board, "pcie_generation")), int(self._reading(board, "pcie_width"))

    def pcie_link_max(self, board: Any) -> tuple[int, int]:
        return int(self._reading(board, "pcie_generation_max")), int(self._reading(board, "pcie_width_max"))

    def pcie_replays(self, board: Any) -> int:
        return int(self._reading(board, "pcie_replays"))

    def utilization_percent(self, board: Any) -> float:
        if isinstance(board, str):
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._reading(board, "nvml_utilization_percent")

    def fields(self, board: Any, ids: Sequence[int]) -> list[Reading]:
        keys = {field: (key, scale) for key, (field, scale) in FIELDS.items()}
        readings = ((self._each(board, keys[field][0]), keys[field][1]) for field in ids)
        return [reading if isinstance(reading, NVMLError) else reading / scale for reading, scale in readings]

    def cuda_driver(self) -> str:
        return "13.0"

    def vbios(self, board: Any) -> str:
        self._may_refuse(board, "vbios")
        return "96.00.A5.00.01"

    def bus_id(self, board: Any) -> str:
        self._may_refuse(board, "bus_id")
        return str(board.bus_id)

    def compute_capability(self, board: Any) -> tuple[int, int]:
        self._may_refuse(board, "compute_capability")
        major, minor = board.capability
        return major, minor

    def cores(self, board: Any) -> int:
        return int(self._reading(board, "cores"))

    def sm_clock_max_mhz(self, board: Any) -> float:
        return self._reading(board, "sm_clock_max_mhz")

    def memory_clock_max_mhz(self, board: Any) -> float:
        return self._reading(board, "memory_clock_max_mhz")

    def memory_bus_bits(self, board: Any) -> int:
        return int(self._reading(board, "memory_bus_bits"))

    def power_limits_w(self, board: Any) -> tuple[float, float]:
        return self._reading(board, "power_limit_w"), self._reading(board, "power_limit_default_w")

    def gpu_pcie_generation_max(self, board: Any) -> int:
        return int(self._reading(board, "gpu_pcie_generation_max"))

    def ecc_mode(self, board: Any) -> int:
        return int(self._reading(board, "ecc_on"))

    def ecc_lifetime(self, board: Any, *, uncorrected: bool) -> int:
        return int(self._reading(board, "ecc_uncorrected_lifetime" if uncorrected else "ecc_corrected_lifetime"))

    def remapped_rows(self, board: Any) -> tuple[int, int, int, int]:
        keys = ("rows_remapped_corrected", "rows_remapped_uncorrected", "row_remap_pending", "row_remap_failed")
        corrected, uncorrected, pending, failed = (int(self._reading(board, key)) for key in keys)
        return corrected, uncorrected, pending, failed

    def mig_mode(self, board: Any) -> int:
        return int(self._reading(board, "mig_on"))

    def persistence(self, board: Any) -> int:
        return int(self._reading(board, "persistence"))

    def processes(self, handle: Any) -> list[int]:
        board = self._board(handle)
        self._may_refuse(board, "processes")
        return list(board.processes)

    def recovery_action(self, board: Any) -> int:
        return int(self._reading(board, "recovery_action"))

    def nvlinks(self, board: Any) -> int:
        return int(self._reading(board, "nvlinks"))

    def nvlink_up(self, board: Any, link: int) -> bool:
        self._may_refuse(board, "nvlink_up")
        return link not in board.links_down

    def nvlink_speed_mbps(self, board: Any, link: int) -> float:
        return self._reading(board, "nvlink_speed_mbps")

    def nvlink_peer(self, board: Any, link: int) -> str:
        self._may_refuse(board, "nvlink_peer")
        return "switch"

    def nvlink_errors(self, board: Any, link: int) -> int:
        return int(self._reading(board, "nvlink_errors"))

    def common_ancestor(self, board: Any, other: Any) -> int:
        self._may_refuse(board, "common_ancestor")
        return int(pynvml.NVML_TOPOLOGY_SYSTEM)

    def gpm_supported(self, board: Any) -> bool:
        self._may_refuse(board, "gpm_supported")
        return bool(board.architecture >= pynvml.NVML_DEVICE_ARCH_HOPPER)

    def gpm_buffer(self) -> Any:
        self.gpm_buffers += 1
        return {}

    def gpm_take(self, board: Any, gpu_instance: int | None, buffer: Any) -> None:
        self._may_refuse(board, "gpm_take")
        buffer.update(board=board, share=1.0 if gpu_instance is None else 1 / 8)

    def gpm_metrics(self, earlier: Any, later: Any, ids: Sequence[int]) -> list[Reading]:
        assert earlier["board"] is later["board"], "two samples of one GPU"
        keys = {metric_id: key for key, metric_id in METRIC_IDS.items()}
        readings = (self._each(later["board"], keys[metric_id]) for metric_id in ids)
        return [reading if isinstance(reading, NVMLError) else reading * later["share"] for reading in readings]

    def xid_events(self) -> Any:
        return self._watched

    def watch_xids(self, board: Any, events: Any) -> None:
        self._may_refuse(board, "watch_xids")
        events.append(self.identity(board))

    def next_xid(self, events: Any) -> tuple[int, int, int] | None:
        for gpu in self._gpus:
            if self.identity(gpu) in events and gpu.xids:
                self._may_refuse(gpu, "next_xid")
                instance, xid = gpu.xids.pop(0)
                return self.identity(gpu), instance, xid
        return None

    def identity(self, handle: Any) -> int:
        return id(handle)

    def _board(self, handle: Any) -> FakeGpu:
        return next(gpu for gpu in self._gpus if handle is gpu or (isinstance(handle, str) and handle in gpu.slices))

    def _each(self, board: Any, key: str) -> Reading:
        try:
            return self._reading(board, key)
        except NVMLError as error:
            return error

    def _reading(self, board: FakeGpu, key: str) -> float:
        self._may_refuse(board, key)
        passed_s = self._clock() - self._began_s
        changed = [change.value for change in board.changes if change.key == key and passed_s >= change.after_s]
        return float(changed[-1] if changed else board.readings.get(key, {**HEALTHY, **HEALTHY_STATE}[key]))

    def _may_refuse(self, board: FakeGpu, question: str) -> None:
        if board.lost_after_s is not None and self._clock() - self._began_s >= board.lost_after_s:
            raise NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if question in board.refused:
            raise NVMLError(board.refused[question])
