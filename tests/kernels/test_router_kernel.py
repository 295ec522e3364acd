"""Norm and router in one launch, and the choice: against the three of them in torch, and float64."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too

from meltcore.kernels import router as router_file
from meltcore.kernels import routing as routing_file
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.router import RouterLaunch, to_experts
from meltcore.kernels.routing import Routing

CHOICES = 3
SMALL = RouterLaunch(tokens=16, rows=16, columns=64, shares=1, stages=2, warps=4)
LAUNCHES = pytest.mark.parametrize(
    "launch",
    [SMALL, SMALL._replace(shares=2), SMALL._replace(tokens=64, rows=32), SMALL._replace(rows=32, shares=4)],
    ids=["whole-sums", "two-shares", "large-tiles", "four-shares"],
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
        launch: RouterLaunch,
        tokens: slice = slice(None),
        *,
        normalised: bool = False,
        drawn: int | None = None,
    ) -> tuple[torch.Tensor, Routing]:
        """By the Triton bodies. normalised: the norm is left out."""
        norm = None if normalised else Norm(self.norm.weight.to(device), self.norm.eps)
        residual, router = self.residual[tokens].to(device), self.router.to(device)
        hidden, logits = router_file._logits_triton(residual, norm, router, launch)
        how = {"renormalised": True, "shared": self.shared, "drawn": drawn, "dtype": residual.dtype}
        experts, weights = routing_file._route_triton(logits, CHOICES, **how)
        return hidden.cpu(), Routing(experts.cpu(), weights.cpu())

    def check(self, hidden: torch.Tensor, routing: Routing) -> None:
        """The choice follows from `hidden`, but for what rounding a logit to the tokens' type may exchange."""
        logits = hidden.double() @ self.router.double().t()
        steps = 1.1 if self.residual.dtype == torch.bfloat16 else 10  # else sums are no more exact than logits are
        slack = steps * torch.finfo(self.residual.dtype).eps * logits.abs().max().item()
        choice = routing.experts[:, :CHOICES].long()
        logits, gates = logits.tensor_split([logits.shape[1] - self.shared], dim=1)
        taken = logits.gather(1, choice)
        others = logits.scatter(1, choice, float("-inf"))
        assert all(len(set(row)) == CHOICES for row in choice.tolist())
        assert (taken.min(1).values >= others.max(1).values - slack).all()
        weights = torch.cat([taken.softmax(1), gates.sigmoid()], 1)
        torch.testing.assert_close(routing.weights.double(), weights, rtol=slack, atol=0)
        if self.shared:
            assert routing.experts[:, CHOICES].tolist() == [logits.shape[1]] * len(logits)


@LAUNCHES
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 40), (5, 7), (16, 33), (37, 32), (70, 12)])
def test_the_choice_is_that_of_norm_product_and_softmax(
    tokens: int, experts: int, shared: bool, launch: RouterLaunch, device: torch.device
) -> None:
    problem = Problem(tokens, experts, shared=shared)
    hidden, routing = problem.run(device, launch)
    expected = rms_norm(problem.residual, *problem.norm)
    torch.testing.assert_close(hidden, expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=0)
    problem.check(hidden, routing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("tokens", "experts"), [(21, 30), (150, 30), (150, 31), (150, 5)])
def test_the_torch_body_is_what_the_words_say(tokens: int, experts: int, dtype: torch.dtype) -> None:
    """Also of so many tokens that columns past a multiple of 8 are a product of their own."""
    problem = Problem(tokens, experts, shared=True, dtype=dtype)
    hidden, routing = to_experts(
        problem.residual, problem.norm, problem.router, CHOICES, renormalised=True, shared=True
    )
    assert torch.equal(hidden, rms_norm(problem.residual, *problem.norm))
    problem.check(hidden, routing)


@pytest.mark.parametrize(("tokens", "tile"), [(18, 16), (18, 64), (70, 64)])
def test_what_is_normalised_already_is_returned_as_it_is(tokens: int, tile: int, device: torch.device) -> None:
    problem = Problem(tokens, 20, shared=True)
    hidden, routing = problem.run(device, SMALL._replace(tokens=tile), normalised=True)
    assert torch.equal(hidden, problem.residual)
    problem.check(hidden, routing)


