"""What a fleet may use of one machine: its GPUs and its host memory. A node of a cluster reports the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meltcore.errors import ConfigError


class VisibleGpu(NamedTuple):
    """A GPU, numbered among the visible ones. used_bytes: of all processes, and what the driver keeps for itself.

    problem: why NVML tells no memory of it, as for one that shares the memory of the host; its bytes are 0 then.
    """

    number: int
    name: str
    total_bytes: int
    used_bytes: int
    problem: str = ""

    def of_known_size(self, limit_bytes: int) -> VisibleGpu:
        """Return this GPU, with the memory that a fleet may use of it where the driver tells none.

        Raises ConfigError where that is not named either (0).
        """
        if self.problem and not limit_bytes:
            wanted = f"gpus: [{{id: {self.number}, memory: ...}}]"
            raise ConfigError(f"{self.problem}; name what the fleet may use of it as {wanted}")
        return self._replace(total_bytes=limit_bytes) if self.problem else self


class Machine(NamedTuple):
    """What a fleet may use: its GPUs, the driver's version ("" without one), and bytes of host memory.

    problem: why there may be GPUs that cannot be used, so that only models on the CPU can be planned.
    """

    gpus: tuple[VisibleGpu, ...]
    driver: str
    host_bytes: int
    problem: str = ""

    def checked(self) -> Machine:
        """Return this machine. Raises ConfigError for one with a problem."""
        if self.problem:
            raise ConfigError(self.problem)
        return self


def gpu_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the environment in which CUDA sees these GPUs only, by number or UUID.

    Without the order CUDA numbers the fastest GPU first, and NVML, of which the numbers are, the first on the PCI bus.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
