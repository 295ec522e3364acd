"""The GPUs of this machine as NVML and CUDA count them, and what stands in the way of their use."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pynvml
import pytest

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.gpus.driver import NvmlWithTimeout
from meltcore.common.sizes import GIB
from meltcore.fleet.plan import machine
from meltcore.fleet.plan.machine import bus_ids, process_bytes, read_gpus, read_machine
from meltcore.fleet.plan.planned import FleetPlanner
from meltcore.fleet.run.engines import place_replicas

DUMMY = "checkpoint: none/here, shapes: Qwen/Qwen3-0.6B, load_format: dummy, max_model_len: 2048, max_num_seqs: 4"


class Memory(NamedTuple):
    total: int
    used: int


@dataclass(eq=False)
class Card:
    """A GPU as NVML describes it. gib: None where it tells no memory. mig: UUIDs of its parts, "" where unused."""

    name: str = "NVIDIA H200"
    gib: float | None = 141
    mig: list[str] = field(default_factory=list)
    denied: bool = False
    lost: bool = False


def fail(code: int) -> Any:
    raise pynvml.NVMLError(code)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """The GPUs of the machine, for the test to fill; CUDA_VISIBLE_DEVICES is not set."""
    cards: list[Card] = []

    def handle(index: int) -> Card:
        if index >= len(cards):
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if cards[index].lost:
            fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        return fail(pynvml.NVML_ERROR_NO_PERMISSION) if cards[index].denied else cards[index]

    def memory(card: Card) -> Memory:
        return fail(pynvml.NVML_ERROR_NOT_SUPPORTED) if card.gib is None else Memory(int(card.gib * GIB), 2**20)

    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetName": lambda card: card.name.encode(),
        "nvmlDeviceGetUUID": lambda card: card if isinstance(card, str) else f"GPU-{cards.index(card)}a",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMigMode": lambda card: (1, 1) if card.mig else fail(pynvml.NVML_ERROR_NOT_SUPPORTED),
        "nvmlDeviceGetMaxMigDeviceCount": lambda card: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda card, index: (
            card.mig[index] if index < len(card.mig) and card.mig[index] else fail(pynvml.NVML_ERROR_NOT_FOUND)
        ),
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    glob = Path.glob

    def found(folder: Path, pattern: str) -> list[Path]:
        return [Path("/dev/nvidia")] * len(cards) if folder == Path("/dev") else [*glob(folder, pattern)]

    monkeypatch.setattr(Path, "glob", found)
    return cards


def test_gpus_are_read_as_cuda_names_them(nvml: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml += [Card(gib=1), Card(gib=2), Card(gib=3)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-0")
    gpus, driver = read_gpus()
    assert driver == "570.1"
    assert [(gpu.number, gpu.total_bytes // GIB) for gpu in gpus] == [(0, 3), (1, 1)]
    for nothing in ("", "-1", "NoDevFiles", "none", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert read_gpus() == ((), "")


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("GPU-", "names 'GPU-', which matches 3 GPUs"),
        ("GPU-9", "names 'GPU-9', which matches 0 GPUs"),
        ("0,3", "names GPU 3, and the driver has 3 GPUs, numbered from 0"),
        ("1,1", "names GPU 1 twice; CUDA sees no GPU then"),
        ("1,GPU-1a", "names GPU GPU-1a twice"),
        ("cuda:0", "='cuda:0' hides every GPU: 'cuda:0' is neither a number nor a UUID; leave it empty for the CPU"),
        ("all", "='all' hides every GPU"),
    ],
)
def test_names_under_which_cuda_finds_other_gpus_are_refused(
    nvml: list[Card], monkeypatch: pytest.MonkeyPatch, visible: str, message: str
) -> None:
    nvml += [Card(), Card(), Card()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as error:
        read_gpus()
    assert f"CUDA_VISIBLE_DEVICES{message}" in str(error.value) or f"CUDA_VISIBLE_DEVICES {message}" in str(error.value)


def test_gpus_that_a_container_is_denied_have_no_number(nvml: list[Card]) -> None:
    """As for CUDA, whose first GPU is the first that it may use."""
    nvml += [Card(denied=True), Card(gib=24)]
    nvml_files = [Path("/dev/nvidia1")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meltcore.fleet.plan.placement.Path.glob", lambda *_: nvml_files)
        assert [gpu.total_bytes for gpu in read_gpus()[0]] == [24 * GIB]
    with pytest.raises(ConfigError, match="there is the device file of GPU 1, and the driver has 1 GPUs"):
        read_gpus()


def fleet(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


def test_each_engine_gets_the_gpu_that_it_is_planned_for(nvml: list[Card], tmp_path: Path) -> None:
    """NVML counts along the PCI bus, CUDA by speed unless it is told."""
    nvml += [Card("NVIDIA L4", 24), Card("NVIDIA H200", 141)]
    path = fleet(tmp_path, f"models: {{big: {{{DUMMY}, memory: 130GiB}}, small: {{{DUMMY}, memory: 20GiB}}}}")
    placed = FleetPlanner(path).config()
    assert {name: place_replicas(placed, name)[0].environment for name in placed.spec.models} == {
        "big": {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        "small": {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    }


def test_numbers_of_different_gpus_need_an_order(nvml: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml += [Card("NVIDIA L4", 24), Card("NVIDIA H200", 141)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"different ones \(NVIDIA H200, NVIDIA L4\), which CUDA numbers by speed"):
        read_gpus()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    with pytest.raises(ConfigError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"):
        read_gpus()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.name for gpu in read_gpus()[0]] == ["NVIDIA L4"]
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert [gpu.name for gpu in read_gpus()[0]] == ["NVIDIA H200"]


def test_gpu_in_mig_mode_is_named_by_its_parts(nvml: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml += [Card("NVIDIA A100", 80, mig=["MIG-a", "MIG-b"]), Card("NVIDIA A100", 80)]
    with pytest.raises(ConfigError, match=r"GPU 0 is in MIG mode.*CUDA_VISIBLE_DEVICES: MIG-a, MIG-b"):
        read_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(read_gpus()[0]) == 1
    part = Card("NVIDIA A100 MIG 1g.10gb", 10)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: part)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b")
    assert [gpu.total_bytes for gpu in read_gpus()[0]] == [10 * GIB]


@pytest.mark.parametrize("parts", [["", "MIG-b", "", "MIG-d"], ["", "", "MIG-b", "gone", "MIG-d"]])
def test_unused_mig_index_hides_no_other_device(
    nvml: list[Card], monkeypatch: pytest.MonkeyPatch, parts: list[str]
) -> None:
    """Nor does a MIG device that is destroyed before its UUID is read."""
    nvml += [Card("NVIDIA H100", 80, mig=parts)]
    read_uuid = pynvml.nvmlDeviceGetUUID
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUUID", lambda card: fail(pynvml.NVML_ERROR_UNKNOWN) if card == "gone" else read_uuid(card)
    )
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES: MIG-b, MIG-d$"):
        read_gpus()


BROKEN = [
    (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch"),
    (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
    (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "Shared Library Not Found"),
    (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
]


@pytest.mark.parametrize(("code", "reason"), BROKEN)
@pytest.mark.parametrize("visible", [None, "0"])
def test_driver_that_does_not_start_moves_no_model_to_the_cpu(
    nvml: list[Card],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    code: int,
    reason: str,
    visible: str | None,
) -> None:
    nvml += [Card()]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: fail(code))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    path = fleet(tmp_path, f"models: {{a: {{{DUMMY}}}, c: {{{DUMMY}, device: cpu}}}}")
    for command in ("plan", "up"):
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert "GPU 0, and the NVIDIA driver does not start: " in error
        assert reason in error
    with pytest.raises(ConfigError, match="does not start"):
        process_bytes()
    on_cpu = FleetPlanner(fleet(tmp_path, f"models: {{c: {{{DUMMY}, device: cpu}}}}"))
    assert on_cpu.config().spec.models["c"].device == "cpu"
    fleet(tmp_path, f"models: {{c: {{{DUMMY}, device: cpu}}, more: {{{DUMMY}}}}}")
    with pytest.raises(ConfigError, match="does not start"):
        on_cpu.config()


def test_bus_ids_have_the_names_of_the_visible_gpus(nvml: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    def info(card: Card) -> SimpleNamespace:
        return fail(pynvml.NVML_ERROR_NOT_SUPPORTED) if card.gib is None else SimpleNamespace(busId=b"00000000:1B:00.0")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", info)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bus_ids() == {}
    nvml += [Card(), Card(gib=None), Card()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,1,0")
    assert bus_ids() == {"GPU-2": "0000:1b:00.0", "0": "0000:1b:00.0"}, "one has no PCI bus"
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: fail(pynvml.NVML_ERROR_UNKNOWN))
    with pytest.raises(ConfigError, match="cannot be listed"):
        bus_ids()


def test_gpu_that_is_lost_is_named(nvml: list[Card]) -> None:
    nvml += [Card(), Card(lost=True)]
    assert read_machine().problem.startswith("the GPUs cannot be listed: GPU 1 is lost: ")


@pytest.mark.parametrize("call", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode"])
def test_gpu_whose_driver_call_hangs_is_named(nvml: list[Card], monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    nvml += [Card(), Card()]
    answer = getattr(pynvml, call)
    monkeypatch.setattr(pynvml, call, lambda card: threading.Event().wait(30) if card is nvml[1] else answer(card))
    monkeypatch.setattr(machine, "NvmlWithTimeout", lambda inner: NvmlWithTimeout(inner, 0.1))
    assert re.fullmatch(r"GPU 1( \(NVIDIA H200\))? cannot be used: Timeout", read_machine().problem)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_gpu_that_is_lost_while_it_is_read_is_not_planned_with(
    nvml: list[Card], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    nvml += [Card()]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda card: fail(code))
    path = fleet(tmp_path, f"gpus: [{{id: 0, memory: 100GiB}}]\nmodels: {{a: {{{DUMMY}, memory: 20GiB}}}}")
    with pytest.raises(ConfigError, match=r"GPU 0 \(NVIDIA H200\) cannot be used"):
        FleetPlanner(path).config()


@pytest.mark.parametrize("gib", [None, 0])
def test_gpu_without_memory_information_has_the_memory_that_the_file_names(
    nvml: list[Card], tmp_path: Path, gib: float | None
) -> None:
    nvml += [Card("NVIDIA GB10", gib)]
    reason = "Not Supported" if gib is None else "NVML gives 0 bytes"
    problem = rf"the memory of GPU 0 \(NVIDIA GB10\) cannot be read: {reason}; name what .* gpus: \[{{id: 0, memory"
    for text in (f"models: {{a: {{{DUMMY}}}}}", f"gpus: [{{id: 0}}]\nmodels: {{a: {{{DUMMY}, memory: 9GiB}}}}"):
        with pytest.raises(ConfigError, match=problem):
            FleetPlanner(fleet(tmp_path, text)).config()
    path = fleet(tmp_path, f"gpus: [{{id: 0, memory: 100GiB}}]\nmodels: {{a: {{{DUMMY}, memory: 20GiB}}}}")
    model = FleetPlanner(path).config().spec.models["a"]
    assert (model.device, model.memory) == ((0,), 20 * GIB)
    fleet(tmp_path, f"gpus: [{{id: 0, memory: 100GiB}}]\nmodels: {{a: {{{DUMMY}, memory: 120GiB}}}}")
    with pytest.raises(ConfigError, match=r"100 GiB"):
        FleetPlanner(path).config()
    nvml += [Card("NVIDIA GB10", 120)]
    path = fleet(tmp_path, f"gpus: [{{id: 1}}]\nmodels: {{a: {{{DUMMY}, memory: 20GiB}}}}")
    assert FleetPlanner(path).config().spec.models["a"].device == (1,)
