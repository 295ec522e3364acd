"""What every check works on: the machine, its GPUs, the tier asked for, and what to hold figures against."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pynvml import NVMLError

from meltcore.hardware.expect import Baseline
from meltcore.hardware.node import Node, Telemetry
from meltcore.hardware.select import Gpu
from meltcore.results.certificate import Tier
from meltcore.results.snapshot import Snapshot

# The driver lists a program for a moment after its end.
_LEAVING_S = 3.0
_ASK_AGAIN_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Site:
    """`gpus` and `snapshot.gpus` have the same order, which is that of all positions.

    `interval_s`: between two samples of the telemetry. `hours`: of a soak.
    """

    node: Node
    gpus: Sequence[Gpu]
    snapshot: Snapshot
    tier: Tier
    telemetry: Telemetry
    folder: Path
    interval_s: float = 0.1
    hours: float = 0.0
    baseline: Baseline | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(range(len(self.gpus)))

    def environment(self) -> dict[str, str]:
        """Of a program that is to see these GPUs, in this order.

        NVLink multicast stays off: a program that is killed while it uses it can leave a whole node's fabric unusable.
        """
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(gpu.info.uuid for gpu in self.gpus),
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        }

    def busy(self) -> set[int]:
        """GPUs on which another program computes. Those of a check that has just ended get time to leave."""
        until_s = self.node.now_s() + _LEAVING_S
        while (found := self._with_processes()) and self.node.now_s() < until_s:
            self.node.sleep(_ASK_AGAIN_S)
        return found

    def _with_processes(self) -> set[int]:
        return {position for position in self.positions if self._processes(position)}

    def _processes(self, position: int) -> list[int]:
        try:
            return self.node.nvml.processes(self.gpus[position].handle)
        except NVMLError:
            return []  # the state check says that this cannot be read, and no certificate then passes

    def label(self, gpus: Sequence[int], between: str = " -> ") -> str:
        """ "GPU 3", "GPU 0 -> GPU 5", or "8 GPUs"."""
        if len(gpus) > 2:
            return f"{len(gpus)} GPUs"
        return between.join(self.snapshot.gpus[gpu].label for gpu in gpus)
