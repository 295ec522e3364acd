"""An engine process stays within its budget and keeps what it was promised, over a scripted torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meltcore.common.errors import ConfigError
from meltcore.engine.host import budget
from meltcore.engine.host.budget import build_within_budget, hold_budget, limit_memory
from meltcore.kernels import graph_capture, memory_pools
from meltcore.kernels.graph_capture import GraphCache
from meltcore.settings.config import EngineConfig

MIB = 2**20
CUDA = torch.device("cuda")  # as `--device auto` gives it


class ScriptedCuda:
    """A GPU of 1,000 MiB. `reserved`: bytes of torch's allocator, of which `cached` can be freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = self.cached = 0
        self.free = 1000 * MIB
        self.fraction = 1.0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000 * MIB))
        monkeypatch.setattr(cuda, "set_per_process_memory_fraction", self.set_fraction)
        monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda *_: self.fraction)
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(cuda, "memory_reserved", lambda *_: self.reserved)
        monkeypatch.setattr(cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(budget, "choose_device", lambda *_, **__: CUDA)

    def set_fraction(self, value: float, device: torch.device | None) -> None:
        if device is not None and device.index is None:
            raise ValueError("Expected a torch.device with a specified index or an integer")  # as torch does
        self.fraction = value

    def empty_cache(self) -> None:
        self.reserved, self.cached = self.reserved - self.cached, 0

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        assert (dtype, torch.device(device)) == (torch.uint8, CUDA)
        if size > self.free:
            raise torch.OutOfMemoryError
        self.reserved += size


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ScriptedCuda:
    return ScriptedCuda(monkeypatch)


def config_of(mib: int | None) -> EngineConfig:
    return EngineConfig(model="m", memory_bytes=None if mib is None else mib * MIB)


def test_torch_may_allocate_the_budget_alone(cuda: ScriptedCuda) -> None:
    limit_memory(config_of(250), CUDA)
    assert cuda.fraction == 0.25
    cuda.fraction = 1.0
    limit_memory(config_of(None), CUDA)
    limit_memory(config_of(250), torch.device("cpu"))
    assert cuda.fraction == 1.0


def test_rest_of_the_budget_is_held(cuda: ScriptedCuda) -> None:
    cuda.reserved = 100 * MIB
    hold_budget(config_of(250), CUDA, outside_bytes=20 * MIB)
    assert 228 * MIB <= cuda.reserved <= 230 * MIB
    before = cuda.reserved
    hold_budget(config_of(250), CUDA, outside_bytes=20 * MIB)
    assert cuda.reserved == before, "held already"


def test_gaps_of_the_start_are_freed_before_a_budget_is_exceeded(cuda: ScriptedCuda) -> None:
    cuda.reserved, cuda.cached = 260 * MIB, 60 * MIB
    hold_budget(config_of(250), CUDA)
    assert 248 * MIB <= cuda.reserved <= 250 * MIB
    cuda.reserved, cuda.cached = 260 * MIB, 0
    with pytest.raises(ConfigError, match="m needs 10 MiB more than its budget of 250 MiB: raise --memory"):
        hold_budget(config_of(250), CUDA)


def test_memory_that_another_process_took_is_an_error_of_the_start(cuda: ScriptedCuda) -> None:
    cuda.free = 50 * MIB
    with pytest.raises(ConfigError, match="the GPU has no 250 MiB left of the budget of m: another process"):
        hold_budget(config_of(250), CUDA)


def test_engine_is_built_within_its_budget(cuda: ScriptedCuda) -> None:
    def build(progress: Any) -> Any:
        progress("making", 0.5)
        assert cuda.fraction == 0.25, "before anything is allocated"
        cuda.reserved = 30 * MIB
        return SimpleNamespace(outside_bytes=MIB)

    stages: list[str] = []
    engine = build_within_budget(config_of(250), build)(lambda stage, _: stages.append(stage))
    assert (engine.outside_bytes, stages) == (MIB, ["making"])
    assert 247 * MIB <= cuda.reserved <= 249 * MIB


@pytest.mark.parametrize("mib", [250, None])
def test_start_without_memory_says_what_each_pool_holds(
    cuda: ScriptedCuda, monkeypatch: pytest.MonkeyPatch, mib: int | None
) -> None:
    def segment(pool: tuple[int, int], total: int, allocated: int) -> dict[str, object]:
        return {"segment_pool_id": pool, "total_size": total * MIB, "allocated_size": allocated * MIB}

    segments = [segment((0, 0), 1280, 20), segment((0, 0), 256, 128), segment((0, 5), 2048, 2048)]
    segments += [segment((0, 7), 512, 512), segment((0, 9), 64, 32), segment((0, 11), 64, 32)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **_: segments)
    monkeypatch.setattr(memory_pools, "_tags_of_pools", {(0, 5): "weights", (0, 7): "kv_cache", (0, 9): "graphs"})

    def build(_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        build_within_budget(config_of(mib), build)(lambda *_: None)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. Reserved by torch (allocated) in each pool: "
        "default 1.50 GiB (148 MiB), weights 2 GiB (2 GiB), kv_cache 512 MiB (512 MiB), graphs 128 MiB (64 MiB)"
    )


def test_capture_while_serving_gives_none_of_the_budget_away(
    cuda: ScriptedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_capture, "GraphCapturer", SimpleNamespace)

    def capture(_: object) -> str:
        assert cuda.reserved == 100 * MIB, "the graph finds memory outside of the cache"
        cuda.reserved += 20 * MIB
        return "graph"

    graphs = GraphCache[str](2)
    cuda.reserved, cuda.cached, cuda.fraction = 250 * MIB, 150 * MIB, 0.25
    assert (graphs.get("shape", capture), graphs.get("shape", capture)) == ("graph", "graph")
    assert 248 * MIB <= cuda.reserved <= 250 * MIB
