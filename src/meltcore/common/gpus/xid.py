"""Reads XID errors, which the driver reports if a GPU or a program on it fails. One event set watches all GPUs."""

from collections.abc import Sequence
from contextlib import suppress

from pynvml import NVMLError

from meltcore.common.gpus.driver import Nvml
from meltcore.common.gpus.metrics import UNKNOWN, Absent
from meltcore.common.gpus.select import GpuDevice

_ALL_INSTANCES = 0xFFFFFFFF  # an event that is not of one MIG instance

# The most common numbers, with NVIDIA's description shortened (XID errors reference).
MEANINGS: dict[int, str] = {
    13: "exception in a program's kernel",
    31: "a program's bad memory access",
    43: "a program's channel was stopped",
    45: "a program was cleaned up after an error",
    48: "uncorrectable ECC error",
    62: "an internal micro-controller halted",
    63: "memory row remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GPU firmware does not answer",
    120: "GPU firmware failed",
    140: "unrecovered ECC error",
}


def describe(xid: int) -> str:
    """Return a text such as "XID 48 (uncorrectable ECC error)". The text of an unknown XID has only the number."""
    meaning = MEANINGS.get(xid)
    return f"XID {xid}" + (f" ({meaning})" if meaning else "")


class XidWatch:
    """Collects the XID errors of all GPUs. `take` returns the XIDs since the last call, or UNKNOWN after a failure."""

    def __init__(self, nvml: Nvml, gpus: Sequence[GpuDevice]) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._watched: set[int] = set()
        try:
            self._events = nvml.xid_events()
        except NVMLError:
            return  # nothing is watched, so `take` returns UNKNOWN
        for identity, device in {nvml.identity(gpu.device): gpu.device for gpu in gpus}.items():
            with suppress(NVMLError):
                nvml.watch_xids(device, self._events)
                self._watched.add(identity)

    def take(self) -> list[list[int] | Absent]:
        """Return one entry per GPU: its new XIDs in order, or UNKNOWN if the driver can no longer be read."""
        new_events: list[tuple[int, int, int]] = []
        try:
            while self._watched and (event := self._nvml.next_xid(self._events)) is not None:
                new_events.append(event)
        except NVMLError:
            self._watched.clear()
        return [self._new_xids(gpu, new_events) for gpu in self._gpus]

    def _new_xids(self, gpu: GpuDevice, events: Sequence[tuple[int, int, int]]) -> list[int] | Absent:
        identity = self._nvml.identity(gpu.device)
        instances = (gpu.gpu_instance, _ALL_INSTANCES)
        xids = [
            xid
            for device, instance, xid in events
            if device == identity and (gpu.gpu_instance is None or instance in instances)
        ]
        return xids if xids or identity in self._watched else UNKNOWN
