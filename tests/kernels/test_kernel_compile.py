"""Every Triton kernel compiles for every supported architecture, on a machine without a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import compile_cases_attention
import compile_cases_gemm
import pytest
import torch
from compile_tools import CompilePool, Task
from kernel_tools import ModelShape, jit_functions, kernel_modules

from meltcore.kernels import activation, grouped_convolution, layer_norm, norm, rotary
from meltcore.kernels.attention import decode, kv_cache, prefill, stream_k, windows
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms
from meltcore.kernels.comm import all_reduce, staged_all_reduce
from meltcore.kernels.fp8 import block_fp8, block_fp8_experts, block_fp8_gemm, fp8_gemv, fp8_split_k
from meltcore.kernels.gated_delta import convolution, intra_chunk, state_scan, window
from meltcore.kernels.gated_delta import decode as gated_delta_decode
from meltcore.kernels.gated_delta.common import GatedDeltaShape
from meltcore.kernels.gated_delta.prefill import gated_delta_prefill
from meltcore.kernels.gemm import gemv, split_k, tma
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.moe import align, combine, expert_gemv, grouped_gemm, grouped_gemm_tma, router, routing
from meltcore.kernels.quant import ggml_decode, ggml_experts, ggml_gemm
from meltcore.kernels.sampling import drafts

BY_NAME = compile_cases_attention.BY_NAME | compile_cases_gemm.BY_NAME
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
    # Their layers with a sliding window.
    "Gemma-3-4B": ModelShape(
        hidden_size=2560,
        intermediate_size=10240,
        heads=8,
        kv_heads=4,
        head_dim=256,
        page_size=64,
        sliding_window=1024,
    ),
    "Gemma-3-27B": ModelShape(
        hidden_size=5376,
        intermediate_size=21504,
        heads=32,
        kv_heads=16,
        head_dim=128,
        page_size=64,
        sliding_window=1024,
    ),
    "Mistral-7B": ModelShape(
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=64,
        sliding_window=4096,
    ),
}
# What one of 8 GPUs has of its experts.
MODELS["Qwen3.5-35B-A3B, an eighth"] = MODELS["Qwen3.5-35B-A3B"]._replace(expert_width=64)
# Shared memory that one block may ask for (CUDA C++ Programming Guide, compute capabilities), KiB.
SHARED_LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
COMPILE_LIMIT_S = 900  # for all of them, on one slow core


def kernels_of(module: ModuleType) -> set[str]:
    """Names of what a module launches: by our naming, what ends in _kernel."""
    return {name for name in jit_functions(module) if name.endswith("_kernel")}


# The models that a file's kernels are compiled for, first the one for every architecture, where others have none of it.
OF_MODELS = {
    **dict.fromkeys(
        (align, grouped_gemm, combine, expert_gemv, router, routing),
        ("Qwen3-30B-A3B", "Qwen3.5-35B-A3B"),
    ),
    **dict.fromkeys((decode, gemv, activation, prefill, windows, kv_cache), ("Qwen3-0.6B", "sums", "Qwen3.5-35B-A3B")),
    **dict.fromkeys(
        (intra_chunk, convolution, gated_delta_decode, state_scan, window), ("Qwen3.5-35B-A3B", "small hybrid")
    ),
}
# Used there alone.
OF_HOPPER = {tma: ("Qwen3-0.6B",), grouped_gemm_tma: ("Qwen3-30B-A3B", "Qwen3.5-35B-A3B")}
# Formats of quantized weights: compiled in one type, for the architectures with the fewest, most and newest features.
OF_THREE = (ggml_decode, ggml_gemm, ggml_experts, block_fp8, block_fp8_gemm, block_fp8_experts)
KERNEL_FILES = [module for module in kernel_modules() if kernels_of(module) and module not in (*OF_HOPPER, *OF_THREE)]


# Files whose cases differ by sizes alone: other models, float32 and sm_120 compile a part of them.
THINNED = {decode: 2, prefill: 2, windows: 2, stream_k: 2}
GEMMS = (split_k, fp8_split_k)
ATTENTION = (decode, prefill, windows, stream_k, kv_cache)  # from sm_89 on with FP8 caches, too
# They take 16-bit types alone. Instead of float32, which goes to torch, they have float16, as large as bfloat16: each
# kernel once.
IN_16_BITS = (*GEMMS, fp8_gemv, gemv, expert_gemv, router)
# Their launches depend on the shared memory, or are many with matrix products, which sm_90 has instructions of its own
# for. All other files launch on every architecture what they launch where shared memory is least.
BY_ARCHITECTURE = (*GEMMS, *ATTENTION, grouped_gemm, router, state_scan)
# Not compiled in float32: its products without tensor cores take 25 s of CPU time. Its tests run it so, on a GPU too.
# Of shared memory, twice as much as in 16 bits must be there.
NOT_IN_FLOAT32 = (intra_chunk,)
# Of files of their own, so that `pytest -n` compiles for several architectures concurrently.
AMPERE, ADA_AND_BLACKWELL = (80, 86), (89, 100, 120)


def thinned(module: ModuleType, capability: int, shape: ModelShape, dtype: torch.dtype) -> Task:
    """Every `stride`-th case. Architectures and types begin at different ones, so that together they have them all."""
    stride = THINNED.get(module, 1)
    first = (sorted(SHARED_LIMIT_KIB).index(capability) + (dtype == torch.float32)) % 2 if stride == 2 else 0
    return Task(module.__name__, capability, shape, dtype, first, stride)


def cases() -> Iterator[Task]:
    """Every file for every architecture; all sizes, other models and float32 where shared memory is least.

    Elsewhere each kernel once, where a file launches the same on all architectures with as much shared memory.
    """
    for module in KERNEL_FILES:
        main, *others = OF_MODELS.get(module, ("Qwen3-0.6B", "sums"))
        capabilities = [each for each in SHARED_LIMIT_KIB if each >= getattr(module, "MIN_CAPABILITY", 0)]
        smallest = min(capabilities, key=lambda capability: SHARED_LIMIT_KIB[capability])
        for capability in capabilities:
            given = module, capability, MODELS[main], torch.bfloat16
            if capability == 120 and module in ATTENTION:  # FP8 caches where shared memory is least
                yield thinned(*given)
            elif capability == smallest or (capability == 90 and module in BY_ARCHITECTURE):
                yield Task(module.__name__, *given[1:])
            else:
                yield Task(module.__name__, *given[1:], is_once=True)
        if module not in NOT_IN_FLOAT32:
            task = thinned(module, smallest, MODELS[main], torch.float32)
            yield task._replace(is_once=module in IN_16_BITS)
        for model in others:
            other = thinned(module, smallest, MODELS[model], torch.bfloat16)
            is_sized = module in ATTENTION and model == "Qwen3.5-35B-A3B"
            yield other if is_sized else other._replace(first=0, is_once=True)
    for model in ("Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B, an eighth"):
        yield Task(grouped_gemm.__name__, 90, MODELS[model], torch.bfloat16)  # by the table of launches
    for module in (all_reduce, staged_all_reduce):  # sums over experts
        yield Task(module.__name__, 90, MODELS["Qwen3.5-35B-A3B"], torch.bfloat16)
    for module in OF_THREE:
        for capability in (80, 90, 120):
            if capability >= getattr(module, "MIN_CAPABILITY", 0):
                given = capability, MODELS["Qwen3-30B-A3B"], torch.bfloat16
                yield Task(module.__name__, *given, is_once=capability != 120)
    for module, models in OF_HOPPER.items():
        for model in models:
            yield Task(module.__name__, 90, MODELS[model], torch.bfloat16)
    yield thinned(decode, 90, MODELS["Qwen3.5-35B-A3B"], torch.bfloat16)  # FP8 caches of wide heads
    # Sliding windows: where shared memory is least, with FP8 caches, and on Hopper, with packed heads.
    for module, capability, model in (
        (decode, 120, "Gemma-3-4B"),
        (prefill, 120, "Gemma-3-4B"),
        (stream_k, 120, "Mistral-7B"),
        (prefill, 90, "Gemma-3-27B"),
    ):
        yield thinned(module, capability, MODELS[model], torch.bfloat16)
    for module in (decode, stream_k):
        yield Task(module.__name__, 90, MODELS["Gemma-3-27B"], torch.bfloat16, is_once=True)


def cases_of(*capabilities: int) -> list[Task]:
    return [task for task in cases() if task.capability in capabilities]


def named(task: Task) -> str:
    model = next(name for name, shape in MODELS.items() if shape == task.shape)
    return f"{task.module.rpartition('.')[2]}-{task.capability}-{model}-{str(task.dtype)[6:]}"


def assert_compiles(task: Task, pool: CompilePool) -> None:
    binaries = pool.give(task).result(timeout=COMPILE_LIMIT_S)
    missing = kernels_of(importlib.import_module(task.module)) - {binary.kernel for binary in binaries}
    assert missing == set(), "compile_cases launches none of these"
    for binary in binaries:
        assert binary.has_code
        assert binary.capability == task.capability
        factor = 2 if task.module in [module.__name__ for module in NOT_IN_FLOAT32] else 1
        assert factor * binary.shared_bytes <= SHARED_LIMIT_KIB[task.capability] * 1024, binary.kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", cases_of(*(each for each in SHARED_LIMIT_KIB if each not in (*AMPERE, *ADA_AND_BLACKWELL))), ids=named
)
def test_every_kernel_compiles_within_the_shared_memory_of(task: Task, pool: CompilePool) -> None:
    assert_compiles(task, pool)


@pytest.mark.slow
@pytest.mark.parametrize("module", [decode, stream_k], ids=["decode", "stream_k"])
def test_decode_attention_loops_are_pipelined(module: ModuleType, pool: CompilePool) -> None:
    """A loop that the compiler does not pipeline, because of a barrier in it, takes no shared memory for blocks."""
    task = Task(module.__name__, 90, MODELS["Qwen3-0.6B"], torch.bfloat16)
    two_blocks_in_fp8 = 2 * 2 * 64 * 128
    for binary in pool.give(task).result(timeout=COMPILE_LIMIT_S):
        assert binary.shared_bytes > two_blocks_in_fp8


@pytest.mark.parametrize("module", kernel_modules(), ids=lambda module: module.__name__.rpartition(".")[2])
def test_file_with_kernels_declares_what_to_compile(module: ModuleType) -> None:
    assert bool(kernels_of(module)) == (module.__name__ in BY_NAME)
    # Public ones are for the kernels of other files.
    if any(name.startswith("_") for name in jit_functions(module)):
        assert kernels_of(module), "name what is launched ..._kernel"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm_launches(tokens: int) -> None:
    norm.rms_norm(meta(tokens, 1024), meta(1024), 1e-6)


def swiglu_launches(tokens: int) -> None:
    activation.swiglu(meta(tokens, 6144))


def store_kv_launches(tokens: int) -> None:
    indices = meta(tokens + 1, dtype=torch.int64)[tokens % 2 :]  # a slice, sometimes unaligned
    cache, weight = meta(9, 64, 8, 128), meta(128)
    table = meta(4096, 128, dtype=torch.float32)
    params = AttentionParams(HeadNorms(weight, weight, 1e-6), table, cache, cache, 1.0)
    kv_cache.store_kv(meta(tokens, 4096), params, indices, indices)


def window_launches(window: int) -> None:
    index, cache, qkv = meta(3, dtype=torch.int64), meta(9, 64, 2, 64), meta(3, 6 * 64)
    params = AttentionParams(None, meta(4096, 64, dtype=torch.float32), cache, cache, 1.0, window)
    decodes = qkv, params, index, meta(3, 640, dtype=torch.int64), index
    for launch in (decode.decode_launch(3, 2, 64, 2, 640, 132, 227 * 2**10), stream_k.StreamK(3, 1)):
        decode.decode_attention(*decodes, launch=launch)
    prefill.prefill_attention(qkv, params, decodes[3], meta(1, 4, dtype=torch.int32))


def routing_launches(tokens: int) -> None:
    force_implementation("triton")
    topk_ids = routing.select_experts(meta(tokens, 128), 8, norm_topk_prob=True).topk_ids
    align.moe_align_block_size(topk_ids[:128], 16, 128)  # more pairs have other kernels
    align.moe_align_block_size(meta(tokens + 1025, 8, dtype=torch.int32), 64, 128)


def tile_launches(tokens: int) -> None:
    topk_ids, hidden = meta(tokens + 1024, 8, dtype=torch.int32), meta(tokens + 1024, 2048)
    grouped_gemm_tma.expert_outputs_tma(hidden, topk_ids, meta(128, 1536, 2048), meta(128, 2048, 768))


def tma_launches(tokens: int) -> None:
    tma.tma_gemm(meta(tokens + 8192, 1024), meta(6144, 1024), torch.bfloat16, gated=True)


def gated_delta_launches(tokens: int) -> None:
    of = compile_cases_attention.GatedDelta(GatedDeltaShape(2, 4, 32, 64, 4), torch.bfloat16, tokens + 3)
    index, three = meta(7, dtype=torch.int64)[tokens % 2 :], slice(3)
    gated_delta_decode.gated_delta_decode(of.projected[three], of.params, index[:3], index[:3], of.shape, of.out[three])
    metadata = of.metadata._replace(
        context_lens=index[:5],
        state_slots=index[:5],
        query_start_loc=index[:6],
        chunk_indices=meta(9, 2, dtype=torch.int32)[tokens % 2 :],
        num_decodes=tokens % 4,
    )
    gated_delta_prefill(of.projected, of.params, metadata, of.shape, of.out)
    of = compile_cases_attention.GatedDelta(of.shape, torch.bfloat16, tokens + 3, drafts=2)
    metadata = metadata._replace(num_windows=1 + tokens % 4, replay_lens=index[1:5])
    window.gated_delta_windows(of.projected, of.params, metadata, of.shape, of.out)
    count = 1 + tokens % 5
    window.count_replays(meta(9, dtype=torch.int64), index[:count], index[:count], index[: count + 1], tokens % 4)


def synthesis_launches(frames: int) -> None:
    hidden, table = meta(2, frames, 1024), meta(2, 134, 1024)
    layer_norm.add_modulated_layer_norm(hidden, hidden, *(table[: 1 + frames % 2, i] for i in range(3)), 1e-6)
    weight = meta(31, 64, 1024).permute(2, 1, 0)
    grouped_convolution.grouped_convolution(hidden, weight, table[0, 0], meta(2, dtype=torch.int64))
    angles = meta(2, 4096, 32, dtype=torch.float32)[:, :frames]
    rotary.rotate_pairs(meta(2, frames, 3, 16, 64)[:, :, :2, 0], angles)


def draft_launches(sequences: int) -> None:
    index = meta(2 * sequences + 2, dtype=torch.int64)[sequences % 2 :]
    tables = drafts.DraftTables.allocate(4097, 1000, 3, torch.device("meta"))
    lookup = drafts.NgramSizes(3, 1)
    drafts.accept_and_propose(tables, index[:sequences], index[: sequences + 1], index, index[:sequences], lookup)
    drafts.follow_windows(tables, *(index[: sequences + added] for added in (1, 0, 0, 0, 2, 2)), index[sequences % 2 :])


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [norm_launches, swiglu_launches, store_kv_launches, routing_launches, tile_launches, tma_launches,
     gated_delta_launches, synthesis_launches, draft_launches],
)  # fmt: skip
def test_number_of_tokens_triggers_no_recompilation(launch: Callable[[int], None], pool: CompilePool) -> None:
    """A kernel compiled while serving would stop all requests for half a second."""
    binaries = binaries_of(launch, pool)
    assert binaries
    assert {name: len(found) for name, found in binaries.items()} == dict.fromkeys(binaries, 1)


@pytest.mark.slow
def test_all_sliding_windows_share_one_binary(pool: CompilePool) -> None:
    binaries = binaries_of(window_launches, pool)
    kernels = "_decode_kernel", "_decode_stream_k_kernel", "_prefill_kernel"
    assert {name: len(found) for name, found in binaries.items()} == dict.fromkeys(kernels, 1)


def binaries_of(launch: Callable[[int], None], pool: CompilePool) -> dict[str, set[str]]:
    """Hashes of each kernel that `launch` compiles for sm_90 when called with small and large numbers."""
    binaries: dict[str, set[str]] = {}
    for binary in pool.launch(90, launch, 1, 2, 3, 16, 1000, 4096).result(timeout=COMPILE_LIMIT_S):
        binaries.setdefault(binary.kernel, set()).add(binary.hash)
    return binaries
