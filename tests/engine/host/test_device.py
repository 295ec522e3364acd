"""The current GPU of a thread, on which Triton launches and graphs are captured."""

from __future__ import annotations

import atexit
import os
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from cuda.bindings import driver

from meltcore.common.errors import ConfigError
from meltcore.engine.generation import engine as engine_file
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.host import device as device_file
from meltcore.engine.host.device import byte_budget, choose_device, default_batched_tokens, exit_process, has_mps
from meltcore.settings.config import EngineConfig


class Loading(Exception):  # noqa: N818 - not an error
    """The engine has reached the loading of its weights."""


@pytest.mark.parametrize(
    ("device", "current"),
    [
        (torch.device("cuda", 1), [torch.device("cuda", 1)]),
        (torch.device("cuda"), []),
        (torch.device("cpu"), []),
        (torch.device("cpu", 0), []),
    ],
)
def test_named_gpu_is_current_before_anything_is_loaded(
    device: torch.device, current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_current: list[torch.device] = []

    def load(*_: object) -> None:
        raise Loading

    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(engine_file, "choose_device", lambda *_, **__: device)
    monkeypatch.setattr(engine_file, "load", load)
    with pytest.raises(Loading):
        GenerationEngine(EngineConfig(model="meltcore/sums"))
    assert made_current == current


@pytest.mark.parametrize(
    ("gpu", "total_mib", "server", "offline"),
    [
        ("RTX 3060", 12_044, 2048, 2048),
        ("RTX 4080", 16_060, 2048, 2048),
        ("16 GiB", 16_384, 8192, 8192),
        ("RTX 4090", 24_209, 8192, 8192),
        ("RTX 5090", 32_109, 8192, 8192),
        ("32 GiB", 32_768, 8192, 16_384),
        ("H100", 81_090, 8192, 16_384),
        ("H200", 143_162, 8192, 16_384),
    ],
)
def test_steps_of_a_gpu_with_little_memory_are_shorter(
    gpu: str, total_mib: int, server: int, offline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their activations must fit in the memory reserve, which is a fraction of the memory."""
    asked: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(total_memory=total_mib * 2**20)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device = torch.device("cuda", 1)
    assert default_batched_tokens(device) == server, gpu
    assert default_batched_tokens(device, is_offline=True) == offline, gpu
    assert asked == [device, device]


def test_steps_of_a_cpu_have_2048_tokens() -> None:
    assert [default_batched_tokens(torch.device("cpu"), is_offline=is_offline) for is_offline in (False, True)] == [
        2048,
        2048,
    ]


@pytest.mark.parametrize(("device", "owner"), [("cpu", "the host"), ("cuda", "NVIDIA H200")])
def test_more_memory_than_the_device_has_is_refused(device: str, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 3 * 2**30
    monkeypatch.setattr(device_file, "host_total_bytes", lambda: total if device == "cpu" else 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    fits = EngineConfig(model="m", memory_bytes=total)
    assert byte_budget(fits, torch.device(device), 0) == total
    with pytest.raises(ConfigError, match=rf"^--memory 1,024 GiB is more than {owner} has: 3 GiB$"):
        byte_budget(EngineConfig(model="m", memory_bytes=2**40), torch.device(device), 0)
    with pytest.raises(ConfigError):
        byte_budget(EngineConfig(model="m", memory_bytes=total + 1), torch.device(device), 0)


@pytest.mark.parametrize(("setting", "tokens"), [(None, 2048), (96, 96)])
def test_engine_takes_the_setting_or_the_default(setting: int | None, tokens: int) -> None:
    config = EngineConfig(model="meltcore/sums", device="cpu", memory_bytes=2**29, max_num_batched_tokens=setting)
    assert GenerationEngine(config).scheduler.max_num_batched_tokens == tokens


class Ended(BaseException):
    """The process has ended without teardown, with this exit status."""


@pytest.mark.parametrize("uses_gpu", [False, True])
def test_process_that_used_no_gpu_exits_without_teardown(
    uses_gpu: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end(status: int) -> NoReturn:
        raise Ended(status)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_gpu)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: print("exit functions"))
    with pytest.raises(SystemExit if uses_gpu else Ended, match="3"):
        exit_process(3)
    assert capfd.readouterr().out == ("" if uses_gpu else "exit functions\n")


@pytest.mark.parametrize(("error", "value", "found"), [(0, 1, True), (0, 0, False), (1, 0, False)])
def test_mps_is_what_the_driver_says_and_absent_where_it_does_not_know(
    error: int, value: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def get_attribute(attribute: object, index: int) -> tuple[driver.CUresult, int]:
        asked.append((attribute, index))
        return driver.CUresult(error), value

    monkeypatch.setattr(driver, "cuDeviceGetAttribute", get_attribute)
    assert has_mps(torch.device("cuda", 3)) is found
    assert asked == [(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 3)]
    assert not has_mps(torch.device("cpu"))


@pytest.mark.parametrize(
    "torch_error", [RuntimeError("Found no NVIDIA driver."), AssertionError("no CUDA in this build")]
)
@pytest.mark.parametrize("gpus", ["0", "GPU-a,MIG-b"])
def test_gpu_that_torch_cannot_use_is_no_reason_to_take_the_cpu(
    torch_error: Exception, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> NoReturn:
        raise torch_error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    names, reason = gpus.replace(",", ", "), str(torch_error).rstrip(".")
    with pytest.raises(
        ConfigError, match=rf"--device auto: there is GPU {names}, and torch .* cannot use it: {reason};"
    ):
        choose_device("auto")
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == torch.device("cpu")
