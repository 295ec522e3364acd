"""Many pairs of a token and an expert: where they stand, and their products there."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too
from test_expert_kernels import Problem, assert_near

from meltcore.kernels import expert_tiles as tiles_file
from meltcore.kernels import experts as experts_file
from meltcore.kernels.expert_places import TILE, most_tiles, place_pairs
from meltcore.kernels.expert_sum import add_choices_triton
from meltcore.kernels.expert_tiles import suits_tiles, tiles_of_experts
from meltcore.kernels.routing import Routing


def chosen(tokens: int, experts: int, choices: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(choices, dim=1).indices.int().contiguous()


@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(300, 128, 8), (70, 5, 3), (1, 300, 2), (700, 257, 9), (129, 1, 1), (256, 2, 1)]
)
def test_each_expert_begins_with_a_tile_and_its_pairs_rise(
    tokens: int, experts: int, choices: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meltcore.kernels.expert_places._BLOCKS", 2)  # several rounds of summing
    torch.manual_seed(tokens)
    given = chosen(tokens, experts, choices)
    places = place_pairs(given.to(device), experts)
    owners, filled = places.owners.tolist(), places.filled.tolist()
    tile = 0
    for expert in range(experts):
        own = (given.flatten() == expert).nonzero().flatten()
        for first in range(0, len(own), TILE):
            piece = own[first : first + TILE]
            assert (owners[tile], filled[tile]) == (expert, len(piece))
            assert torch.equal(places.pairs[tile * TILE : tile * TILE + len(piece)].cpu(), piece.int())
            assert (places.rows.flatten().cpu()[piece] == tile * TILE + torch.arange(len(piece))).all()
            tile += 1
    assert places.used.item() == tile <= most_tiles(tokens * choices, experts)


def test_all_pairs_of_one_expert_fill_tiles_one_after_the_other(device: torch.device) -> None:
    places = place_pairs(torch.full((400, 1), 6, dtype=torch.int32, device=device), 9)
    assert places.used.item() == 4
    assert places.owners[:4].tolist() == [6] * 4
    assert places.filled[:4].tolist() == [128, 128, 128, 16]
    assert torch.equal(places.rows.flatten().cpu(), torch.arange(400, dtype=torch.int32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # rows that are nobody's hold whatever was there
@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "size", "width", "dtype"),
    [
        (150, 4, 2, 128, 64, torch.bfloat16),
        (40, 6, 3, 256, 192, torch.float16),
        (130, 3, 1, 384, 128, torch.bfloat16),
    ],
)
def test_products_of_tiles_are_those_of_the_experts(
    tokens: int, experts: int, choices: int, size: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem = Problem(tokens, tokens, experts, choices, size, width, dtype)
    experts_of, weights = (tensor.to(device) for tensor in problem.routing)
    result = problem.residual.to(device, copy=True)
    given = [tensor.to(device) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    outputs = tiles_of_experts(given[0], experts_of, *given[1:])
    add_choices_triton(result, outputs, weights)
    assert_near(result.cpu(), problem.exact(), dtype)


def test_tiles_serve_many_pairs_of_sixteen_bits_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_file, "capability", lambda device: 90)

    def suits(tokens: int, width: int = 768, dtype: torch.dtype = torch.bfloat16) -> bool:
        hidden = torch.empty(tokens, 2048, dtype=dtype, device="meta")
        experts = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
        gate_up = torch.empty(128, 2 * width, 2048, dtype=dtype, device="meta")
        down = torch.empty(128, 2048, width, dtype=dtype, device="meta")
        return suits_tiles(hidden, experts, gate_up, down)

    assert [suits(tokens) for tokens in (1023, 1024, 8192)] == [False, True, True]
    assert [suits(8192, width) for width in (64, 256, 288, 512)] == [False, True, False, True]
    assert not suits(8192, dtype=torch.float32)
    monkeypatch.setattr(tiles_file, "capability", lambda device: 80)
    assert not suits(8192)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "choices", "width"), [(128, 8, 768), (257, 9, 512), (257, 9, 256)])
@pytest.mark.parametrize("tokens", [1900, 8064])
def test_at_published_sizes_tiles_agree_with_the_torch_body(
    tokens: int, experts: int, choices: int, width: int
) -> None:
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, 2048, device="cuda").bfloat16()
    gate_up = (torch.randn(experts, 2 * width, 2048, device="cuda") * 2048**-0.5).bfloat16()
    down = (torch.randn(experts, 2048, width, device="cuda") * width**-0.5).bfloat16()
    routing = Routing(chosen(tokens, experts, choices).cuda(), torch.rand(tokens, choices, device="cuda"))
    assert suits_tiles(hidden, routing.experts, gate_up, down)
    expected = experts_file._experts_add_torch(None, hidden, routing, gate_up, down)
    result = experts_file._experts_add_triton(None, hidden, routing, gate_up, down)
    assert_near(result.cpu(), expected.cpu().double(), torch.bfloat16)
    assert torch.equal(result, experts_file._experts_add_triton(None, hidden, routing, gate_up, down))
