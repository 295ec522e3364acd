"""The cores near a GPU, from a scripted sysfs, and how engines share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meltcore.common.cores import LEAST_CPUS, core_share, format_cpus, near_cores, parse_cpus

BUS_ID = "0000:1b:00.0"


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("5", {5}), ("0-3,8", {0, 1, 2, 3, 8}), ("1,3-4,96-97", {1, 3, 4, 96, 97})]
)
def test_list_of_cpus_is_read_and_written(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert format_cpus(cpus) == text


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two NUMA nodes: CPUs 0 to 7 and 8 to 15 on the first, siblings eight apart; the GPU is on the first."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    device = tmp_path / "bus/pci/devices" / BUS_ID
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("0-15\n")
    for cpu in range(16):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def test_cores_near_a_gpu_are_those_of_its_node_that_this_process_may_use(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert near_cores(BUS_ID, sysfs) == [(cpu, cpu + 8) for cpu in range(8)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 11, 40})
    assert near_cores(BUS_ID, sysfs) == [(2,), (3, 11)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {40})
    assert near_cores(BUS_ID, sysfs) == [], "a container on the other node is left where it is"
    assert near_cores("0000:ff:00.0", sysfs) == []


def test_engines_get_whole_cores_of_their_own_or_share_all(sysfs: Path) -> None:
    cores = near_cores(BUS_ID, sysfs)
    assert core_share(cores, 0, 1) == [cpu for core in cores for cpu in core]
    three = [core_share(cores, index, 3) for index in range(3)]
    assert three == [[0, 8, 1, 9], [2, 10, 3, 11, 4, 12], [5, 13, 6, 14, 7, 15]]
    assert min(map(len, three)) == LEAST_CPUS
    assert {tuple(core_share(cores, index, 5)) for index in range(5)} == {tuple(core_share(cores, 0, 1))}, "too few"
    assert core_share([], 0, 2) == []
