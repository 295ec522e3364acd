"""Norm and router GEMM in one launch, and expert selection: against torch and float64."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.moe import router as router_file
from meltcore.kernels.moe import routing as routing_file
from meltcore.kernels.moe.router import route_tokens, select_config
from meltcore.kernels.moe.routing import Routing, select_experts
from meltcore.kernels.norm import Norm, rms_norm

TOP_K = 3
SMALL = GemmConfig(block_m=16, block_n=16, block_k=64, num_stages=2)
CONFIGS = pytest.mark.parametrize(
    "config",
    [SMALL, SMALL._replace(split_k=2), SMALL._replace(block_m=64, block_n=32), SMALL._replace(block_n=32, split_k=4)],
    ids=["one-split", "two-splits", "large-tiles", "four-splits"],
)


class Problem:
    def __init__(self, tokens: int, experts: int, *, shared: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(tokens)
        size = 256
        self.shared = shared
        self.residual = (3 * torch.randn(tokens, size)).to(dtype)
        self.norm = Norm(1 + torch.randn(size) / 4, 1e-6)
        self.router = (2 * torch.randn(experts + shared, size) * size**-0.5).to(dtype)

    def run(
        self,
        device: torch.device,
        config: GemmConfig,
        tokens: slice = slice(None),
        *,
        normalized: bool = False,
        uniform_seed: int | None = None,
    ) -> tuple[torch.Tensor, Routing]:
        """In Triton. normalized: without the norm."""
        norm = None if normalized else Norm(self.norm.weight.to(device), self.norm.eps)
        residual, router = self.residual[tokens].to(device), self.router.to(device)
        hidden, logits = router_file._launch_router(residual, norm, router, config)
        options = {"norm_topk_prob": True, "shared_expert": self.shared, "uniform_seed": uniform_seed}
        routing = in_triton(select_experts)(logits, TOP_K, **options, dtype=residual.dtype)
        return hidden.cpu(), Routing(*(tensor.cpu() for tensor in routing))

    def check(self, hidden: torch.Tensor, routing: Routing) -> None:
        """The experts follow from `hidden`, except where rounding a logit to the tokens' type exchanges them."""
        logits = hidden.double() @ self.router.double().t()
        steps = 1.1 if self.residual.dtype == torch.bfloat16 else 10  # otherwise sums are no more exact than logits
        slack = steps * torch.finfo(self.residual.dtype).eps * logits.abs().max().item()
        selected = routing.topk_ids[:, :TOP_K].long()
        logits, gates = logits.tensor_split([logits.shape[1] - self.shared], dim=1)
        taken = logits.gather(1, selected)
        others = logits.scatter(1, selected, float("-inf"))
        assert all(len(set(row)) == TOP_K for row in selected.tolist())
        assert (taken.min(1).values >= others.max(1).values - slack).all()
        weights = torch.cat([taken.softmax(1), gates.sigmoid()], 1)
        torch.testing.assert_close(routing.topk_weights.double(), weights, rtol=slack, atol=0)
        if self.shared:
            assert routing.topk_ids[:, TOP_K].tolist() == [logits.shape[1]] * len(logits)


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize(
    ("tokens", "experts", "shared"), [(1, 40, False), (5, 7, True), (16, 33, False), (37, 32, True), (70, 12, False)]
)
def test_experts_follow_from_norm_gemm_and_softmax(
    tokens: int, experts: int, shared: bool, config: GemmConfig, device: torch.device
) -> None:
    problem = Problem(tokens, experts, shared=shared)
    hidden, routing = problem.run(device, config)
    expected = rms_norm(problem.residual, *problem.norm)
    torch.testing.assert_close(hidden, expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=0)
    problem.check(hidden, routing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("tokens", "experts"), [(21, 30), (150, 30), (150, 31), (150, 5)])
def test_reference_matches_its_documentation(tokens: int, experts: int, dtype: torch.dtype) -> None:
    """Also for many tokens, where columns past a multiple of 8 are a GEMM of their own."""
    problem = Problem(tokens, experts, shared=True, dtype=dtype)
    hidden, routing = route_tokens(
        problem.residual, problem.norm, problem.router, TOP_K, norm_topk_prob=True, shared_expert=True
    )
    assert torch.equal(hidden, rms_norm(problem.residual, *problem.norm))
    problem.check(hidden, routing)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "block_m"), [(18, 16), (18, 64), (70, 64)])
def test_normalized_input_is_returned_unchanged(tokens: int, block_m: int, device: torch.device) -> None:
    problem = Problem(tokens, 20, shared=True)
    hidden, routing = problem.run(device, SMALL._replace(block_m=block_m), normalized=True)
    assert torch.equal(hidden, problem.residual)
    problem.check(hidden, routing)


