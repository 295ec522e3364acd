"""Manages host memory: reports total and available bytes, and limits the free memory that allocators keep.

Allocators return memory in large units: the C library 4 KiB pages, Python's allocator arenas of 1 MiB. A few small
objects that outlive a burst can therefore hold far more than their own size.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from meltcore.common.errors import ConfigError

# Parameter numbers of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# glibc has these; with another C library the functions below that use them do nothing.
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_madvise = ctypes.CDLL(None, use_errno=True).madvise

# glibc gives threads arenas of their own, and `malloc_trim` keeps the free end of all but the first. With several
# arenas 8 MB of what ZeroMQ's thread read of 10,000 prompts stayed with the engine; with one, nothing (2026-11-21).
ONE_ARENA_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # for the environment of a process


def use_one_arena() -> None:
    """Limit glibc to one arena in this process.

    Call this before the first thread starts, because existing arenas stay.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step.

    By default glibc returns it, and later pays page faults to get it back. The bundled model on a CPU at 256 sequences
    per step took 4.7 s of CPU time without and 3.2 s with it (2026-11-21).
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc accepts
        _mallopt(_M_TRIM_THRESHOLD, 2**30)


def trim_memory() -> None:
    """Return free memory to the system. Call this while the process is idle, because it takes up to 0.1 s."""
    # CPython's type cache maps the address of a method's name to the method, and keeps the name alive. C code often
    # creates the name for each call (numpy's `cumsum`, for example), so a burst leaves up to 4096 strings.
    sys._clear_type_cache()
    gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)


def drop_pages(address: int, size: int) -> int:
    """Return the physical memory of all whole pages in a range of private memory to the system. Return its bytes.

    The addresses stay valid, and the pages have zeros when they are used next. Raises OSError if the system refuses.
    """
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return 0
    if _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"madvise of {end - start} bytes: {os.strerror(error_number)}")
    return end - start


def host_available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can still use.

    The value is MemAvailable of /proc/meminfo, or less if the limits of the process's control groups leave less. `root`
    is the root of the file system with /proc and /sys. Raises ConfigError if /proc/meminfo has no MemAvailable.
    """
    available = _meminfo_bytes(root, "MemAvailable")
    if available is None:
        raise ConfigError("/proc/meminfo has no MemAvailable line; set --memory")
    return min([available, *(limit.available_bytes for limit in _cgroup_limits(root))])


def host_total_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can use at most.

    The value is MemTotal of /proc/meminfo, or less if the limits of the process's control groups are lower. `root` is
    the root of the file system with /proc and /sys. Raises ConfigError if /proc/meminfo has no MemTotal.
    """
    total = _meminfo_bytes(root, "MemTotal")
    if total is None:
        raise ConfigError("/proc/meminfo has no MemTotal line")
    return min([total, *(limit.limit_bytes for limit in _cgroup_limits(root))])


def _meminfo_bytes(root: Path, name: str) -> int | None:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


class _CgroupMemory(NamedTuple):
    """The limit of a control group in bytes, and the bytes that are left of it."""

    limit_bytes: int
    available_bytes: int


class _CgroupFiles(NamedTuple):
    """The folder where a version of control groups is mounted, and the names of the files that each group has there."""

    mount_folder: str
    limit_file: str
    usage_file: str
    cache_fields: tuple[
        str, ...
    ]  # fields of memory.stat: page cache, which the kernel reclaims before it kills a process


# https://docs.kernel.org/admin-guide/cgroup-v2.html ("Memory Interface Files") and cgroup-v1/memory.html, keyed by the
# name of the controller in /proc/self/cgroup (empty in version 2). MemAvailable counts the page cache in the same way.
_CGROUP_FILES = {
    "": _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": _CgroupFiles(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def _cgroup_limits(root: Path) -> Iterator[_CgroupMemory]:
    """Yield the memory limits of all control groups of this process, and of their ancestors."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in _CGROUP_FILES:
                    yield from _limits_of_group(_CGROUP_FILES[controller], root, group)


def _limits_of_group(files: _CgroupFiles, root: Path, group: str) -> Iterator[_CgroupMemory]:
    """Yield the limits of a control group and its ancestors, up to the root of the mount.

    In a container the mount often begins at the container's own group, while `group` counts from the host's root.
    Groups that do not exist in the mount are skipped, and the root of the mount is always read.
    """
    mount_root = root / files.mount_folder
    group_path = mount_root / group.lstrip("/")
    for folder in (group_path, *group_path.parents):
        with suppress(OSError, ValueError):  # no such group, or "max": no limit
            limit_bytes, used_bytes = (
                int((folder / name).read_text()) for name in (files.limit_file, files.usage_file)
            )
            memory_stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached_bytes = sum(int(memory_stat.get(name, 0)) for name in files.cache_fields)
            yield _CgroupMemory(limit_bytes, max(0, limit_bytes - used_bytes + cached_bytes))
        if folder == mount_root:
            return
