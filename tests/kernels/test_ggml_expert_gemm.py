"""The grouped GEMM of block-quantized experts in CUDA C++: compiled for each architecture; on a GPU against float64."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from compile_tools import check_compiles
from test_ggml import random_weight, stacked, there
from test_ggml_skinny_gemm import DTYPES, FORMATS, TYPES, expected

from meltcore.engine.worker.compile_workers import CompileWorkers
from meltcore.engine.worker.warm_up import EXPERT_TOKENS, PROMPT_TOKENS, compile_ahead
from meltcore.kernels import nvrtc
from meltcore.kernels.architectures import ARCHITECTURES, shared_kib
from meltcore.kernels.moe import grouped_gemm_tma
from meltcore.kernels.moe.align import max_tiles, moe_align_block_size, scan_size
from meltcore.kernels.moe.routing import Routing
from meltcore.kernels.quant import ggml_expert_gemm as expert_gemm_file
from meltcore.kernels.quant import ggml_expert_gemv as expert_gemv_file
from meltcore.kernels.quant import ggml_experts
from meltcore.kernels.quant.ggml import BlockType, GgmlTensor, empty
from meltcore.kernels.quant.ggml_expert_gemm import (
    KERNEL,
    MAX_PAIRS,
    MIN_CAPABILITY,
    ExpertConfig,
    ggml_expert_gemm,
    select_config,
    supports,
)
from meltcore.kernels.quant.ggml_experts import (
    MIN_DEQUANTIZED_PAIRS,
    dequantized_expert_outputs,
    ggml_expert_outputs,
    ggml_expert_outputs_reference,
    select_body,
)
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.int4 import Int4Type

META = torch.device("meta")
CONFIGS = [ExpertConfig(1, 3, 2), ExpertConfig(2, 2, 3), ExpertConfig(4, 3, 2), ExpertConfig(8, 2, 2)]


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each >= MIN_CAPABILITY])
def test_configurations_fit_into_shared_memory(architecture: int) -> None:
    """Two formats share an alignment, and so a configuration."""
    limit = 1024 * shared_kib(architecture)
    for first in TYPES:
        for second in TYPES:
            for tokens in (1, 16, 64, 256, 1024, 8064):
                config = select_config(8 * tokens, 128, (first, second), limit)
                assert max(config.shared_bytes(each) for each in (first, second)) * config.blocks_per_sm <= limit


def test_tiles_are_those_measured() -> None:
    sizes = [select_config(8 * tokens, 128, [GgmlType.Q8_0], 2**18).block_m for tokens in (1, 64, 65, 128, 256, 512)]
    assert sizes == [8, 8, 16, 16, 32, 32]


def test_tiles_of_triton_follow_the_pairs_per_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_experts, "shared_memory_bytes", lambda device: 227 * 1024)
    weight = empty(GgmlType.Q8_0, (128, 1536, 2048), META)
    tiles = [ggml_experts.select_config(8 * tokens, weight) for tokens in (128, 129, 480, 481, 8064)]
    assert [(tile.block_m, tile.num_stages) for tile in tiles] == [(16, 4), (32, 3), (32, 3), (64, 2), (64, 2)]


def test_body_follows_the_pairs_per_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-30B-A3B on an H200. Gate and up in tensors of their own are not dequantized."""
    monkeypatch.setattr(grouped_gemm_tma, "capability", lambda device: 90)
    monkeypatch.setattr(expert_gemm_file, "capability", lambda device: 90)
    monkeypatch.setattr(expert_gemv_file, "capability", lambda device: 90)
    monkeypatch.setattr(expert_gemm_file, "shared_memory_bytes", lambda device: 227 * 1024)
    gate_up, down = (empty(GgmlType.Q8_0, (128, *shape), META) for shape in ((1536, 2048), (2048, 768)))
    apart = [empty(GgmlType.Q8_0, (128, 768, 2048), META)] * 2

    def body(tokens: int, *parts: GgmlTensor, is_cuda: bool = True, dtype: torch.dtype = torch.bfloat16) -> str:
        hidden = Mock(dtype=dtype, shape=(tokens, 2048), is_cuda=is_cuda)
        hidden.element_size.return_value = dtype.itemsize
        return select_body(hidden, 8 * tokens, parts, down)

    limits = (1, 8, 9, 256, 257, 4095, 4096, 8064)
    few = ["gemv"] * 2 + ["cuda"] * 2 + ["triton"] * 2
    assert [body(tokens, gate_up) for tokens in limits] == [*few, *["dequantized"] * 2]
    assert [body(tokens, *apart) for tokens in limits] == [*few, *["triton"] * 2]
    assert body(1, gate_up, is_cuda=False) == body(1, gate_up, dtype=torch.float32) == "triton"
    assert body(8064, gate_up, dtype=torch.float32) == "triton"
    monkeypatch.setattr(grouped_gemm_tma, "capability", lambda device: 80)
    assert body(8064, gate_up) == "triton"


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (257, 9)])
def test_warm_up_covers_every_launch(experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-30B-A3B and Qwen3.5-35B-A3B; a step of the most tokens is part of every warm-up."""
    monkeypatch.setattr(ggml_experts, "shared_memory_bytes", lambda device: 227 * 1024)
    weight = empty(GgmlType.Q8_0, (experts, 1024, 2048), META)

    def gemm(tokens: int) -> object:
        pairs, per_expert = tokens * top_k, tokens * top_k / experts
        if per_expert >= MIN_DEQUANTIZED_PAIRS:
            return "dequantized"
        if tokens <= 8:
            return tokens <= 4, tokens == 1
        if per_expert <= MAX_PAIRS:
            return select_config(pairs, experts, [GgmlType.Q8_0], 227 * 1024)
        return ggml_experts.select_config(pairs, weight)

    def scan(tokens: int) -> int:
        return scan_size(tokens * top_k)

    warmed = *PROMPT_TOKENS, *EXPERT_TOKENS, 8192
    assert set(map(gemm, range(1, 8193))) == set(map(gemm, warmed))
    assert set(map(scan, range(1, 8193))) == set(map(scan, warmed))


def test_recorded_launches_are_compiled_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal leaves indices that were not computed, so that a launch would read anywhere."""
    compiled: list[tuple[object, int]] = []
    monkeypatch.setattr(nvrtc, "capability", lambda device: 90)
    monkeypatch.setattr(KERNEL, "cubin", lambda macros, arch: compiled.append((macros, arch)))

    def launch() -> None:
        KERNEL.launch((1,), 128, (("TOKEN_TILES", 2),), [torch.zeros(1)], torch.device("cuda", 0), pdl=False)

    def steps() -> None:
        launch()
        launch()

    assert compile_ahead(steps, lambda: None, CompileWorkers(0)) == 1
    assert compiled == [({"TOKEN_TILES": 2}, 90)]
    monkeypatch.setattr(nvrtc, "_load", Mock(side_effect=RuntimeError("launched")))
    with pytest.raises(RuntimeError, match="launched"):
        launch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "block_type"),
    [*((90, each) for each in TYPES), (80, GgmlType.Q6_K), (120, Int4Type(64))],
)
def test_compiles(block_type: BlockType, architecture: int) -> None:
    """Every format, by NVRTC, which needs no GPU. More tokens than 128 have one tile, which one format has twice."""
    limit = 1024 * shared_kib(architecture)
    cases = [(16, torch.bfloat16, 2048), (512, torch.float16, 640)]
    for tokens, dtype, columns in cases + [(256, torch.bfloat16, 768)] * (block_type == GgmlType.Q6_K):
        tile = select_config(8 * tokens, 128, [block_type], limit).tile
        macros = dict(tile.macros(block_type, columns, dtype, architecture >= 90))
        check_compiles(KERNEL, macros, architecture, to_ptx=block_type != GgmlType.Q6_K)


