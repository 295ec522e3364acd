"""Finds the CPU cores near a GPU, and divides them among the processes that use it.

A core here is a physical one: the logical CPUs (hyperthreads) that share its caches, as a tuple of their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

SYSFS = Path("/sys")
# The thread that runs the steps of an engine, the threads of its sockets and of grammars, and one that is free.
LEAST_CPUS = 4


def parse_cpus(text: str) -> set[int]:
    """Parse the kernel's list of CPUs, such as `0-3,8`."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


def format_cpus(cpus: Collection[int]) -> str:
    """Return numbers of CPUs in the form of the kernel's list, which is empty without any."""
    ordered = sorted(cpus)
    ends = [0, *(at for at, (one, other) in enumerate(pairwise(ordered), 1) if other != one + 1), len(ordered)]
    spans = [(ordered[first], ordered[end - 1]) for first, end in pairwise(ends) if first < end]
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def near_cores(bus_id: str, sysfs: Path = SYSFS) -> list[tuple[int, ...]]:
    """Return the cores on the NUMA node of a GPU, each with the CPUs that this process may use.

    `bus_id` is the GPU's PCI bus id in the kernel's form. The result is empty if the kernel does not list the CPUs, or
    if the affinity of this process (taskset, cpusets of a container) has none of them.
    """
    text = _read(sysfs / "bus/pci/devices" / bus_id / "local_cpulist")
    return sorted(set(_cores(parse_cpus(text) & os.sched_getaffinity(0), sysfs)))


def _cores(cpus: set[int], sysfs: Path) -> Iterator[tuple[int, ...]]:
    for cpu in cpus:
        siblings = parse_cpus(_read(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or {cpu}
        yield tuple(sorted(siblings & cpus))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def core_share(cores: Sequence[tuple[int, ...]], index: int, count: int) -> list[int]:
    """Return the CPUs for the process `index` of `count` processes that use the same cores.

    Each process has cores of its own. If these were fewer than LEAST_CPUS for a process, all share all cores.
    """
    if len(cores) // count * min(map(len, cores), default=0) < LEAST_CPUS:
        first, end = 0, len(cores)
    else:
        first, end = len(cores) * index // count, len(cores) * (index + 1) // count
    return [cpu for core in cores[first:end] for cpu in core]
