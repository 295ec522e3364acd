"""The cores and threads of engines: those near their GPUs, divided among the engines there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from meltcore.common.errors import ConfigError
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.processes.engine_process import LocalEngineProcess
from meltcore.fleet.run import engines
from meltcore.fleet.run.engines import LaunchSettings, LocalLauncher, place_replicas
from meltcore.settings.config import EngineConfig, SharingSection
from meltcore.settings.fleet_file import parse_fleet

# Two GPUs on one NUMA node, and one on another, whose two cores have two CPUs each.
NEAR = {"bus 0": [(cpu,) for cpu in range(16)], "bus 1": [(cpu,) for cpu in range(16)], "bus 2": [(20, 21), (22, 23)]}
FLEET = """models:
  a: {checkpoint: a, device: [0]}
  b: {checkpoint: b, device: [0]}
  c: {checkpoint: c, device: [1]}
  d: {checkpoint: d, device: [2]}
  e: {checkpoint: e, device: [1, 2], tensor_parallel_size: 2}
"""
ON_CPU = "  f: {checkpoint: f, device: cpu}\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(engines, "near_cores", NEAR.__getitem__)
    monkeypatch.setattr(engines, "bus_ids", lambda: {str(gpu): f"bus {gpu}" for gpu in range(3)})


def launch(text: str, report: Callable[[str], None] = print) -> dict[str, tuple[list[int], str | None]]:
    """Return the CPUs and the OMP_NUM_THREADS of the engine of each model of a fleet.yaml."""
    fleet = PlacedFleet(parse_fleet(text))
    settings = Mock(spec=LaunchSettings, sharing=SharingSection(means="none"), sockets=Path(), client_count=1)
    settings.fleet, settings.command, settings.engine = lambda: fleet, (), lambda replica: replica.engine
    launcher = LocalLauncher(settings, report)
    asyncio.run(launcher.connect())
    found = {}
    for name in fleet.spec.engines:
        engine = launcher.new_engine(place_replicas(fleet, name)[0], "standard", {}, print)
        assert isinstance(engine, LocalEngineProcess)
        found[name] = sorted(engine.cpus), engine._environment.get("OMP_NUM_THREADS")
    return found


def test_engines_divide_the_cores_near_their_gpus() -> None:
    cores = launch(FLEET)
    assert [cores[name] for name in "abc"] == [
        ([0, 1, 2, 3], "4"),
        ([4, 5, 6, 7], "4"),
        ([8, 9, 10, 11], "4"),
    ]
    assert cores["d"] == ([20, 21, 22, 23], "2"), "too few cores for two engines: both have all, and half the threads"
    assert cores["e"] == ([12, 13, 14, 15, 20, 21, 22, 23], "6"), "those of both of its GPUs"
    assert launch("models: {a: {checkpoint: a}}")["a"] == (list(range(16)), "16"), "a fleet of one has the whole node"


def test_number_of_threads_that_the_user_sets_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(FLEET)["a"] == ([0, 1, 2, 3], None)


def test_engines_on_the_cpu_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3, 4, 5})
    assert launch(FLEET + ON_CPU)["f"] == ([], "6")
    monkeypatch.setattr(engines, "bus_ids", pytest.fail)
    assert launch("models:\n" + ON_CPU)["f"] == ([], "6"), "nothing is asked of a driver"


def test_engines_whose_gpus_cannot_be_read_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, str]:
        raise ConfigError("NVML gave Timeout")

    monkeypatch.setattr(engines, "bus_ids", fail)
    lines: list[str] = []
    assert list(launch(FLEET, lines.append).values()) == [([], None)] * 5
    assert lines == ["engines are not pinned to the cores near their GPUs: NVML gave Timeout"]


def test_engine_is_pinned_before_it_has_its_settings(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    script = 'read settings; grep Cpus_allowed_list /proc/self/status > "$0/allowed"'
    command = ("sh", "-c", script)

    async def live() -> None:
        engine = LocalEngineProcess(
            EngineConfig(model="m"), command, print, directory=tmp_path, client_count=1, cpus={cpu}
        )
        await engine._launch()
        await engine._wait_exit()
        await engine.leave()

    asyncio.run(live())
    assert (tmp_path / "allowed").read_text().split() == ["Cpus_allowed_list:", str(cpu)]
