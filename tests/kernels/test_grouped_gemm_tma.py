"""MoE alignment, and the persistent grouped GEMM of many pairs."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton
from test_grouped_gemm import Problem, assert_near

from meltcore.kernels.launch import force_implementation
from meltcore.kernels.moe import grouped_gemm_tma as tma_file
from meltcore.kernels.moe.align import Alignment, max_tiles, moe_align_block_size, scan_size
from meltcore.kernels.moe.combine import combine
from meltcore.kernels.moe.experts import add_experts
from meltcore.kernels.moe.grouped_gemm_tma import BLOCK_M, expert_outputs_tma, supports
from meltcore.kernels.moe.routing import Routing


def random_topk_ids(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(top_k, dim=1).indices.int().contiguous()


def assert_aligned(alignment: Alignment, topk_ids: torch.Tensor, experts: int, block_m: int) -> None:
    """Every pair once, ascending per expert, each expert from a tile of its own on; all other tiles are empty."""
    expert_ids, num_valid = alignment.expert_ids.tolist(), alignment.num_valid.tolist()
    pairs = alignment.sorted_token_ids.cpu().view(-1, block_m)
    assert len(expert_ids) == max_tiles(topk_ids.numel(), experts, block_m)
    seen = []
    for tile, (expert, count) in enumerate(zip(expert_ids, num_valid, strict=True)):
        if tile >= alignment.num_tiles.item():
            assert count == 0
        own = pairs[tile, :count]
        seen += [(expert, pair) for pair in own.tolist()]
        assert (alignment.src2dst.flatten().cpu()[own] == tile * block_m + torch.arange(count)).all()
        more = tile + 1 < len(expert_ids) and num_valid[tile + 1] and expert_ids[tile + 1] == expert
        assert count == block_m or not more, "only an expert's last tile is not full"
    expected = sorted((expert, pair) for pair, expert in enumerate(topk_ids.flatten().tolist()))
    assert seen == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block_m"),
    [
        (300, 128, 8, 16),
        (300, 128, 8, 128),
        (1, 300, 2, 16),
        (700, 257, 9, 64),
        *((*shape, block_m) for shape in ((70, 5, 3), (129, 1, 1), (256, 2, 1)) for block_m in (16, 64, 128)),
    ],
)
def test_each_expert_has_tiles_of_its_own_and_ascending_pairs(
    tokens: int, experts: int, top_k: int, block_m: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meltcore.kernels.moe.align._PREFIX_SUM_BLOCKS", 2)  # several rounds of the prefix sum
    monkeypatch.setattr("meltcore.kernels.moe.align._SCAN_TILES", 4)  # and of writing tiles
    torch.manual_seed(tokens)
    topk_ids = random_topk_ids(tokens, experts, top_k)
    assert_aligned(moe_align_block_size(topk_ids.to(device), block_m, experts), topk_ids, experts, block_m)
    monkeypatch.setattr("meltcore.kernels.moe.align._MAX_PAIRS_ONE_LAUNCH", 0)
    assert scan_size(1) == 0
    assert_aligned(moe_align_block_size(topk_ids.to(device), block_m, experts), topk_ids, experts, block_m)


@pytest.mark.parametrize(
    ("count", "scan"), [(1, 1024), (1024, 1024), (1025, 2048), (2500, 4096), (8192, 8192), (8193, 0)]
)
def test_scan_has_few_sizes(count: int, scan: int, device: torch.device) -> None:
    assert scan_size(count) == scan
    topk_ids = torch.randint(3, (count, 1), dtype=torch.int32)
    assert_aligned(moe_align_block_size(topk_ids.to(device), 32, 5), topk_ids, 5, 32)


@pytest.mark.parametrize(("pairs", "num_valid"), [(400, [128, 128, 128, 16]), (8320, [128] * 65)])
def test_pairs_of_one_expert_fill_consecutive_tiles(pairs: int, num_valid: list[int], device: torch.device) -> None:
    alignment = moe_align_block_size(torch.full((pairs, 1), 6, dtype=torch.int32, device=device), BLOCK_M, 9)
    expert_ids = alignment.expert_ids.tolist()
    tiles = [tile for tile, expert in enumerate(expert_ids) if expert == 6 and alignment.num_valid[tile]]
    assert alignment.num_valid[tiles].tolist() == num_valid
    first = tiles[0] * BLOCK_M
    assert torch.equal(alignment.src2dst.flatten().cpu(), torch.arange(first, first + pairs, dtype=torch.int32))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # padding rows are undefined
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "size", "width", "dtype"),
    [
        (150, 4, 2, 128, 64, torch.bfloat16),
        (40, 6, 3, 256, 192, torch.float16),
        (130, 3, 1, 384, 128, torch.bfloat16),
    ],
)
def test_tma_outputs_match_the_experts(
    tokens: int, experts: int, top_k: int, size: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem = Problem(tokens, tokens, experts, top_k, size, width, dtype)
    topk_ids, topk_weights = (tensor.to(device) for tensor in problem.routing)
    result = problem.residual.to(device, copy=True)
    given = [tensor.to(device) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    outputs = in_triton(expert_outputs_tma)(given[0], topk_ids, *given[1:])
    in_triton(combine)(outputs, topk_weights, result)
    assert_near(result.cpu(), problem.exact(), dtype)


def test_tma_is_used_for_many_16_bit_pairs_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tma_file, "capability", lambda device: 90)

    def is_used(tokens: int, width: int = 768, dtype: torch.dtype = torch.bfloat16) -> bool:
        hidden = torch.empty(tokens, 2048, dtype=dtype, device="meta")
        topk_ids = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
        gate_up = torch.empty(128, 2 * width, 2048, dtype=dtype, device="meta")
        down = torch.empty(128, 2048, width, dtype=dtype, device="meta")
        return supports(hidden, topk_ids, gate_up, down)

    assert [is_used(tokens) for tokens in (1023, 1024, 8192)] == [False, True, True]
    assert [is_used(8192, width) for width in (64, 128, 256, 288, 512)] == [False, True, True, False, True]
    assert [is_used(tokens, 256) for tokens in (1024, 2047, 2048)] == [False, False, True]
    assert not is_used(8192, dtype=torch.float32)
    monkeypatch.setattr(tma_file, "capability", lambda device: 80)
    assert not is_used(8192)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "top_k", "width"), [(128, 8, 768), (257, 9, 512), (257, 9, 128)])
@pytest.mark.parametrize("tokens", [3700, 8064])
def test_tma_agrees_with_the_reference_at_published_sizes(tokens: int, experts: int, top_k: int, width: int) -> None:
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, 2048, device="cuda").bfloat16()
    gate_up = (torch.randn(experts, 2 * width, 2048, device="cuda") * 2048**-0.5).bfloat16()
    down = (torch.randn(experts, 2048, width, device="cuda") * width**-0.5).bfloat16()
    routing = Routing(random_topk_ids(tokens, experts, top_k).cuda(), torch.rand(tokens, top_k, device="cuda"))
    assert supports(hidden, routing.topk_ids, gate_up, down)
    force_implementation("reference")
    expected = add_experts(None, hidden, routing, gate_up, down)
    force_implementation(None)
    result = add_experts(None, hidden, routing, gate_up, down)
    assert_near(result.cpu(), expected.cpu().double(), torch.bfloat16)
    assert torch.equal(result, add_experts(None, hidden, routing, gate_up, down))
