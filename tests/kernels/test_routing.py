"""Expert selection in Triton against the reference, and pairs sorted by expert."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.moe.routing import Routing, select_experts, select_experts_reference, sort_by_expert

select_experts_triton = in_triton(select_experts)

SHAPES = pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 8), (5, 128, 8), (13, 6, 2), (4, 8, 8), (3, 256, 8), (9, 3, 1)]
)


def assert_same(result: Routing, expected: Routing) -> None:
    assert result.topk_ids.dtype == torch.int32
    assert torch.equal(result.topk_ids.cpu(), expected.topk_ids)
    torch.testing.assert_close(result.topk_weights.cpu(), expected.topk_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@SHAPES
def test_selected_experts_and_weights(
    tokens: int, experts: int, top_k: int, dtype: torch.dtype, norm_topk_prob: bool, device: torch.device
) -> None:
    """In 16-bit types several logits of a row are equal."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts).to(dtype)
    result = select_experts_triton(logits.to(device), top_k, norm_topk_prob=norm_topk_prob)
    assert_same(result, select_experts_reference(logits, top_k, norm_topk_prob=norm_topk_prob))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@SHAPES
def test_shared_expert_is_appended(
    tokens: int, experts: int, top_k: int, norm_topk_prob: bool, device: torch.device
) -> None:
    """Its weight is the sigmoid of the last column, which changes no other expert."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts + 1) * 3
    alone = select_experts_reference(logits[:, :-1], top_k, norm_topk_prob=norm_topk_prob)
    expected = Routing(
        torch.cat([alone.topk_ids, torch.full((tokens, 1), experts, dtype=torch.int32)], 1),
        torch.cat([alone.topk_weights, logits[:, -1:].sigmoid()], 1),
    )
    options = {"norm_topk_prob": norm_topk_prob, "shared_expert": True}
    assert_same(select_experts_reference(logits, top_k, **options), expected)
    assert_same(select_experts_triton(logits.to(device), top_k, **options), expected)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_selection_is_softmax_then_top_k(norm_topk_prob: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 16)
    values, experts = logits.double().softmax(-1).topk(4)
    weights = values / values.sum(-1, keepdim=True) if norm_topk_prob else values
    assert_same(select_experts(logits, 4, norm_topk_prob=norm_topk_prob), Routing(experts.int(), weights.float()))


@pytest.mark.parametrize("function", [select_experts_reference, select_experts_triton])
def test_ties_go_to_the_lower_ids(function: object, device: torch.device) -> None:
    result = function(torch.zeros(2, 12, device=device), 3, norm_topk_prob=True)  # type: ignore[operator]
    assert result.topk_ids.tolist() == [[0, 1, 2]] * 2
    assert result.topk_weights.tolist() == [pytest.approx([1 / 3] * 3)] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_logits_select_existing_experts(device: torch.device) -> None:
    logits = torch.full((3, 11), float("nan"), device=device)
    logits[1] = float("-inf")
    experts = select_experts_triton(logits, 4, norm_topk_prob=True).topk_ids
    assert experts.min() >= 0
    assert experts.max() < 11


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 20, 8), (5, 16, 4), (13, 6, 2), (4, 8, 8), (9, 3, 1)])
def test_sort_by_expert_lists_every_pair_once(tokens: int, experts: int, top_k: int) -> None:
    torch.manual_seed(tokens)
    topk_ids = torch.randint(experts, (tokens, top_k), dtype=torch.int32)
    pairs, offsets = sort_by_expert(topk_ids, experts)
    assert sorted(pairs.tolist()) == list(range(tokens * top_k))
    for expert, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        own = pairs[start:end].tolist()
        assert own == sorted(own)
        assert all(topk_ids.flatten()[pair] == expert for pair in own)


def test_partial_sums_are_added_before_selection(device: torch.device) -> None:
    """They are rounded to the type that the GEMM would have."""
    torch.manual_seed(0)
    partial_sums = torch.randn(4, 7, 21)
    options = {"norm_topk_prob": True, "shared_expert": True}
    expected = select_experts_reference(partial_sums.sum(0).bfloat16(), 3, **options)
    assert_same(select_experts_reference(partial_sums, 3, **options, dtype=torch.bfloat16), expected)
    assert_same(select_experts_triton(partial_sums.to(device), 3, **options, dtype=torch.bfloat16), expected)


def test_rows_may_be_strided(device: torch.device) -> None:
    logits = torch.randn(5, 24)[:, :17]
    expected = select_experts_reference(logits, 3, norm_topk_prob=True)
    assert_same(select_experts_triton(logits.to(device), 3, norm_topk_prob=True), expected)


def test_minus_zero_equals_zero(device: torch.device) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, 2.0, -0.0]], device=device)
    assert select_experts_triton(logits, 3, norm_topk_prob=True).topk_ids.tolist() == [[3, 1, 2]]
