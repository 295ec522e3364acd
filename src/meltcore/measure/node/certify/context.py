"""Defines the context of all checks: the machine, its GPUs, the tier, the telemetry and the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pynvml import NVMLError

from meltcore.common.gpus.select import GpuDevice
from meltcore.measure.documents.node import Snapshot, Tier
from meltcore.measure.node.certify.expectations import Baseline
from meltcore.measure.node.node import Node, Telemetry

# The driver still lists a process for a moment after its end.
_EXIT_LIMIT_S = 3.0
_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class CertifyContext:
    """The node, GPUs and settings that all checks share. A GPU index is an index into `gpus` and into `snapshot.gpus`.

    `interval_s` is the sampling interval of the telemetry, and `hours` the duration of a soak.
    """

    node: Node
    gpus: Sequence[GpuDevice]
    snapshot: Snapshot
    tier: Tier
    telemetry: Telemetry
    folder: Path
    interval_s: float = 0.1
    hours: float = 0.0
    baseline: Baseline | None = None

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The indices of all GPUs."""
        return tuple(range(len(self.gpus)))

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a program that must see exactly `gpus`, in this order.

        NVLink multicast stays off: a program that is killed while it uses multicast can leave the fabric of a whole
        node unusable.
        """
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(gpu.info.uuid for gpu in self.gpus),
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        }

    def busy(self) -> set[int]:
        """Return the GPUs that another program uses. Processes of the previous check get time to exit."""
        deadline_s = self.node.now_s() + _EXIT_LIMIT_S
        while True:
            busy_gpus = {gpu_index for gpu_index in self.gpu_indices if self._read_processes(gpu_index)}
            if not busy_gpus or self.node.now_s() >= deadline_s:
                return busy_gpus
            self.node.sleep(_POLL_S)

    def _read_processes(self, gpu_index: int) -> list[int]:
        try:
            return self.node.nvml.processes(self.gpus[gpu_index].handle)
        except NVMLError:
            return []  # the state check reports that this is unreadable, so no certificate passes

    def label(self, gpus: Sequence[int], separator: str = " -> ") -> str:
        """Return the GPUs as text: "GPU 3", "GPU 0 -> GPU 5" or "8 GPUs"."""
        if len(gpus) > 2:
            return f"{len(gpus)} GPUs"
        return separator.join(self.snapshot.gpus[gpu].label for gpu in gpus)