def test_supports_no_tensors_of_a_cpu() -> None:
    weight = stacked(random_weight(1, 32, 512, GgmlType.Q8_0), 2)
    assert not supports(torch.zeros(1, 512, dtype=torch.bfloat16), 2, [weight])


@pytest.mark.gpu
@FORMATS
@DTYPES
@pytest.mark.parametrize(
    "config", [*CONFIGS[::2], *(pytest.param(each, marks=pytest.mark.slow) for each in CONFIGS[1::2])]
)
def test_multiplies_each_pair_as_in_float64(block_type: BlockType, dtype: torch.dtype, config: ExpertConfig) -> None:
    """Rows and columns that are no multiple of a tile or a chunk; experts with no pair, one, and several tiles."""
    experts, top_k = 5, 2
    for rows, k in ((96, 512), (200, 1280), (48, 768)):
        columns = k // block_type.block_size * block_type.block_size
        weight = stacked(random_weight(rows, experts * rows, columns, block_type), experts)
        on_gpu = there(weight, torch.device("cuda"))
        for tokens in (1, 7, 150):
            ids = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)]).int().cuda()
            ids[ids == 2] = 3  # no pair of expert 2; a token may have one expert twice
            alignment = moe_align_block_size(ids, config.block_m, experts)
            for from_tokens, gated in ((True, True), (True, False), (False, False)):
                hidden = torch.randn(tokens if from_tokens else tokens * top_k, columns, device="cuda").to(dtype)
                outputs = rows // 2 if gated else rows
                kept = torch.full((tokens * top_k, outputs + 3), float("nan"), dtype=dtype, device="cuda")
                ggml_expert_gemm(
                    hidden,
                    on_gpu,
                    kept[:, :outputs],
                    alignment=alignment,
                    config=config,
                    top_k=top_k,
                    from_tokens=from_tokens,
                    gated=gated,
                )
                assert kept[:, outputs:].isnan().all()
                step = torch.finfo(dtype).eps / 2
                for expert in range(experts):
                    own = (ids.flatten() == expert).nonzero().flatten()
                    exact = expected(hidden[own // top_k if from_tokens else own], on_gpu.rows(expert), gated, None)
                    if len(own):
                        torch.testing.assert_close(
                            kept[own, :outputs].double(),
                            exact,
                            rtol=1.01 * step,
                            atol=2e-5 * float(exact.abs().amax()),
                        )


@pytest.mark.gpu
@FORMATS
def test_experts_match_the_reference(block_type: BlockType) -> None:
    """By the four bodies, eager and as a CUDA graph that other tokens are replayed through."""
    device, experts, top_k = torch.device("cuda"), 16, 4
    gate_up = there(stacked(random_weight(1, experts * 512, 512, block_type), experts), device)
    down = there(stacked(random_weight(2, experts * 512, 256, block_type), experts), device)
    bodies = []
    for tokens in (1, 5, 33, 64, 100, 700, 1100):
        hidden = torch.randn(tokens, 512, device=device).bfloat16()
        ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.int()
        routing = Routing(ids, torch.rand(tokens, top_k, device=device))
        bodies.append(select_body(hidden, ids.numel(), [gate_up], down))
        assert max_tiles(ids.numel(), experts, 8) < 2048
        result = ggml_expert_outputs(hidden, routing, [gate_up], down)
        exact = ggml_expert_outputs_reference(hidden.double(), routing, [gate_up], down)
        assert (result.double() - exact).norm() <= 4e-3 * exact.norm()
        assert torch.equal(result, ggml_expert_outputs(hidden, routing, [gate_up], down))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ggml_expert_outputs(hidden, routing, [gate_up], down)
        hidden.copy_(torch.randn_like(hidden))
        ids.copy_(torch.rand(tokens, experts, device=device).topk(top_k).indices)
        graph.replay()
        assert torch.equal(captured, ggml_expert_outputs(hidden, routing, [gate_up], down))
    last = "dequantized" if torch.cuda.get_device_capability() == (9, 0) else "triton"
    assert bodies == ["gemv"] * 2 + ["cuda"] * 2 + ["triton"] * 2 + [last]


@pytest.mark.gpu
def test_slices_of_experts_give_what_one_slice_does(monkeypatch: pytest.MonkeyPatch) -> None:
    device, experts = torch.device("cuda"), 16
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tiles by TMA are for Hopper GPUs")
    gate_up = there(stacked(random_weight(1, experts * 512, 512, GgmlType.Q8_0), experts), device)
    down = there(stacked(random_weight(2, experts * 512, 256, GgmlType.Q8_0), experts), device)
    hidden = torch.randn(1100, 512, device=device).bfloat16()
    ids = torch.rand(1100, experts, device=device).topk(4).indices.int()
    whole = dequantized_expert_outputs(hidden, ids, gate_up, down)
    for experts_per_slice in (1, 3, 7):
        monkeypatch.setattr("meltcore.kernels.quant.ggml_experts.SLICE_VALUES", experts_per_slice * 512 * 512)
        assert torch.equal(whole, dequantized_expert_outputs(hidden, ids, gate_up, down))
