"""Many pairs of a token and an expert: where they stand, and their products there."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too
from test_expert_kernels import Problem, assert_near

from meltcore.kernels import expert_tiles as tiles_file
from meltcore.kernels import experts as experts_file
from meltcore.kernels.expert_places import Places, lot_of, most_tiles, place_pairs
from meltcore.kernels.expert_sum import add_choices_triton
from meltcore.kernels.expert_tiles import TILE, suits_tiles, tiles_of_experts
from meltcore.kernels.routing import Routing


def chosen(tokens: int, experts: int, choices: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(choices, dim=1).indices.int().contiguous()


def assert_placed(places: Places, given: torch.Tensor, experts: int, tile: int) -> None:
    """Every pair once, those of an expert rising from a tile of its own on; tiles without pairs are empty."""
    owners, filled, pairs = places.owners.tolist(), places.filled.tolist(), places.pairs.cpu().view(-1, tile)
    assert len(owners) == most_tiles(given.numel(), experts, tile)
    seen = []
    for number, (owner, count) in enumerate(zip(owners, filled, strict=True)):
        if number >= places.used.item():
            assert count == 0
        own = pairs[number, :count]
        seen += [(owner, pair) for pair in own.tolist()]
        assert (places.rows.flatten().cpu()[own] == number * tile + torch.arange(count)).all()
        later = number + 1 < len(owners) and filled[number + 1] and owners[number + 1] == owner
        assert count == tile or not later, "only an expert's last tile is not full"
    expected = sorted((expert, pair) for pair, expert in enumerate(given.flatten().tolist()))
    assert seen == expected


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(300, 128, 8), (70, 5, 3), (1, 300, 2), (700, 257, 9), (129, 1, 1), (256, 2, 1)]
)
def test_each_expert_begins_with_a_tile_and_its_pairs_rise(
    tokens: int, experts: int, choices: int, tile: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meltcore.kernels.expert_places._BLOCKS", 2)  # several rounds of summing
    monkeypatch.setattr("meltcore.kernels.expert_places._FEW_TILES", 4)  # and of writing tiles
    torch.manual_seed(tokens)
    given = chosen(tokens, experts, choices)
    assert_placed(place_pairs(given.to(device), experts, tile), given, experts, tile)
    monkeypatch.setattr("meltcore.kernels.expert_places._MOST_FEW", 0)
    assert lot_of(1) == 0
    assert_placed(place_pairs(given.to(device), experts, tile), given, experts, tile)


@pytest.mark.parametrize(
    ("count", "lot"), [(1, 1024), (1024, 1024), (1025, 2048), (2500, 4096), (8192, 8192), (8193, 0)]
)
def test_few_pairs_are_looked_through_in_lots_of_few_sizes(count: int, lot: int, device: torch.device) -> None:
    assert lot_of(count) == lot
    given = torch.randint(3, (count, 1), dtype=torch.int32)
    assert_placed(place_pairs(given.to(device), 5, 32), given, 5, 32)


@pytest.mark.parametrize(("pairs", "filled"), [(400, [128, 128, 128, 16]), (8320, [128] * 65)])
def test_all_pairs_of_one_expert_fill_tiles_one_after_the_other(
    pairs: int, filled: list[int], device: torch.device
) -> None:
    places = place_pairs(torch.full((pairs, 1), 6, dtype=torch.int32, device=device), 9, TILE)
    of_six = [tile for tile, owner in enumerate(places.owners.tolist()) if owner == 6 and places.filled[tile]]
    assert places.filled[of_six].tolist() == filled
    first = of_six[0] * TILE
    assert torch.equal(places.rows.flatten().cpu(), torch.arange(first, first + pairs, dtype=torch.int32))


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
    assert [suits(8192, width) for width in (64, 128, 256, 288, 512)] == [False, True, True, False, True]
    assert [suits(tokens, 256) for tokens in (1024, 2047, 2048)] == [False, False, True]
    assert not suits(8192, dtype=torch.float32)
    monkeypatch.setattr(tiles_file, "capability", lambda device: 80)
    assert not suits(8192)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "choices", "width"), [(128, 8, 768), (257, 9, 512), (257, 9, 128)])
@pytest.mark.parametrize("tokens", [3700, 8064])
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
