"""Experts: both implementations against float64 for all routings, and the same bits for every batch."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.moe import grouped_gemm as gemm_file
from meltcore.kernels.moe.combine import combine
from meltcore.kernels.moe.experts import add_experts, expert_outputs
from meltcore.kernels.moe.grouped_gemm import Mode, default_config, select_config, select_configs, select_mode
from meltcore.kernels.moe.routing import Routing, select_experts

SMALLEST = GemmConfig(block_m=16, block_n=64, block_k=64, num_stages=2, num_warps=4)
# The longer side of a tile comes first in the dot product: one configuration per order.
CONFIGS = pytest.mark.parametrize(
    "config", [SMALLEST, SMALLEST._replace(block_m=64, block_n=32)], ids=["long-rows", "long-pairs"]
)


class Problem:
    """Weights of unit gain, and tokens with the experts they go to."""

    def __init__(
        self, seed: int, tokens: int, experts: int, top_k: int, size: int, width: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(seed)
        self.hidden = torch.randn(tokens, size).to(dtype)
        self.residual = torch.randn(tokens, size).to(dtype)
        self.gate_up = (torch.randn(experts, 2 * width, size) * size**-0.5).to(dtype)
        self.down = (torch.randn(experts, size, width) * width**-0.5).to(dtype)
        self.routing = select_experts(2 * torch.randn(tokens, experts), top_k, norm_topk_prob=True)

    def exact(self) -> torch.Tensor:
        """In float64, token by token."""
        result = self.residual.double()
        for token, (chosen, weights) in enumerate(zip(*self.routing, strict=True)):
            for expert, weight in zip(chosen.tolist(), weights.double(), strict=True):
                gate, up = (self.gate_up[expert].double() @ self.hidden[token].double()).chunk(2)
                result[token] += weight * (self.down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        return result

    def run(
        self,
        device: torch.device,
        config: GemmConfig,
        tokens: slice = slice(None),
        mode: Mode | None = None,
    ) -> torch.Tensor:
        """In Triton."""
        routing = Routing(*(tensor[tokens].contiguous().to(device) for tensor in self.routing))
        residual = self.residual[tokens].to(device, copy=True)
        weights = self.gate_up.to(device), self.down.to(device)
        outputs = in_triton(expert_outputs)(self.hidden[tokens].to(device), routing, *weights, config=config, mode=mode)
        result = in_triton(combine)(outputs, routing.topk_weights, residual)
        assert result is residual
        return result.cpu()


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Both roundings of an expert's values, and in float32 the errors of its sums, by what the results are like."""
    error, steps = result.double() - expected, 4 if dtype == torch.float32 else 1
    assert result.dtype == dtype
    assert error.norm() <= steps * torch.finfo(dtype).eps * expected.norm()
    assert error.abs().max() <= 10 * steps * torch.finfo(dtype).eps * expected.pow(2).mean().sqrt()


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "size", "width", "dtype"),
    [
        (1, 8, 3, 64, 48, torch.float32),
        (7, 5, 2, 96, 32, torch.bfloat16),
        (24, 4, 4, 64, 64, torch.float16),
        (33, 4, 1, 72, 40, torch.float32),
        (2, 20, 8, 64, 16, torch.bfloat16),
    ],
)
def test_each_token_gets_the_weighted_sum_of_its_experts(
    tokens: int,
    experts: int,
    top_k: int,
    size: int,
    width: int,
    dtype: torch.dtype,
    config: GemmConfig,
    device: torch.device,
) -> None:
    problem = Problem(tokens, tokens, experts, top_k, size, width, dtype)
    assert_near(problem.run(device, config), problem.exact(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_reference_matches_its_documentation(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(3, 21, 6, 3, 64, 40, dtype)
    residual = problem.residual.clone()
    result = add_experts(residual, problem.hidden, problem.routing, problem.gate_up, problem.down)
    assert result is residual
    assert_near(result, problem.exact(), dtype)


@CONFIGS
def test_all_tokens_select_one_expert(config: GemmConfig, device: torch.device) -> None:
    problem = Problem(0, 70, 5, 1, 32, 16, torch.float32)
    problem.routing.topk_ids.fill_(4)
    assert_near(problem.run(device, config), problem.exact(), torch.float32)


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "shared"),
    [(1, 4, 3, True), (2, 10, 4, False), (6, 12, 3, True), (20, 5, 2, True), (32, 3, 1, False)],
)
def test_all_modes_give_the_same_bits(
    tokens: int, experts: int, top_k: int, shared: bool, config: GemmConfig, device: torch.device
) -> None:
    """From fewer pairs than experts to many pairs per expert."""
    problem = Problem(tokens, tokens, experts, top_k, 64, 16, torch.bfloat16)
    if shared:
        problem.routing = select_experts(torch.randn(tokens, experts), top_k, norm_topk_prob=True, shared_expert=True)
    modes: list[Mode] = ["indirect", "grouped", *(["gemv"] if tokens < 10 else [])]  # type: ignore[list-item]
    results = [problem.run(device, config, mode=mode) for mode in modes]
    assert_near(results[0], problem.exact(), torch.bfloat16)
    assert all(torch.equal(results[0], result) for result in results)


def test_select_mode_by_tokens_and_width() -> None:
    def down(width: int) -> torch.Tensor:
        return torch.empty(257, 2048, width, dtype=torch.bfloat16, device="meta")

    assert [select_mode(tokens, down(512)) for tokens in (1, 2, 3, 16)] == ["gemv"] * 2 + ["indirect"] * 2
    assert [select_mode(tokens, down(128)) for tokens in (1, 8, 9, 16)] == ["gemv"] * 2 + ["indirect"] * 2
    assert [select_mode(tokens, down(128)) for tokens in (17, 8192)] == ["grouped"] * 2


@CONFIGS
def test_token_has_the_same_bits_in_every_batch(config: GemmConfig, device: torch.device) -> None:
    problem = Problem(1, 20, 3, 2, 64, 32, torch.bfloat16)
    whole = problem.run(device, config)
    assert torch.equal(whole, problem.run(device, config))
    for token in (0, 19):
        assert torch.equal(whole[token : token + 1], problem.run(device, config, slice(token, token + 1)))


def test_memory_behind_the_result_is_not_written(device: torch.device) -> None:
    problem = Problem(2, 5, 4, 2, 40, 24, torch.float32)
    kept = torch.full((5 * 40 + 64,), 7.0, device=device)
    problem.residual = kept[:200].view(5, 40)
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    weights = problem.gate_up.to(device), problem.down.to(device)
    outputs = in_triton(expert_outputs)(problem.hidden.to(device), routing, *weights, config=SMALLEST)
    in_triton(combine)(outputs, routing.topk_weights, problem.residual)
    assert (kept[200:] == 7.0).all()
    assert not (kept[:200] == 7.0).all()


@pytest.mark.parametrize("function", [add_experts, in_triton(add_experts)], ids=["reference", "triton"])
def test_without_residual_the_sum_is_returned(function: object, device: torch.device) -> None:
    problem = Problem(5, 7, 4, 2, 64, 32, torch.bfloat16)
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    given = [tensor.to(device) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    result = function(None, given[0], routing, *given[1:])  # type: ignore[operator]
    problem.residual.zero_()
    assert_near(result.cpu(), problem.exact(), torch.bfloat16)


def test_no_tokens(device: torch.device) -> None:
    problem = Problem(0, 3, 4, 2, 32, 16, torch.float32)
    assert problem.run(device, SMALLEST, slice(0, 0)).shape == (0, 32)


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize(("pairs", "experts"), [(8, 128), (1024, 128), (4096, 128), (16384, 256), (65536, 8)])
def test_default_config_fits_in_shared_memory(pairs: int, experts: int, element_bytes: int, shared_kib: int) -> None:
    config = default_config(pairs, experts, element_bytes, shared_kib * 1024)
    stage_bytes = (config.block_m + config.block_n) * config.block_k * element_bytes
    assert config.num_stages >= 2
    assert config.num_stages * stage_bytes <= shared_kib * 1024
    assert config.block_m >= min(128, 2 * pairs / experts) or element_bytes == 4


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 20, 200, 2000])
def test_implementations_agree_at_published_sizes(tokens: int) -> None:
    """Qwen3-30B-A3B's, with fewer experts: each tile size is launched."""
    problem = Problem(tokens, tokens, 32, 8, 2048, 768, torch.bfloat16)
    given = [tensor.cuda() for tensor in (problem.hidden, problem.gate_up, problem.down)]
    routing = Routing(*(tensor.cuda() for tensor in problem.routing))
    results = []
    for implementation in ("triton", "reference"):
        force_implementation(implementation)  # type: ignore[arg-type]
        results.append(add_experts(problem.residual.cuda(), given[0], routing, *given[1:]))
    force_implementation(None)
    assert_near(results[0].cpu(), results[1].cpu().double(), torch.bfloat16)


