"""Lists shared memory and SM counts of GPU architectures, for which kernels are compiled on machines without a GPU.

This module imports neither torch nor Triton, because scripts and tests read it on machines without both.
"""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    """A GPU architecture.

    `gpu_type` is a large GPU of this architecture, with `sms` SMs. A thread block has `shared_kib` KiB of shared
    memory.
    """

    shared_kib: int
    sms: int
    gpu_type: str


# By compute capability as 10 * major + minor (CUDA C++ Programming Guide, compute capabilities; data sheets).
ARCHITECTURES = {
    80: Architecture(163, 108, "A100"),
    86: Architecture(99, 84, "RTX A6000"),
    89: Architecture(99, 142, "L40S"),
    90: Architecture(227, 132, "H100 SXM, H200"),
    100: Architecture(227, 148, "B200"),
    120: Architecture(99, 170, "GeForce RTX 5090"),
}
# Not compiled in tests. The launches of an architecture that is in neither table keep to the least shared memory.
_UNTESTED_SHARED_KIB = {87: 163, 103: 227, 110: 227}
_MIN_SHARED_KIB = 99


def shared_kib(capability: int) -> int:
    """Return the shared memory that one thread block may use, in KiB."""
    architecture = ARCHITECTURES.get(capability)
    return architecture.shared_kib if architecture else _UNTESTED_SHARED_KIB.get(capability, _MIN_SHARED_KIB)
