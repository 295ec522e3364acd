"""Grouped GEMM of experts in CUDA C++: selection, compilation, and on a GPU its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meltcore.kernels.moe import grouped_gemm_wgmma as wgmma
from meltcore.kernels.moe.experts import expert_outputs, expert_outputs_reference
from meltcore.kernels.moe.routing import Routing
from meltcore.kernels.nvrtc import compile_source

POISON = float("nan")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "width", "top_k"), [(2048, 512, 9), (2048, 768, 8)])
def test_compiles(size: int, width: int, top_k: int) -> None:
    for macros in (
        wgmma.kernel_macros(size, width // 128, top_k, gated=True),
        wgmma.kernel_macros(width, size // 256, 1, gated=False),
    ):
        assert compile_source(wgmma.KERNEL.source(), wgmma.KERNEL.name, dict(macros), "90a")


def given(**changes: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Tensors that the kernel supports, but for `changes`, as on a GPU."""
    of = {"size": 2048, "width": 512, "dtype": torch.bfloat16, "tokens": 8} | changes
    gate_up = torch.empty(3, 2 * of["width"], of["size"], dtype=of["dtype"], device="meta")
    down = torch.empty(3, of["size"], of["width"], dtype=torch.bfloat16, device="meta")
    hidden = torch.empty(of["tokens"], of["size"], dtype=torch.bfloat16, device="meta")
    on_gpu = SimpleNamespace(
        is_cuda=True, device=None, dtype=hidden.dtype, is_contiguous=hidden.is_contiguous, nbytes=hidden.nbytes
    )
    return on_gpu, gate_up, down


@pytest.mark.parametrize(
    ("changes", "capability", "expected"),
    [
        ({}, 90, True),
        ({"width": 768}, 90, True),
        ({"width": 128, "size": 256}, 90, True),
        ({}, 80, False),
        ({}, 100, False),
        ({"width": 192}, 90, False),
        ({"size": 384}, 90, False),
        ({"dtype": torch.float16}, 90, False),
        ({"tokens": 2**20}, 90, True),
        ({"tokens": 2**20 + 1}, 90, False),
    ],
    ids=str,
)
def test_supports(changes: dict[str, Any], capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "capability", lambda _: capability)
    assert wgmma.supports(*given(**changes)) == expected


def test_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "capability", lambda _: 90)
    _, gate_up, down = given()
    assert not wgmma.supports(torch.empty(8, 2048, dtype=torch.bfloat16, device="meta"), gate_up, down)


def test_is_chosen_for_narrow_experts_and_half_full_tiles() -> None:
    narrow = [wgmma.is_faster(257 * pairs, 257, 256) for pairs in (63, 64, 127, 128, 1000)]
    wide = [wgmma.is_faster(257 * pairs, 257, 512) for pairs in (63, 64, 127, 128, 1000)]
    assert narrow == [False, True, True, True, True]
    assert wide == [False, True, True, False, False]


def random_experts(tokens: int, experts: int, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(tokens, size, device="cuda").bfloat16()
    gate_up = (torch.randn(experts, 2 * width, size, device="cuda") * size**-0.5).bfloat16()
    down = (torch.randn(experts, size, width, device="cuda") * width**-0.5).bfloat16()
    return hidden, gate_up, down


def assert_computes_the_reference(topk_ids: torch.Tensor, experts: int, size: int, width: int) -> None:
    hidden, gate_up, down = random_experts(len(topk_ids), experts, size, width)
    topk_ids = topk_ids.int().contiguous().cuda()
    if not wgmma.supports(hidden, gate_up, down):
        pytest.skip("this GPU does not support the kernel")
    # What the kernel does not write, and what it reads past an expert's last pair, is NaN.
    for numel in (topk_ids.numel() * size, (topk_ids.numel() + 128 * experts) * width):
        torch.full((numel,), POISON, dtype=torch.bfloat16, device="cuda")
    outputs = [wgmma.expert_outputs_wgmma(hidden, topk_ids, gate_up, down).float() for _ in range(2)]
    expected = expert_outputs_reference(hidden, Routing(topk_ids, topk_ids.float()), gate_up, down).float()
    assert torch.equal(*outputs)
    errors = (outputs[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 0.03
    assert errors.mean() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [1, 63, 64, 65, 127, 128, 129, 192, 193, 1000])
def test_computes_the_reference_of_one_expert(pairs: int) -> None:
    """With experts without pairs before and after it."""
    torch.manual_seed(pairs)
    assert_computes_the_reference(torch.full((pairs, 1), 3), 6, 512, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_computes_the_reference_of_random_routings(seed: int) -> None:
    torch.manual_seed(seed)
    experts, top_k = 40, seed % 3 + 2
    skewed = torch.rand(700, experts) * torch.rand(experts)
    assert_computes_the_reference(skewed.topk(top_k).indices, experts, 256 * (1 + seed % 2), 128 * (1 + seed // 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "top_k", "width"), [(128, 8, 768), (257, 9, 512), (257, 9, 128)])
@pytest.mark.parametrize("tokens", [1100, 8064, 16384])
def test_computes_the_reference_at_published_sizes(tokens: int, experts: int, top_k: int, width: int) -> None:
    torch.manual_seed(tokens)
    topk_ids = torch.rand(tokens, experts).topk(top_k).indices
    if experts == 257:  # all tokens share the last one
        topk_ids[:, 0] = 256
    assert_computes_the_reference(topk_ids, experts, 2048, width)


@pytest.mark.gpu
def test_experts_choose_it_for_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, gate_up, down = random_experts(384, 8, 512, 512)
    if not wgmma.supports(hidden, gate_up, down):
        pytest.skip("this GPU does not support the kernel")
    launched: list[int] = []
    monkeypatch.setattr(wgmma.KERNEL, "launch", lambda *_, **__: launched.append(1))
    topk_ids = torch.rand(384, 8, device="cuda").topk(2).indices.int().contiguous()
    expert_outputs(hidden, Routing(topk_ids, torch.rand(384, 2, device="cuda")), gate_up, down)
    assert len(launched) == 2
