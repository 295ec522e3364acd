"""Few tokens by their block-quantized experts in CUDA C++: compiled for each architecture; on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from compile_tools import check_compiles
from test_ggml import random_weight, stacked, there
from test_ggml_skinny_gemm import COMMON_TYPES, DTYPES, FORMATS, TYPES, expected

from meltcore.kernels.activation import swiglu
from meltcore.kernels.architectures import ARCHITECTURES, shared_kib
from meltcore.kernels.fp8.block_fp8 import BlockFp8Tensor
from meltcore.kernels.fp8.block_fp8_experts import add_block_fp8_experts
from meltcore.kernels.moe.routing import RouterLogits, Routing, select_experts_reference
from meltcore.kernels.norm import Norm, rms_norm, rms_norm_reference
from meltcore.kernels.quant.ggml import BlockType, Fp8Type
from meltcore.kernels.quant.ggml_expert_gemv import (
    KERNEL,
    MAX_TOKENS,
    SUM_KERNEL,
    can_select,
    ggml_expert_gemv,
    ggml_expert_sum,
    select_config,
    static_bytes,
    sum_config,
    supports,
)
from meltcore.kernels.quant.ggml_experts import add_ggml_experts, ggml_expert_outputs_reference
from meltcore.kernels.quant.ggml_skinny_gemm import MIN_CAPABILITY, SkinnyConfig
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.int4 import Int4Type

CONFIGS = [SkinnyConfig(2, warps, depth, 1, shared_tokens=False) for warps, depth in ((1, 2), (4, 3), (8, 4))]


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each >= MIN_CAPABILITY])
def test_configurations_fit_into_shared_memory(architecture: int) -> None:
    limit = 1024 * shared_kib(architecture)
    for block_type in [*TYPES, Fp8Type(128)]:
        for columns in (640, 768, 1024):
            configs = [
                select_config(tokens, columns, block_type, limit, from_tokens=from_tokens)
                for tokens in (1, 4, 8)
                for from_tokens in (True, False)
            ]
            whole = sum_config(columns, block_type, limit)
            assert whole is not None
            for config in (*configs, whole):
                assert config.blocks_per_sm >= 1
                assert (config.shared_bytes(block_type) + static_bytes(config)) * config.blocks_per_sm <= limit


def test_wide_experts_have_no_sum() -> None:
    """Of Mixtral: eight rows of 14,336 columns do not fit beside the weights."""
    assert sum_config(14336, GgmlType.Q8_0, 227 * 1024) is None
    assert select_config(4, 16384, GgmlType.Q8_0, 99 * 1024, from_tokens=True).staged_values == 0
    assert sum_config(768, GgmlType.Q8_0, 227 * 1024) == SkinnyConfig(
        1, 3, 2, 1, shared_tokens=False, staged_values=8 * (768 + 32), warps=24
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "block_type"),
    [*((90, each) for each in (*TYPES, Fp8Type(128))), (80, GgmlType.Q6_K), (120, Int4Type(64)), (89, Fp8Type(64))],
)
def test_compiles(block_type: BlockType, architecture: int) -> None:
    """Every format, by NVRTC, which needs no GPU. One format also with the forms of one token and without logits."""
    limit = 1024 * shared_kib(architecture)
    gemv = [select_config(tokens, 2048, block_type, limit, from_tokens=True) for tokens in (1, 8)]
    whole = sum_config(1024, block_type, limit)
    assert whole is not None
    of_one = [(gemv[0], 0, 4), (gemv[0], 0, 0), (whole, 1, 0)] * (block_type == GgmlType.Q6_K)
    for config, is_sum, logits in [(gemv[1], 0, 0), (whole, 1, 9), *of_one]:
        macros = dict(config.macros(block_type, 2048, torch.bfloat16, architecture >= 90))
        kernel = SUM_KERNEL if is_sum else KERNEL
        macros |= {"SUM": is_sum, "EARLY": 1, "LOGITS": logits}
        check_compiles(kernel, macros, architecture, to_ptx=block_type != GgmlType.Q6_K)


def test_supports_no_tensors_of_a_cpu() -> None:
    weight = stacked(random_weight(1, 32, 512, GgmlType.Q8_0), 2)
    assert not supports(torch.zeros(1, 512, dtype=torch.bfloat16), 2, [weight])


@pytest.mark.gpu
@FORMATS
@DTYPES
@pytest.mark.parametrize("config", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in CONFIGS)])
def test_multiplies_each_pair_as_in_float64(
    block_type: BlockType, dtype: torch.dtype, config: SkinnyConfig | None
) -> None:
    """Rows and columns that are no multiple of a tile or a chunk; experts with no pair, one, and several tiles."""
    experts, top_k, device = 5, 3, torch.device("cuda")
    step = torch.finfo(dtype).eps / 2
    for rows, k in ((96, 512), (200, 1280), (48, 768)):
        columns = k // block_type.block_size * block_type.block_size
        weight = there(stacked(random_weight(rows, experts * rows, columns, block_type), experts), device)
        for tokens in (1, 7, 2 * MAX_TOKENS):
            ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int().to(device)
            ids[ids == 2] = 3  # no pair of expert 2; a token may have one expert twice
            for from_tokens, gated in ((True, True), (True, False), (False, False)):
                hidden = torch.randn(tokens if from_tokens else tokens * top_k, columns, device=device).to(dtype)
                outputs = rows // 2 if gated else rows
                kept = torch.full((tokens * top_k, outputs + 3), float("nan"), dtype=dtype, device=device)
                ggml_expert_gemv(
                    hidden,
                    weight,
                    kept[:, :outputs],
                    routing=Routing(ids, ids.float()),
                    from_tokens=from_tokens,
                    gated=gated,
                    config=config,
                )
                assert kept[:, outputs:].isnan().all()
                for expert in range(experts):
                    own = (ids.flatten() == expert).nonzero().flatten()
                    if len(own) == 0:
                        continue
                    exact = expected(hidden[own // top_k if from_tokens else own], weight.rows(expert), gated, None)
                    torch.testing.assert_close(
                        kept[own, :outputs].double(), exact, rtol=1.01 * step, atol=2e-5 * float(exact.abs().amax())
                    )


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("top_k", [8, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 9))])
def test_sums_over_the_experts_of_a_token_as_in_float64(block_type: BlockType, top_k: int) -> None:
    experts, device = 12, torch.device("cuda")
    for rows, k in ((96, 512), (200, 1280), (2500, 768)):
        columns = k // block_type.block_size * block_type.block_size
        weight = there(stacked(random_weight(rows, experts * rows, columns, block_type), experts), device)
        ids = torch.randperm(experts, device=device)[:top_k].int()[None]
        routing = Routing(ids, torch.rand(1, top_k, device=device))
        activated = torch.randn(top_k, columns, device=device).bfloat16()
        parts = [expected(activated[[k]], weight.rows(int(ids[0, k])), False, None) for k in range(top_k)]
        exact = (torch.cat(parts) * routing.topk_weights[0, :, None].double()).sum(0, keepdim=True)
        residual = torch.randn(1, rows, device=device).bfloat16()
        for given, total in ((None, exact), (residual.clone(), exact + residual.double())):
            result = ggml_expert_sum(given, activated, weight, routing)
            assert given is None or result is given
            torch.testing.assert_close(
                result.double(),
                total,
                rtol=1.01 * torch.finfo(torch.bfloat16).eps / 2,
                atol=2e-5 * float(total.abs().amax()),
            )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("block_type", "dtype", "experts", "top_k", "shared_expert"),
    [
        *(
            pytest.param(each, torch.bfloat16, 40, 9, True, marks=() if each in COMMON_TYPES else pytest.mark.slow)
            for each in TYPES
        ),
        (GgmlType.Q8_0, torch.float16, 3, 3, False),
        (GgmlType.Q8_0, torch.bfloat16, 128, 8, False),
        (GgmlType.Q8_0, torch.float16, 512, 31, True),
    ],
)
def test_selects_the_experts_of_a_token(
    block_type: BlockType, dtype: torch.dtype, experts: int, top_k: int, shared_expert: bool
) -> None:
    """By logits of which many are equal, some of them zero or minus zero, with the norm or of a normalized token."""
    device, width, columns = torch.device("cuda"), 256 if experts < 512 else 32, 256
    gate_up = there(stacked(random_weight(1, experts * 2 * width, columns, block_type), experts), device)
    down = there(stacked(random_weight(2, experts * columns, width, block_type), experts), device)
    for norm_topk_prob in (True, False):
        values = (torch.randn(1, experts, device=device) * 2).round().to(dtype) / 2
        values[0, ::5] = -values[0, ::5]
        hidden = 3 * torch.randn(1, columns, device=device).to(dtype)
        norm = Norm((1 + 0.1 * torch.randn(columns, device=device)).to(dtype), 1e-6) if norm_topk_prob else None
        assert can_select(hidden, norm, top_k, [gate_up], down)
        logits = RouterLogits(values, norm, top_k - shared_expert, norm_topk_prob, shared_expert)
        residual = torch.randn(1, columns, device=device).to(dtype)
        result = add_ggml_experts(residual.clone(), hidden, logits, [gate_up], down)
        routing = select_experts_reference(
            values, top_k - shared_expert, norm_topk_prob=norm_topk_prob, shared_expert=shared_expert
        )
        tokens = hidden.double()
        if norm:
            tokens = tokens * (tokens.square().mean() + norm.eps).rsqrt() * norm.weight.double()
        outputs = ggml_expert_outputs_reference(tokens, routing, [gate_up], down)
        exact = residual.double() + (outputs * routing.topk_weights[0, :, None].double()).sum(0)
        # Minima of a format give outputs a common part, which has the errors of all activations.
        assert (result.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.gpu
def test_a_token_in_fp8_selects_its_experts() -> None:
    """The kernels that are given the same experts and the normalized token, which they quantize to the same values."""
    device, experts, top_k, width, columns = torch.device("cuda"), 64, 8, 256, 512
    gate_up, down = (
        BlockFp8Tensor(
            torch.randn(experts, rows, size, device=device).to(torch.float8_e4m3fn),
            torch.rand(experts, rows // 128, size // 128, device=device) / size**0.5,
        )
        for rows, size in ((2 * width, columns), (columns, width))
    )
    values, hidden = (torch.randn(1, size, device=device).bfloat16() for size in (experts, columns))
    logits = RouterLogits(values, None, top_k, True, False)
    routing = select_experts_reference(values, top_k, norm_topk_prob=True)
    result, given = (add_block_fp8_experts(None, hidden, each, gate_up, down) for each in (logits, routing))
    assert (result - given).norm() <= 4e-3 * given.norm()
    # A normalized token that is rounded first may be quantized to neighboring values: errors of one size.
    norm = Norm((1 + 0.1 * torch.randn(columns, device=device)).bfloat16(), 1e-6)
    result = add_block_fp8_experts(None, hidden, logits._replace(norm=norm), gate_up, down)
    given = add_block_fp8_experts(None, rms_norm(hidden, *norm), routing, gate_up, down)
    token, exact = rms_norm_reference(hidden.float(), norm.weight.float(), norm.eps), torch.zeros_like(hidden.float())
    for expert, weight in zip(routing.topk_ids[0].tolist(), routing.topk_weights[0], strict=True):
        up, out = (BlockFp8Tensor(each.values[expert], each.scales[expert]).dequantize() for each in (gate_up, down))
        exact += weight * (swiglu(token @ up.t()) @ out.t())
    assert (result - exact).norm() <= 1.3 * (given - exact).norm() <= 0.1 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_a_token_is_replayed_with_other_experts(fused: bool) -> None:
    """As a CUDA graph of several layers, in which each kernel may begin before the one before it has ended."""
    device, experts, top_k, layers = torch.device("cuda"), 64, 8, 4
    sizes = [512] if fused else [256, 256]
    gate_up = [
        [
            there(stacked(random_weight(7 * i + j, experts * rows, 512, GgmlType.Q8_0), experts), device)
            for j, rows in enumerate(sizes)
        ]
        for i in range(layers)
    ]
    down = [
        there(stacked(random_weight(90 + i, experts * 512, 256, GgmlType.Q8_0), experts), device) for i in range(layers)
    ]
    residual, first = (torch.randn(1, 512, device=device).bfloat16() for _ in range(2))
    ids = torch.zeros(layers, 1, top_k, dtype=torch.int32, device=device)
    weights = torch.rand(layers, 1, top_k, device=device)

    def run() -> torch.Tensor:
        total = first.clone()
        for layer in range(layers):
            routing = Routing(ids[layer].clone(), weights[layer].clone())  # which the kernel before writes
            total = add_ggml_experts(total, residual, routing, gate_up[layer], down[layer])
        return total

    def draw() -> None:
        residual.normal_()
        ids.copy_(torch.rand(layers, 1, experts, device=device).topk(top_k).indices)

    draw()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        draw()
        graph.replay()
        exact = first.double()
        for layer in range(layers):
            outputs = ggml_expert_outputs_reference(
                residual.double(), Routing(ids[layer], weights[layer]), gate_up[layer], down[layer]
            )
            exact = exact + (outputs * weights[layer, 0, :, None]).sum(0)
        assert (captured.double() - exact).norm() <= (4e-3 if fused else 6e-3) * exact.norm()
        assert torch.equal(captured, run())
