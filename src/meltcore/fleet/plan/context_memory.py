"""Looks up the GPU memory that processes take beside their budgets: CUDA contexts, kernel code and driver memory.

`context_memory.json` has one row per GPU type and driver, which `benchmarks/context_memory.py` measures. Without a row
the plan uses assumed values, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import msgspec

from meltcore.common.sizes import MIB, size_text
from meltcore.engine.memory.memory_needs import peer_bytes

_TABLE = "context_memory.json"
_PROCESS_BYTES = 800 * MIB  # of an engine process of a task that was not measured


class ContextMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The bytes of GPU memory beside the budgets, for one GPU type and one driver.

    Args:
        gpu: NVML's name of the GPU, or "" for assumed values.
        driver: version of the driver, or "" for assumed values.
        driver_bytes: bytes of a GPU that the driver keeps without any process.
        processes: bytes that an engine process of each task takes beside its budget.
        nccl_bytes: bytes of NCCL's buffers of each tensor-parallel rank. They are assumed if the row does not have
            them.
        measured: date of the measurement.
    """

    gpu: str = ""
    driver: str = ""
    driver_bytes: int
    processes: Mapping[str, int]
    nccl_bytes: int = 1024 * MIB
    measured: str = ""
    is_other_driver: bool = False

    def process_bytes(self, task: str = "", ranks: int = 1) -> int:
        """Return the bytes that an engine process of this task takes beside its budget.

        The process is one of `ranks` tensor-parallel ranks. If there are several, it also has a buffer into which the
        others write.
        """
        return self.processes.get(task, _PROCESS_BYTES) + peer_bytes(ranks) + (self.nccl_bytes if ranks > 1 else 0)

    @property
    def nccl_note(self) -> str:
        """A sentence about the additional memory of tensor-parallel ranks."""
        two_rank_size, eight_rank_size = (size_text(peer_bytes(ranks)) for ranks in (2, 8))
        return (
            f"Each rank of a tensor-parallel engine takes {size_text(self.nccl_bytes)} more for NCCL, assumed, "
            f"and {two_rank_size} of two ranks to {eight_rank_size} of eight for what its peers write."
        )

    @property
    def note(self) -> str:
        """A sentence for the plan that says where the numbers come from."""
        low, high = (size_text(pick(self.processes.values() or [_PROCESS_BYTES])) for pick in (min, max))
        each = low if low == high else f"{low} to {high}"
        what = f"Of each process {each} for its CUDA context and kernels, and {size_text(self.driver_bytes)} of a GPU"
        if not self.gpu:
            return f"{what} for the driver, are assumed, not measured."
        other = "; this machine has another one" if self.is_other_driver else ""
        return f"{what} for the driver, were measured on {self.gpu} with driver {self.driver} ({self.measured}){other}."


ASSUMED = ContextMemory(
    driver_bytes=640 * MIB,  # a little more than what was measured on any GPU
    processes={},
)


def context_table() -> tuple[ContextMemory, ...]:
    """Return the rows of context_memory.json, which were measured."""
    text = (resources.files("meltcore.fleet.plan") / _TABLE).read_bytes()
    return msgspec.json.decode(text, type=tuple[ContextMemory, ...])


def find_contexts(gpu: str | None, driver: str = "") -> ContextMemory:
    """Return the row of a GPU type and driver. Without one, return a row of the type with another driver, or ASSUMED.

    `gpu` is NVML's name. If it is None, the plan is for a GPU size and not for a GPU type. The first row is then
    returned.
    """
    rows = context_table()
    if gpu is None:
        return rows[0] if rows else ASSUMED
    same = [row for row in rows if row.gpu == gpu]
    exact = [row for row in same if row.driver == driver]
    if exact:
        return exact[0]
    return msgspec.structs.replace(same[-1], is_other_driver=True) if same else ASSUMED