@pytest.mark.slow
@CONFIGS
def test_token_has_the_same_bits_in_every_batch(config: GemmConfig, device: torch.device) -> None:
    problem = Problem(35, 30, shared=True)
    hidden, routing = problem.run(device, config)
    for token in (0, 34):
        alone = slice(token, token + 1)
        hidden_alone, routing_alone = problem.run(device, config, alone)
        assert torch.equal(hidden_alone, hidden[alone])
        assert torch.equal(routing_alone.topk_ids, routing.topk_ids[alone])
        assert torch.equal(routing_alone.topk_weights, routing.topk_weights[alone])


@pytest.mark.slow
def test_uniform_routing_draws_anew_in_every_call(device: torch.device) -> None:
    """Independent of the tokens; the shared expert keeps its position and weight."""
    problem = Problem(40, 24, shared=True)
    problem.residual[:] = problem.residual[0]
    config = SMALL._replace(block_k=256)
    drawn, (_, plain) = [], problem.run(device, config)
    for _ in range(8):
        _, routing = problem.run(device, config, uniform_seed=7)
        assert torch.equal(routing.topk_weights[:, TOP_K], plain.topk_weights[:, TOP_K])
        assert torch.equal(routing.topk_ids[:, TOP_K], plain.topk_ids[:, TOP_K])
        drawn.append(routing.topk_ids[:, :TOP_K])
    assert len({tuple(row) for call in drawn for row in call.tolist()}) > 300, "320 draws of 12,144 possible ones"
    counts = torch.stack(drawn).flatten().bincount(minlength=24)
    assert (counts - 40).abs().max() < 5 * 40**0.5


def test_uniform_routing_follows_the_seed(device: torch.device) -> None:
    problem = Problem(3, 24, shared=False)

    def first_draw(seed: int) -> torch.Tensor:
        routing_file._call_counters(torch.empty(0, device=device).device, 4).zero_()
        return problem.run(device, SMALL, uniform_seed=seed)[1].topk_ids

    assert torch.equal(first_draw(1), first_draw(1))
    assert not torch.equal(first_draw(1), first_draw(2))


@pytest.mark.parametrize(
    ("tokens", "experts", "size", "dtype", "expected"),
    [
        (1, 257, 2048, torch.bfloat16, False),
        (2, 257, 2048, torch.bfloat16, True),
        (32, 257, 2048, torch.bfloat16, True),
        (33, 257, 2048, torch.bfloat16, False),
        (32, 128, 2048, torch.float16, True),
        (0, 128, 2048, torch.bfloat16, False),
        (2, 512, 2048, torch.bfloat16, True),
        (2, 64, 2000, torch.bfloat16, False),
        (2, 64, 2048, torch.float32, False),
    ],
)
def test_router_kernel_supports(tokens: int, experts: int, size: int, dtype: torch.dtype, expected: bool) -> None:
    residual, router = (torch.empty(rows, size, dtype=dtype, device="meta") for rows in (tokens, experts))
    norm = Norm(residual.new_empty(size), 1e-6)
    assert router_file.supports(residual, norm, router) == expected
    assert router_file.supports(residual, None, router) == (expected or tokens == 33)


@pytest.mark.parametrize("size", [192, 1024, 2048, 4096])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("tokens", [2, 17, 128])
def test_select_config_divides_evenly_and_fits_in_shared_memory(tokens: int, has_norm: bool, size: int) -> None:
    configs = [select_config(tokens, size, kib * 1024, has_norm=has_norm) for kib in (99, 227)]
    for config, kib in zip(configs, (99, 227), strict=True):
        assert size % (config.split_k * config.block_k) == 0
        assert config.num_stages * (config.block_m + config.block_n) * config.block_k * 2 < kib * 1024
    assert configs[1].block_m == (64 if tokens > 16 and not has_norm else 16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 17, 32, 33, 64, 128, 129, 256, 1000, 3000])
def test_experts_follow_at_published_sizes(tokens: int) -> None:
    """Qwen3.5-35B-A3B's, with the kernel for each number of tokens."""
    problem = Problem(tokens, 256, shared=True)
    norm = Norm(problem.norm.weight.cuda(), problem.norm.eps)
    residual, router = problem.residual.cuda(), problem.router.cuda()
    for _ in range(3):
        hidden, routing = route_tokens(residual, norm, router, TOP_K, norm_topk_prob=True, shared_expert=True)
        problem.check(hidden.cpu(), Routing(routing.topk_ids.cpu(), routing.topk_weights.cpu()))
