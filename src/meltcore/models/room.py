"""Whether a network's weights fit into the memory of their device: asked before they are allocated.

A GPU that is too small says so in words of its allocator; a host gives more memory than it has, and then kills whoever
uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from meltcore.errors import ConfigError

GIB = 2**30


def require_room(name: str, weight_bytes: int, device: torch.device, ranks: int) -> None:
    """Raises ConfigError where `device` has too little free. Ranks on a CPU, each with so much, share its memory."""
    if device.type == "cpu":
        needed, free = weight_bytes * ranks, host_available_bytes()
        where, advice = "of host memory are available", "a smaller --dtype or model takes less"
    elif device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, to be used again
        needed, free = weight_bytes, torch.cuda.mem_get_info(device)[0] + kept
        where, advice = f"are free on {device}", "--tp shares them out among GPUs"
    else:  # tensors without memory
        return
    if needed > free:
        raise ConfigError(
            f"{name}: the weights take {needed / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB {where}; {advice}"
        )


def host_available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable of /proc/meminfo, or what the limits of our control groups leave where that is less; in bytes.

    root: of the file system with /proc and /sys. Raises ConfigError where /proc/meminfo does not say.
    """
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_left_by_groups(root)])
    raise ConfigError("/proc/meminfo has no MemAvailable line; set --memory")


class _GroupFiles(NamedTuple):
    """Where a version of control groups keeps its groups, and what the files of one are called."""

    folder: str
    limit: str
    used: str
    cached: tuple[str, ...]  # fields of memory.stat: pages of files, which the kernel gives up before it kills


# https://docs.kernel.org/admin-guide/cgroup-v2.html ("Memory Interface Files") and cgroup-v1/memory.html; by the name
# of the controller in /proc/self/cgroup, which is none in version 2. MemAvailable counts cached files the same way.
_GROUP_FILES = {
    "": _GroupFiles("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": _GroupFiles(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def _left_by_groups(root: Path) -> Iterator[int]:
    """Bytes that each limit leaves which holds for us: of our own group, and of those that it is part of."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in _GROUP_FILES:
                    yield from _left_by(_GROUP_FILES[controller], root, group)


def _left_by(files: _GroupFiles, root: Path, group: str) -> Iterator[int]:
    """In a container the mount often begins at our group, while `group` counts from the host's first: what is not there
    has no say, and the mount itself is looked at in any case."""
    top = root / files.folder
    own = top / group.lstrip("/")
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # no such group, or "max": no limit
            limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(0, limit - used + sum(int(stat.get(name, 0)) for name in files.cached))
        if folder == top:
            return
