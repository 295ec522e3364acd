"""Products in tiles: the Triton body against float64, whole and split sums, and which products it takes."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too
from test_linear_kernel import TYPES, assert_near, assert_rounded_once, exact, exact_gated, random_product

from meltcore.kernels.capability import shared_bytes
from meltcore.kernels.product_tiles import tile_arrivals
from meltcore.kernels.tiled_product import TiledLaunch, suits_tiles, tiled_product

SHAPES = pytest.mark.parametrize(
    ("seed", "tokens", "output_size", "input_size"),
    [(0, 17, 70, 192), (1, 64, 33, 1536), (2, 40, 2, 64), (3, 3, 130, 1024), (4, 77, 66, 512)],
)


@TYPES
@SHAPES
def test_a_product_is_rounded_once(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, tokens, output_size, input_size, dtype)
    result = tiled_product(hidden.to(device), weight.to(device))
    assert result.shape == (tokens, output_size)
    assert_rounded_once(result, exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_a_product_is_added_to_the_residual_and_rounded_once(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, tokens, output_size, input_size, dtype)
    before = torch.randn(tokens, output_size).to(dtype)
    residual = before.to(device, copy=True)
    assert tiled_product(hidden.to(device), weight.to(device), residual=residual) is residual
    assert_rounded_once(residual, before.double() + exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_the_halves_of_a_product_gate_each_other(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, tokens, 2 * output_size, input_size, dtype)
    result = tiled_product(hidden.to(device), weight.to(device), gated=True)
    assert result.shape == (tokens, output_size)
    assert_near(result, exact_gated(hidden, weight), dtype, steps=10)


@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("rows", [32, 64])
def test_shares_add_up_and_leave_nothing_behind(rows: int, shares: int, device: torch.device) -> None:
    """Twice the same bits, though other programs may end last; and the counters are zero for the next launch."""
    hidden, weight = (tensor.to(device) for tensor in random_product(shares, 37, 3 * rows + 5, 512, torch.bfloat16))
    launch = TiledLaunch(32, rows, 64, shares, stages=2)
    first, second = (tiled_product(hidden, weight, launch=launch) for _ in range(2))
    assert_rounded_once(first, exact(hidden.cpu(), weight.cpu()), torch.bfloat16)
    assert torch.equal(first, second)
    assert not tile_arrivals(device).any()


def test_what_lies_behind_the_result_is_not_written(device: torch.device) -> None:
    hidden, weight = random_product(0, 19, 21, 64, torch.bfloat16)
    kept = torch.full((19 * 21 + 64,), 7.0, dtype=torch.bfloat16, device=device)
    tiled_product(hidden.to(device), weight.to(device), residual=kept[: 19 * 21].view(19, 21))
    assert (kept[19 * 21 :] == 7.0).all()


@pytest.mark.parametrize("shared", [shared_bytes(torch.device("cpu")), 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("rows", [896, 1024, 2048, 4096, 6144])
@pytest.mark.parametrize("input_size", [64, 192, 896, 1024, 3072, 4864, 8960])
@pytest.mark.parametrize("tokens", [1, 16, 32, 33, 64, 65, 128])
def test_launches_cut_a_product_into_equal_parts(tokens: int, input_size: int, rows: int, shared: int) -> None:
    launch = TiledLaunch.of(tokens, rows, input_size, 132, shared)
    assert input_size % (launch.shares * launch.columns) == 0
    assert launch.shares == 1 or -(-rows // launch.rows) * -(-tokens // launch.tokens) * launch.shares <= 132
    assert launch.stages >= 2
    assert 2 * (launch.tokens + launch.rows) * launch.columns * launch.stages <= shared


def test_what_does_not_suit_goes_to_torch() -> None:
    hidden, weight = random_product(0, 20, 8, 128, torch.bfloat16)
    assert suits_tiles(hidden, weight)
    assert not suits_tiles(hidden[:0], weight)
    assert not suits_tiles(hidden.repeat(7, 1), weight)
    assert not suits_tiles(hidden, weight.repeat(2049, 1))
    assert not suits_tiles(hidden.float(), weight.float())
    assert not suits_tiles(hidden[:, :96].contiguous(), weight[:, :96].contiguous())
    assert not suits_tiles(hidden[:, :64], weight[:, :64].contiguous())
