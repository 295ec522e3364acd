"""Available host memory under control-group limits, and what the allocators return."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meltcore.common.errors import ConfigError
from meltcore.common.host_memory import host_available_bytes, host_total_bytes, trim_memory

MIB = 2**20
HOST_MIB = 8192


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {HOST_MIB * 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, used_mib: int, cached_mib: int = 0) -> dict[str, str]:
    """The files of a group of version 2. Half of what it has cached was used lately."""
    stat = f"anon 1\nfile 2\ninactive_file {cached_mib * MIB // 2}\nactive_file {cached_mib * MIB // 2}\n"
    top = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {f"{top}/memory.max": limit, f"{top}/memory.current": str(used_mib * MIB), f"{top}/memory.stat": stat}


def group_v1(folder: str, limit_bytes: int, used_mib: int, cached_mib: int = 0) -> dict[str, str]:
    stat = f"cache 1\ninactive_file 0\ntotal_inactive_file {cached_mib * MIB}\ntotal_active_file 0\n"
    top = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{top}/memory.limit_in_bytes": f"{limit_bytes}\n",
        f"{top}/memory.usage_in_bytes": f"{used_mib * MIB}\n",
        f"{top}/memory.stat": stat,
    }


V1_UNLIMITED = 2**63 - 4096
V1 = "9:pids:/\n4:cpu,memory:/jobs/one\n0::/\n"


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({}, HOST_MIB),
        ({"proc/self/cgroup": "0::/\n"}, HOST_MIB),  # the host's first group has no limit to read
        ({"proc/self/cgroup": "0::/\n", **group("", "max", 100)}, HOST_MIB),
        ({"proc/self/cgroup": "0::/\n", **group("", str(1024 * MIB), 100)}, 924),
        ({"proc/self/cgroup": "0::/\n", **group("", str(10 * HOST_MIB * MIB), 100)}, HOST_MIB),
        # What is cached of files is given up when it is needed.
        ({"proc/self/cgroup": "0::/\n", **group("", str(1024 * MIB), 1000, cached_mib=600)}, 624),
        ({"proc/self/cgroup": "0::/\n", **group("", str(1024 * MIB), 1030)}, 0),
        # Groups that ours is part of hold for us too.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                **group("a/b", str(2048 * MIB), 100),
                **group("a", str(1024 * MIB), 300),
                **group("", "max", 0),
            },
            724,
        ),
        ({"proc/self/cgroup": "0::/a/b\n", **group("a/b", "max", 0), **group("c", "4096", 0)}, HOST_MIB),
        # Seen from a container, whose mount begins at its own group.
        ({"proc/self/cgroup": "0::/kubepods/pod7\n", **group("", str(512 * MIB), 12)}, 500),
        ({"proc/self/cgroup": "0::/../pod7\n", **group("", str(512 * MIB), 12)}, 500),
        ({"proc/self/cgroup": V1, **group_v1("jobs/one", 1024 * MIB, 24, cached_mib=8)}, 1008),
        ({"proc/self/cgroup": V1, **group_v1("", 1024 * MIB, 24)}, 1000),
        ({"proc/self/cgroup": V1, **group_v1("jobs/one", V1_UNLIMITED, 24)}, HOST_MIB),
        ({"proc/self/cgroup": V1, **group_v1("jobs/one", V1_UNLIMITED, 24), **group_v1("jobs", 64 * MIB, 60)}, 4),
    ],
)
def test_smaller_of_the_hosts_memory_and_what_our_groups_may_still_take(
    tmp_path: Path, files: dict[str, str], expected_mib: int
) -> None:
    assert host_available_bytes(write(tmp_path, files)) == expected_mib * MIB


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({}, HOST_MIB),
        ({"proc/self/cgroup": "0::/\n", **group("", "max", 100)}, HOST_MIB),
        ({"proc/self/cgroup": "0::/\n", **group("", str(1024 * MIB), 1000)}, 1024),
        ({"proc/self/cgroup": V1, **group_v1("jobs/one", V1_UNLIMITED, 24), **group_v1("jobs", 64 * MIB, 60)}, 64),
    ],
)
def test_total_is_the_smaller_of_the_hosts_memory_and_the_limits_of_our_groups(
    tmp_path: Path, files: dict[str, str], expected_mib: int
) -> None:
    root = write(tmp_path, {"proc/meminfo": f"MemTotal: {HOST_MIB * 1024} kB\nMemAvailable: 1 kB\n", **files})
    assert host_total_bytes(root) == expected_mib * MIB


def test_host_that_does_not_say_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set --memory"):
        host_available_bytes(write(tmp_path, {"proc/meminfo": "MemTotal: 99 kB\n"}))


def test_this_host_says() -> None:
    assert host_available_bytes() > 0


def test_give_back_memory_clears_the_type_cache() -> None:
    names = ["".join(["conj", "ugate"]) for _ in range(100)]  # equal strings, each an object of its own
    held = list(map(sys.getrefcount, names))
    assert all(getattr(1, name)() == 1 for name in names)
    assert sum(map(sys.getrefcount, names)) > sum(held), "this interpreter keeps no names"
    trim_memory()
    assert list(map(sys.getrefcount, names)) == held
