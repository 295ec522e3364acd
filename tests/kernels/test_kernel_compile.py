"""Every Triton kernel compiles for every architecture that we serve, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from kernel_tools import jit_functions, kernel_modules
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from meltcore.kernels import experts, norm, qkv, routing, swiglu
from meltcore.kernels.jit import ModelShape

MODELS = {
    "Qwen3-0.6B": ModelShape(
        hidden_size=1024, intermediate_size=3072, heads=16, kv_heads=8, head_dim=128, page_size=64
    ),
    "sums": ModelShape(hidden_size=192, intermediate_size=512, heads=4, kv_heads=2, head_dim=64, page_size=64),
    "Qwen3-30B-A3B": ModelShape(
        hidden_size=2048,
        intermediate_size=6144,
        heads=32,
        kv_heads=4,
        head_dim=128,
        page_size=64,
        experts=128,
        choices=8,
        expert_width=768,
    ),
}
# Shared memory that one block may ask for (CUDA C++ Programming Guide, compute capabilities), KiB.
SHARED_LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}


class AbsentGPU:
    """What Triton asks its driver before it compiles, answered for an architecture that is not here."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled functions are remembered by device number

    def get_current_stream(self, device: int) -> int:
        return 0


def kernels_of(module: ModuleType) -> set[str]:
    """Names of what a module launches: by our naming, what ends in _kernel."""
    return {name for name in jit_functions(module) if name.endswith("_kernel")}


KERNEL_FILES = [module for module in kernel_modules() if kernels_of(module)]
# Kernels of routed experts for the models that have them, all others for those that have none.
CASES = [
    pytest.param(module, model, id=f"{module.__name__.rpartition('.')[2]}-{model}")
    for module in KERNEL_FILES
    for model, shape in MODELS.items()
    if (module in (experts, routing)) == (shape.experts > 0)
]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JITFunction, Any]]:
    """Launches compile instead of running, and are listed here: what was launched and what came of it."""
    launched: list[tuple[JITFunction, Any]] = []
    run = JITFunction.run

    def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((function, run(function, *args, grid=grid, warmup=True, **kwargs)))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return launched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("capability", SHARED_LIMIT_KIB)
@pytest.mark.parametrize(("module", "model"), CASES)
def test_every_kernel_compiles_within_the_shared_memory_of(
    module: ModuleType,
    capability: int,
    model: str,
    dtype: torch.dtype,
    compiled: list[tuple[JITFunction, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if capability < (least := getattr(module, "LEAST_CAPABILITY", 0)):
        pytest.skip(f"needs sm_{least}: the engine refuses what uses it elsewhere")
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU(capability))
    for case in module.compile_cases(MODELS[model], dtype):
        case()
    missing = kernels_of(module) - {function.__name__ for function, _ in compiled}
    assert missing == set(), "compile_cases launches none of these"
    for function, binary in compiled:
        assert "cubin" in binary.asm
        assert binary.metadata.target.arch == capability
        assert binary.metadata.shared <= SHARED_LIMIT_KIB[capability] * 1024, function.__name__


@pytest.mark.parametrize("module", kernel_modules(), ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_file_with_kernels_declares_what_to_compile(module: ModuleType) -> None:
    assert bool(kernels_of(module)) == hasattr(module, "compile_cases")
    # Public ones are for the kernels of other files.
    if any(name.startswith("_") for name in jit_functions(module)):
        assert kernels_of(module), "name what is launched ..._kernel"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm_launches(tokens: int) -> None:
    norm._rms_norm_triton(meta(tokens, 1024), meta(1024), 1e-6)


def swiglu_launches(tokens: int) -> None:
    swiglu._swiglu_triton(meta(tokens, 6144))


def qkv_launches(tokens: int) -> None:
    indices = meta(tokens + 1, dtype=torch.int64)[tokens % 2 :]  # a slice, at times unaligned
    cache, weight = meta(9, 64, 8, 128), meta(128)
    table = meta(4096, 128, dtype=torch.float32)
    norms = qkv.HeadNorms(weight, weight, 1e-6)
    qkv._store_kv_triton(meta(tokens, 4096), norms, table, indices, indices, cache, cache)


def routing_launches(tokens: int) -> None:
    routing._by_expert_triton(routing._route_triton(meta(tokens, 128), 8, renormalised=True).experts, 128)


@pytest.mark.parametrize("launch", [norm_launches, swiglu_launches, qkv_launches, routing_launches])
def test_the_number_of_tokens_compiles_nothing_again(
    launch: Callable[[int], None], compiled: list[tuple[JITFunction, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel compiled in the middle of serving would stop everyone for half a second."""
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU(90))
    for tokens in (1, 2, 3, 16, 1000, 4096):
        launch(tokens)
    binaries: dict[str, set[str]] = {}
    for function, binary in compiled:
        binaries.setdefault(function.__name__, set()).add(binary.hash)
    assert {name: len(found) for name, found in binaries.items()} == dict.fromkeys(binaries, 1)
