"""A rehearsal of one layer of each kind launches every kernel that all layers launch, with the same specialization."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import triton
from compile_tools import AbsentGPU

from meltcore.kernels.attention.metadata import BLOCK_QUERIES, AttentionMetadata
from meltcore.kernels.gated_delta.common import CHUNK
from meltcore.kernels.launch import force_implementation
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.kv_cache_specs import KVCacheSpec, RecurrentStateSpec
from meltcore.models.decoders.model import Model
from meltcore.models.loader import build_meta_model

PAGE_SIZE, PAGES, ROWS = 64, 65, 64
META = torch.device("meta")
Caches = list[tuple[torch.Tensor, torch.Tensor]]
Kernels = set[tuple[str, str]]  # names and specializations


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def cache(spec: KVCacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(spec, RecurrentStateSpec):
        conv = empty(9, spec.conv_width, spec.conv_channels, dtype=torch.bfloat16)
        return conv, empty(9, spec.heads, spec.key_dim, spec.value_dim, dtype=torch.float32)
    pages = empty(PAGES, PAGE_SIZE, spec.kv_heads, spec.head_dim, dtype=torch.bfloat16)
    return pages, pages


def decodes(count: int) -> AttentionMetadata:
    nothing = empty(0)
    return AttentionMetadata(
        page_table=empty(ROWS, ROWS),
        rows=empty(count),
        context_lens=empty(count),
        slot_mapping=nothing,
        num_decodes=count,
        query_tiles=nothing,
        padded_index=nothing,
        padded_groups=[],
        state_slots=empty(count),
        query_start_loc=nothing,
        chunk_indices=nothing,
    )


def prompt(tokens: int) -> AttentionMetadata:
    return decodes(1)._replace(
        slot_mapping=empty(tokens),
        num_decodes=0,
        query_tiles=empty(-(-tokens // BLOCK_QUERIES), 4, dtype=torch.int32),
        query_start_loc=empty(2),
        chunk_indices=empty(-(-tokens // CHUNK), 2, dtype=torch.int32),
    )


@torch.inference_mode()
def launched(model: Model, caches: Caches, tokens: int, metadata: AttentionMetadata) -> Kernels:
    """The kernels of a step that are not compiled, which are all."""
    kernels: Kernels = set()

    def record(*, fn: object, compile: dict[str, str], **_: object) -> bool:
        kernels.add((fn.name, compile["specialization_data"]))  # type: ignore[attr-defined]
        return True

    triton.knobs.runtime.jit_cache_hook = record
    try:
        model(empty(tokens), empty(tokens), caches, [metadata] * len(caches))
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return kernels


def kernels_of_all_and_few_layers(name: str) -> list[tuple[Kernels, Kernels]]:
    triton.runtime.driver._active = AbsentGPU(90)
    force_implementation("triton")
    model = build_meta_model(open_checkpoint(name, files="config"), torch.bfloat16, META)
    model.prepare(4096)
    caches = [cache(spec) for spec in model.kv_cache_specs()]
    steps = [(count, decodes(count)) for count in (1, 48)] + [(tokens, prompt(tokens)) for tokens in (17, 1024)]
    found = []
    for tokens, metadata in steps:
        every = launched(model, caches, tokens, metadata)
        with model.one_layer_per_kind():
            found.append((every, launched(model, caches, tokens, metadata)))
    return found


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: Triton's interpreter leaves the language of this one patched."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "google/gemma-3-4b-it", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-30B-A3B-FP8"]
)
def test_few_layers_launch_the_kernels_of_all(name: str, elsewhere: ProcessPoolExecutor) -> None:
    for every, few in elsewhere.submit(kernels_of_all_and_few_layers, name).result(timeout=240):
        assert len(every) > 3
        assert few == every
