"""Every Triton kernel compiles for every architecture that we serve, on a machine without a GPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from types import ModuleType

import pytest
import torch
from compile_tools import CompilePool, Task
from kernel_tools import jit_functions, kernel_modules

from meltcore.kernels import (
    all_reduce,
    decode_attention,
    decode_lanes,
    delta_chunks,
    delta_convolve,
    delta_decode,
    delta_prefill,
    delta_scan,
    expert_places,
    expert_product,
    expert_sum,
    expert_tiles,
    norm,
    one_token,
    one_token_experts,
    output_gate,
    prefill_attention,
    qkv,
    router,
    routing,
    swiglu,
)
from meltcore.kernels.delta import DeltaShape
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
    "Qwen3.5-35B-A3B": ModelShape(
        hidden_size=2048,
        intermediate_size=512,
        heads=16,
        kv_heads=2,
        head_dim=256,
        page_size=64,
        experts=256,
        choices=8,
        expert_width=512,
        delta=(16, 32, 128, 128, 4),
        shared_expert=True,
    ),
    "small hybrid": ModelShape(
        hidden_size=192,
        intermediate_size=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=64,
        delta=(2, 4, 32, 64, 4),
    ),
}
# What one of 8 GPUs has of its experts.
MODELS["Qwen3.5-35B-A3B, an eighth"] = MODELS["Qwen3.5-35B-A3B"]._replace(expert_width=64)
# Shared memory that one block may ask for (CUDA C++ Programming Guide, compute capabilities), KiB.
SHARED_LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
COMPILE_LIMIT_S = 900  # for all of them, on one slow core


def kernels_of(module: ModuleType) -> set[str]:
    """Names of what a module launches: by our naming, what ends in _kernel."""
    return {name for name in jit_functions(module) if name.endswith("_kernel")}


# The models that a file's kernels are compiled for, first the one for every architecture, where others have none of it.
OF_MODELS = {
    **dict.fromkeys(
        (expert_places, expert_product, expert_sum, one_token_experts, router, routing),
        ("Qwen3-30B-A3B", "Qwen3.5-35B-A3B"),
    ),
    **dict.fromkeys(
        (decode_attention, one_token, output_gate, prefill_attention, qkv), ("Qwen3-0.6B", "sums", "Qwen3.5-35B-A3B")
    ),
    **dict.fromkeys((delta_chunks, delta_convolve, delta_decode, delta_scan), ("Qwen3.5-35B-A3B", "small hybrid")),
}
OF_HOPPER = (expert_tiles,)  # used there alone
KERNEL_FILES = [module for module in kernel_modules() if kernels_of(module) and module not in OF_HOPPER]


def cases() -> Iterator[Task]:
    """Every file for every architecture; other sizes and float32 where shared memory is least."""
    for module in KERNEL_FILES:
        main, *others = OF_MODELS.get(module, ("Qwen3-0.6B", "sums"))
        capabilities = [each for each in SHARED_LIMIT_KIB if each >= getattr(module, "LEAST_CAPABILITY", 0)]
        for capability in capabilities:
            yield Task(module.__name__, capability, MODELS[main], torch.bfloat16)
        smallest = min(capabilities, key=lambda capability: SHARED_LIMIT_KIB[capability])
        yield Task(module.__name__, smallest, MODELS[main], torch.float32)
        for model in others:
            yield Task(module.__name__, smallest, MODELS[model], torch.bfloat16)
    for model in ("Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B, an eighth"):
        yield Task(expert_product.__name__, 90, MODELS[model], torch.bfloat16)  # by the table of launches
    yield Task(all_reduce.__name__, 90, MODELS["Qwen3.5-35B-A3B"], torch.bfloat16)  # shares summed over choices
    for module in OF_HOPPER:
        for model in ("Qwen3-30B-A3B", "Qwen3.5-35B-A3B"):
            yield Task(module.__name__, 90, MODELS[model], torch.bfloat16)
    yield Task(decode_attention.__name__, 90, MODELS["Qwen3.5-35B-A3B"], torch.bfloat16)  # FP8 caches of wide heads


def named(task: Task) -> str:
    model = next(name for name, shape in MODELS.items() if shape == task.shape)
    return f"{task.module.rpartition('.')[2]}-{task.capability}-{model}-{str(task.dtype)[6:]}"


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[CompilePool]:
    """Compiles for all the tests that were selected while they wait for one after the other. Where several processes
    run the tests, only what is asked for: every core has its work then."""
    alone = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
    with closing(CompilePool()) as pool:
        for item in request.session.items if alone else []:
            given = getattr(getattr(item, "callspec", None), "params", {})
            if isinstance(task := given.get("task"), Task):
                pool.give(task)
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("task", list(cases()), ids=named)
def test_every_kernel_compiles_within_the_shared_memory_of(task: Task, pool: CompilePool) -> None:
    binaries = pool.give(task).result(timeout=COMPILE_LIMIT_S)
    missing = kernels_of(importlib.import_module(task.module)) - {binary.kernel for binary in binaries}
    assert missing == set(), "compile_cases launches none of these"
    for binary in binaries:
        assert binary.has_code
        assert binary.capability == task.capability
        assert binary.shared_bytes <= SHARED_LIMIT_KIB[task.capability] * 1024, binary.kernel


@pytest.mark.slow
@pytest.mark.parametrize("module", [decode_attention, decode_lanes], ids=["decode_attention", "decode_lanes"])
def test_decode_attention_has_blocks_on_their_way_while_it_attends_to_one(
    module: ModuleType, pool: CompilePool
) -> None:
    """A loop that the compiler does not pipeline, for a barrier in it, say, asks for no shared memory to hold them."""
    task = Task(module.__name__, 90, MODELS["Qwen3-0.6B"], torch.bfloat16)
    two_blocks_in_fp8 = 2 * 2 * 64 * 128
    for binary in pool.give(task).result(timeout=COMPILE_LIMIT_S):
        assert binary.shared_bytes > two_blocks_in_fp8


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
    experts = routing._route_triton(meta(tokens, 128), 8, renormalised=True).experts
    expert_places.place_pairs(experts[:128], 128, 16)  # of more pairs there are other forms
    expert_places.place_pairs(meta(tokens + 1025, 8, dtype=torch.int32), 128, 64)


def tile_launches(tokens: int) -> None:
    experts = meta(tokens + 1024, 8, dtype=torch.int32)
    expert_tiles.tiles_of_experts(meta(tokens + 1024, 2048), experts, meta(128, 1536, 2048), meta(128, 2048, 768))


def delta_launches(tokens: int) -> None:
    shape = DeltaShape(2, 4, 32, 64, 4)
    projected, weights, caches = shape.examples(tokens + 3, torch.bfloat16)
    indices = meta(7, dtype=torch.int64)[tokens % 2 :]
    out, chunks = meta(tokens + 3, shape.heads * shape.value_dim), meta(9, 2, dtype=torch.int32)[tokens % 2 :]
    delta_decode._decode_triton(projected[:3], weights, *caches, indices[:3], indices[:3], shape, out[:3])
    where = indices[:5], indices[:5], indices[:6], chunks, tokens % 4, shape
    delta_prefill._prefill_triton(projected, weights, *caches, *where, out)


@pytest.mark.parametrize(
    "launch", [norm_launches, swiglu_launches, qkv_launches, routing_launches, tile_launches, delta_launches]
)
def test_the_number_of_tokens_compiles_nothing_again(launch: Callable[[int], None], pool: CompilePool) -> None:
    """A kernel compiled in the middle of serving would stop everyone for half a second."""
    binaries: dict[str, set[str]] = {}
    for binary in pool.launch(90, launch, 1, 2, 3, 16, 1000, 4096).result(timeout=COMPILE_LIMIT_S):
        binaries.setdefault(binary.kernel, set()).add(binary.hash)
    assert binaries
    assert {name: len(found) for name, found in binaries.items()} == dict.fromkeys(binaries, 1)
