"""XID errors: what the driver reports when a GPU, or a program on it, goes wrong. One event set for all boards."""

from collections.abc import Sequence

from pynvml import NVMLError

from meltcore.hardware.metrics import UNKNOWN, Absent
from meltcore.hardware.nvml import Nvml
from meltcore.hardware.select import Gpu

_WHOLE_BOARD = 0xFFFFFFFF  # an event of no MIG instance in particular

# The commonest, in NVIDIA's words shortened (XID errors reference).
_MEANINGS: dict[int, str] = {
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
    meaning = _MEANINGS.get(xid)
    return f"XID {xid}" + (f" ({meaning})" if meaning else "")


class XidWatch:
    """Registers every board once; `take` hands out what came since. A watch that broke is UNKNOWN from then on."""

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu]) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._watched: set[int] = set()
        self._events = None
        try:
            self._events = nvml.xid_events()
        except NVMLError:
            return  # nothing is watched, so every answer is UNKNOWN
        for identity, board in {nvml.identity(gpu.board): gpu.board for gpu in gpus}.items():
            self._register(identity, board)

    def _register(self, identity: int, board: object) -> None:
        try:
            self._nvml.watch_xids(board, self._events)
        except NVMLError:
            return
        self._watched.add(identity)

    def take(self) -> list[list[int] | Absent]:
        """New XIDs of each GPU, in the order they were given."""
        new: list[tuple[int, int, int]] = []
        try:
            while self._watched and (event := self._nvml.next_xid(self._events)) is not None:
                new.append(event)
        except NVMLError:
            self._watched.clear()
        return [self._of(gpu, new) for gpu in self._gpus]

    def _of(self, gpu: Gpu, events: Sequence[tuple[int, int, int]]) -> list[int] | Absent:
        identity = self._nvml.identity(gpu.board)
        mine = [xid for board, instance, xid in events if board == identity and _concerns(gpu, instance)]
        return mine if mine or identity in self._watched else UNKNOWN


def _concerns(gpu: Gpu, instance: int) -> bool:
    return gpu.gpu_instance is None or instance in (gpu.gpu_instance, _WHOLE_BOARD)