@LAUNCHES
def test_a_token_has_the_same_bits_alone_and_in_company(launch: RouterLaunch, device: torch.device) -> None:
    problem = Problem(35, 30, shared=True)
    hidden, routing = problem.run(device, launch)
    for token in (0, 34):
        alone = slice(token, token + 1)
        hidden_alone, routing_alone = problem.run(device, launch, alone)
        assert torch.equal(hidden_alone, hidden[alone])
        assert torch.equal(routing_alone.experts, routing.experts[alone])
        assert torch.equal(routing_alone.weights, routing.weights[alone])


def test_experts_can_be_drawn_all_alike_and_anew_in_every_call(device: torch.device) -> None:
    """Whatever the tokens are like; the shared expert keeps its place and its weight."""
    problem = Problem(40, 24, shared=True)
    problem.residual[:] = problem.residual[0]
    launch = SMALL._replace(columns=256)
    chosen, (_, plain) = [], problem.run(device, launch)
    for _ in range(8):
        _, routing = problem.run(device, launch, drawn=7)
        assert torch.equal(routing.weights[:, CHOICES], plain.weights[:, CHOICES])
        assert torch.equal(routing.experts[:, CHOICES], plain.experts[:, CHOICES])
        chosen.append(routing.experts[:, :CHOICES])
    assert len({tuple(row) for call in chosen for row in call.tolist()}) > 300, "320 draws of 12,144 there are"
    counts = torch.stack(chosen).flatten().bincount(minlength=24)
    assert (counts - 40).abs().max() < 5 * 40**0.5


def test_draws_follow_the_seed(device: torch.device) -> None:
    problem = Problem(3, 24, shared=False)

    def first_draw(seed: int) -> torch.Tensor:
        routing_file._draws(torch.empty(0, device=device).device, 4).zero_()
        return problem.run(device, SMALL, drawn=seed)[1].experts

    assert torch.equal(first_draw(1), first_draw(1))
    assert not torch.equal(first_draw(1), first_draw(2))


@pytest.mark.parametrize(
    ("tokens", "experts", "size", "dtype", "suits"),
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
def test_few_tokens_of_16_bits_go_in_one_launch(
    tokens: int, experts: int, size: int, dtype: torch.dtype, suits: bool
) -> None:
    residual, router = (torch.empty(rows, size, dtype=dtype, device="meta") for rows in (tokens, experts))
    norm = Norm(residual.new_empty(size), 1e-6)
    assert router_file.suits_one_launch(residual, norm, router) == suits
    assert router_file.suits_one_launch(residual, None, router) == (suits or tokens == 33)


@pytest.mark.parametrize("size", [192, 1024, 2048, 4096])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [2, 17, 128])
def test_a_launch_divides_what_it_cuts_and_fits(tokens: int, normed: bool, size: int) -> None:
    launches = [RouterLaunch.of(tokens, size, kib * 1024, normed=normed) for kib in (99, 227)]
    for launch, kib in zip(launches, (99, 227), strict=True):
        assert size % (launch.shares * launch.columns) == 0
        assert launch.bytes < kib * 1024
    assert launches[1].tokens == (64 if tokens > 16 and not normed else 16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 17, 32, 33, 64, 128, 129, 256, 1000, 3000])
def test_at_published_sizes_the_choice_follows(tokens: int) -> None:
    """Qwen3.5-35B-A3B's, by whatever serves so many tokens."""
    problem = Problem(tokens, 256, shared=True)
    norm = Norm(problem.norm.weight.cuda(), problem.norm.eps)
    residual, router = problem.residual.cuda(), problem.router.cuda()
    for _ in range(3):
        hidden, routing = to_experts(residual, norm, router, CHOICES, renormalised=True, shared=True)
        problem.check(hidden.cpu(), Routing(routing.experts.cpu(), routing.weights.cpu()))
