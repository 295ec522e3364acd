"""What a fleet may use of one machine: its GPUs and its host memory. A node of a cluster reports the same."""

from __future__ import annotations

from typing import NamedTuple


class VisibleGpu(NamedTuple):
    """A GPU, numbered among the visible ones. used_bytes: of all processes, and what the driver keeps for itself."""

    number: int
    name: str
    total_bytes: int
    used_bytes: int


class Machine(NamedTuple):
    """What a fleet may use: its GPUs, the driver's version ("" without one), and bytes of host memory."""

    gpus: tuple[VisibleGpu, ...]
    driver: str
    host_bytes: int