@pytest.mark.gpu
def test_cuda_graph_follows_the_routing_of_its_inputs() -> None:
    problem = Problem(4, 24, 8, 3, 64, 48, torch.bfloat16)
    hidden, gate_up, down = (tensor.cuda() for tensor in (problem.hidden, problem.gate_up, problem.down))
    logits = torch.randn(24, 8, device="cuda")

    def step() -> torch.Tensor:
        return add_experts(
            torch.zeros_like(hidden), hidden, select_experts(logits, 3, norm_topk_prob=True), gate_up, down
        )

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(3):
        logits.normal_()
        hidden.normal_()
        graph.replay()
        assert torch.equal(result, step())


@pytest.mark.parametrize(("pairs", "row"), [(9, 0), (18, 0), (19, 1), (10**6, -1)])
def test_h200_uses_the_tuned_config(pairs: int, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(257, 1024, 2048, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(gemm_file, "capability", lambda device: 90)
    assert select_config(pairs, weight) == GemmConfig(*gemm_file.TABLE[257, 1024, 2048][row][1])
    # Not for another GPU, nor for another shape.
    monkeypatch.setattr(gemm_file, "shared_memory_bytes", lambda device: 227 * 1024)
    default = default_config(pairs, 257, 2, 227 * 1024)
    assert select_config(pairs, weight[:, :60]) == default
    monkeypatch.setattr(gemm_file, "capability", lambda device: 100)
    assert select_config(pairs, weight) == default


@pytest.mark.parametrize(
    ("shape", "like"), [((64, 1408, 2048), (128, 1536, 2048)), ((96, 2048, 384), (257, 2048, 512))]
)
def test_untuned_shape_takes_configs_of_the_most_similar_one(
    shape: tuple[int, ...], like: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At as many pairs per expert."""
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(gemm_file, "capability", lambda device: 90)
    for most, config in gemm_file.TABLE[like]:
        pairs = most * shape[0] // like[0]
        assert select_config(pairs, weight) == GemmConfig(*config)
        assert shape[2] % GemmConfig(*config).block_k == 0


def test_tuned_configs_are_sorted_and_divide_their_columns() -> None:
    for (_, _, columns), configs in gemm_file.TABLE.items():
        most = [pairs for pairs, _ in configs]
        assert most == sorted(set(most))
        for _, config in configs:
            assert columns % GemmConfig(*config).block_k == 0


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("experts", "width"), [(128, 768), (257, 512), (257, 384), (257, 256), (257, 128), (257, 64)])
def test_both_gemms_have_the_same_block_m(
    experts: int, width: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are aligned once for both, while each has a table of its own."""
    monkeypatch.setattr(gemm_file, "capability", lambda device: capability)
    monkeypatch.setattr(gemm_file, "shared_memory_bytes", lambda device: 227 * 1024)
    gate_up = torch.empty(experts, 2 * width, 2048, dtype=torch.bfloat16, device="meta")
    down = torch.empty(experts, 2048, width, dtype=torch.bfloat16, device="meta")
    for pairs in (*range(8, 4096, 120), 9216, 9217, 18432, 18433, 80_000):
        up_config, down_config = select_configs(pairs, gate_up, down)
        assert up_config.block_m == down_config.block_m
        if capability == 90:
            assert up_config == select_config(pairs, gate_up)
            assert 2048 % up_config.block_k == width % down_config.block_k == 0
