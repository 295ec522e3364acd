"""The GPUs that a machine has, by its environment, its files or its driver: never none where there may be one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pynvml
import pytest

from meltcore.common.errors import ConfigError
from meltcore.common.gpus import machine
from meltcore.common.gpus.machine import named_gpus, visible_gpus
from meltcore.common.options import add_options
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.run.engines import place_replicas
from meltcore.settings.fleet_spec import FleetSpec, ModelSection


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The driver of the machine, for the test to set: `gpus`, or the `error` with which it does not start."""
    found: dict[str, Any] = {"gpus": 1, "error": None}

    def start() -> None:
        if found["error"] is not None:
            raise pynvml.NVMLError(found["error"])

    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: found["gpus"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


DRIVER_FILES = ["dxg", "nvidiactl", "nvidia-caps", "nvidia-uvm", "nvhost-gpu", "nvhost-ctrl-gpu", "nvgpu", "nvmap"]


@pytest.mark.parametrize("name", DRIVER_FILES)
def test_gpus_without_device_files_of_their_own_are_counted_by_the_driver(
    name: str, driver: dict[str, Any], tmp_path: Path
) -> None:
    """As under WSL2, on a Jetson, and in a container that was given a part of the files."""
    assert visible_gpus(tmp_path) == []
    (tmp_path / name).mkdir() if name == "nvidia-caps" else (tmp_path / name).touch()
    driver["error"] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    message = rf"has .*/{name} of a GPU's driver, and its GPUs cannot be counted: .*Not Found; set CUDA_VISIBLE_DEVICES"
    with pytest.raises(ConfigError, match=message):
        visible_gpus(tmp_path)
    driver |= {"error": None, "gpus": 2}
    assert visible_gpus(tmp_path) == ["0", "1"]


def test_driver_that_has_no_gpu_leaves_the_cpu(driver: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    driver["gpus"] = 0
    assert visible_gpus(tmp_path) == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_server_does_not_start_on_the_cpu_where_gpus_cannot_be_counted(
    replicas: int, driver: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dxg").touch()
    driver["error"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    monkeypatch.setattr(machine.visible_gpus, "__defaults__", (tmp_path,))
    models = {name: ModelSection(checkpoint="m", device=name, replicas=replicas) for name in ("auto", "cpu")}
    fleet = PlacedFleet(FleetSpec(models=models))
    with pytest.raises(ConfigError, match="cannot be counted: Driver Not Loaded"):
        place_replicas(fleet, "auto")
    assert len(place_replicas(fleet, "cpu")) == replicas
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(place_replicas(fleet, "auto")) == replicas


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0,1", ["0", "1"]),
        (" 3 , GPU-a,MIG-b", ["3", "GPU-a", "MIG-b"]),
        ("1,-1,2", ["1"]),
        ("1,,2", ["1"]),
        ("", []),
        ("NoDevFiles", []),
        ("2,none", ["2"]),
    ],
)
def test_named_gpus_are_those_that_cuda_reads(value: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == named_gpus(value) == names


@pytest.mark.parametrize("name", ["０", "१", "²", "1_0", "+1", "0x1", "cuda:0", "all"])
@pytest.mark.parametrize("before", ["", "0,"])
def test_words_that_are_no_gpus_are_refused(name: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before + name)
    with pytest.raises(ConfigError) as error:
        visible_gpus()
    assert f"{name!r} is neither a number nor a UUID" in str(error.value)


@pytest.mark.parametrize("device", ["cuda:x", "cuda:１", "cuda:1_0", "cuda:-1", "cuda:", "gpu", "CUDA"])
def test_devices_of_another_form_are_refused(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ModelSection, "device")
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", device])
    assert f"argument --device: {device}: must be auto, cpu, cuda or cuda:N" in capsys.readouterr().err
