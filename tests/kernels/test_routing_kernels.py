"""Which experts a token goes to, and which tokens an expert has: the Triton bodies against the torch ones."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too

from meltcore.kernels import routing as routing_file
from meltcore.kernels.routing import Routing, by_expert, route

SHAPES = pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(1, 128, 8), (5, 128, 8), (13, 6, 2), (4, 8, 8), (3, 256, 8), (9, 3, 1)]
)


def assert_same(result: Routing, expected: Routing) -> None:
    assert result.experts.dtype == torch.int32
    assert torch.equal(result.experts.cpu(), expected.experts)
    torch.testing.assert_close(result.weights.cpu(), expected.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@SHAPES
def test_the_likeliest_experts_and_their_weights(
    tokens: int, experts: int, choices: int, dtype: torch.dtype, renormalised: bool, device: torch.device
) -> None:
    """In 16-bit types several logits of a row are equal."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts).to(dtype)
    result = routing_file._route_triton(logits.to(device), choices, renormalised=renormalised)
    assert_same(result, routing_file._route_torch(logits, choices, renormalised=renormalised))


@pytest.mark.parametrize("renormalised", [True, False])
@SHAPES
def test_a_shared_expert_comes_behind_the_choices(
    tokens: int, experts: int, choices: int, renormalised: bool, device: torch.device
) -> None:
    """Weighted by the sigmoid of the last column, which changes nothing else."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts + 1) * 3
    alone = routing_file._route_torch(logits[:, :-1], choices, renormalised=renormalised)
    expected = Routing(
        torch.cat([alone.experts, torch.full((tokens, 1), experts, dtype=torch.int32)], 1),
        torch.cat([alone.weights, logits[:, -1:].sigmoid()], 1),
    )
    how = {"renormalised": renormalised, "shared": True}
    assert_same(routing_file._route_torch(logits, choices, **how), expected)
    assert_same(routing_file._route_triton(logits.to(device), choices, **how), expected)


@pytest.mark.parametrize("renormalised", [True, False])
def test_routing_is_softmax_then_the_largest(renormalised: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 16)
    values, experts = logits.double().softmax(-1).topk(4)
    weights = values / values.sum(-1, keepdim=True) if renormalised else values
    assert_same(route(logits, 4, renormalised=renormalised), Routing(experts.int(), weights.float()))


@pytest.mark.parametrize("body", [routing_file._route_torch, routing_file._route_triton])
def test_of_equal_experts_the_lower_numbers_are_taken(body: object, device: torch.device) -> None:
    result = body(torch.zeros(2, 12, device=device), 3, renormalised=True)  # type: ignore[operator]
    assert result.experts.tolist() == [[0, 1, 2]] * 2
    assert result.weights.tolist() == [pytest.approx([1 / 3] * 3)] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_logits_that_are_no_numbers_still_name_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((3, 11), float("nan"), device=device)
    logits[1] = float("-inf")
    experts = routing_file._route_triton(logits, 4, renormalised=True).experts
    assert experts.min() >= 0
    assert experts.max() < 11


@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 20, 8), (5, 16, 4), (13, 6, 2), (4, 8, 8), (9, 3, 1)])
def test_segments_list_every_pair_once_in_order_of_its_expert(tokens: int, experts: int, choices: int) -> None:
    torch.manual_seed(tokens)
    chosen = torch.randint(experts, (tokens, choices), dtype=torch.int32)
    pairs, bounds = by_expert(chosen, experts)
    assert sorted(pairs.tolist()) == list(range(tokens * choices))
    for expert, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        own = pairs[start:end].tolist()
        assert own == sorted(own)
        assert all(chosen.flatten()[pair] == expert for pair in own)


def test_sums_of_shares_are_taken_before_the_choice(device: torch.device) -> None:
    """And rounded to the type that the product would have."""
    torch.manual_seed(0)
    parts = torch.randn(4, 7, 21)
    how = {"renormalised": True, "shared": True}
    expected = routing_file._route_torch(parts.sum(0).bfloat16(), 3, **how)
    assert_same(routing_file._route_torch(parts, 3, **how, dtype=torch.bfloat16), expected)
    assert_same(routing_file._route_triton(parts.to(device), 3, **how, dtype=torch.bfloat16), expected)


def test_rows_may_be_strided(device: torch.device) -> None:
    logits = torch.randn(5, 24)[:, :17]
    expected = routing_file._route_torch(logits, 3, renormalised=True)
    assert_same(routing_file._route_triton(logits.to(device), 3, renormalised=True), expected)


def test_minus_zero_is_no_less_than_zero(device: torch.device) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, 2.0, -0.0]], device=device)
    assert routing_file._route_triton(logits, 3, renormalised=True).experts.tolist() == [[3, 1, 2]]
