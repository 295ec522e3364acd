"""A scripted machine for tests: GPUs whose every reading is known, some refused, some changing or lost on the way."""

import time
from collections.abc import Sequence
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


class Change(msgspec.Struct):
    """From `after_s` on, counted from the machine's start, reading `key` is `value`."""

    after_s: float
    key: str
    value: float


class FakeGpu(msgspec.Struct, kw_only=True):
    """`readings` replace HEALTHY's. `refused` maps a reading, or a question, to the NVML error it gets.

    `slices` maps the UUID of a MIG slice to its GPU instance. `xids` are told one at a time, to whoever watches.
    """

    name: str = "NVIDIA H200"
    uuid: str = "GPU-00000000-fake"
    architecture: int = pynvml.NVML_DEVICE_ARCH_HOPPER
    readings: dict[str, float] = msgspec.field(default_factory=dict)
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    changes: list[Change] = msgspec.field(default_factory=list)
    slices: dict[str, int] = msgspec.field(default_factory=dict)
    xids: list[tuple[int, int]] = msgspec.field(default_factory=list)
    lost_after_s: float | None = None


class FakeNvml(Nvml):
    """Answers every question of Nvml from a script. A board's handle is its FakeGpu, a slice's its UUID."""

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self._gpus = list(gpus)
        self._began_s = time.monotonic()
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
        passed_s = time.monotonic() - self._began_s
        changed = [change.value for change in board.changes if change.key == key and passed_s >= change.after_s]
        return float(changed[-1] if changed else board.readings.get(key, HEALTHY[key]))

    def _may_refuse(self, board: FakeGpu, question: str) -> None:
        if board.lost_after_s is not None and time.monotonic() - self._began_s >= board.lost_after_s:
            raise NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if question in board.refused:
            raise NVMLError(board.refused[question])
