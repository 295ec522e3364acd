"""Products with their neighbours: the Triton bodies of few tokens against float64, and which product goes where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too

from meltcore.kernels import linear as linear_file
from meltcore.kernels import tiled_product as tiled_file
from meltcore.kernels.linear import gated_linear, linear, linear_add
from meltcore.kernels.norm import Norm
from meltcore.kernels.one_token import MAX_INPUT, one_token, suits_one_token
from meltcore.kernels.tiled_product import tiled_product

EPS = 1e-6
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
SHAPES = pytest.mark.parametrize(
    ("seed", "tokens", "output_size", "input_size"),
    [
        (0, 1, 40, 1024),
        (1, 1, 37, 192),
        (2, 2, 24, 1024),
        (3, 5, 133, 64),
        (4, 7, 19, 3072),
        (5, 13, 1, 128),
        (6, 16, 17, 512),
    ],
)


def random_product(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs have unit variance."""
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, input_size).to(dtype)
    return hidden, (torch.randn(output_size, input_size) * input_size**-0.5).to(dtype)


def random_norm(size: int, dtype: torch.dtype) -> Norm:
    return Norm((torch.rand(size) + 0.5).to(dtype), EPS)


def exact(hidden: torch.Tensor, weight: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
    """In float64."""
    wide = hidden.double()
    if norm:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    return wide @ weight.double().T


def exact_gated(hidden: torch.Tensor, weight: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
    gate, up = exact(hidden, weight, norm).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def moved(norm: Norm | None, device: torch.device) -> Norm | None:
    return norm and Norm(norm.weight.to(device), norm.eps)


def assert_rounded_once(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within one step of the type, and the float32 sum's error."""
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, steps: float) -> None:
    """For sums of rounded terms: their errors together, and the largest, by what the results are like."""
    error = result.cpu().double() - expected
    step = torch.finfo(dtype).eps
    assert result.dtype == dtype
    assert error.norm() <= step * expected.norm()
    assert error.abs().max() <= steps * step * expected.pow(2).mean().sqrt()


@TYPES
@SHAPES
def test_a_product_is_rounded_once(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, tokens, output_size, input_size, dtype)
    body = one_token if tokens == 1 else tiled_product
    result = body(hidden.to(device), weight.to(device))
    assert result.shape == (tokens, output_size)
    assert_rounded_once(result, exact(hidden, weight), dtype)
    assert_rounded_once(linear_file._linear_torch(hidden, weight), exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_a_product_is_added_to_the_residual_and_rounded_once(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, tokens, output_size, input_size, dtype)
    before = torch.randn(tokens, output_size).to(dtype)
    residual = before.to(device, copy=True)
    body = one_token if tokens == 1 else tiled_product
    assert body(hidden.to(device), weight.to(device), residual=residual) is residual
    assert_rounded_once(residual, before.double() + exact(hidden, weight), dtype)


@TYPES
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
@pytest.mark.parametrize(("seed", "output_size", "input_size"), [(0, 40, 1024), (1, 37, 192), (2, 5, 3072)])
def test_one_token_is_normalised_on_the_way(
    seed: int, output_size: int, input_size: int, size: float, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, 1, output_size, input_size, dtype)
    hidden, norm = hidden * size, random_norm(input_size, dtype)
    result = one_token(hidden.to(device), weight.to(device), moved(norm, device))
    assert_near(result, exact(hidden, weight, norm), dtype, steps=4)


@TYPES
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(("seed", "size", "input_size"), [(0, 40, 1024), (1, 37, 192)])
def test_the_halves_of_a_product_gate_each_other(
    seed: int, size: int, input_size: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_product(seed, 1, 2 * size, input_size, dtype)
    norm = random_norm(input_size, dtype) if normed else None
    result = one_token(hidden.to(device), weight.to(device), moved(norm, device), gated=True)
    assert result.shape == (1, size)
    assert_near(result, exact_gated(hidden, weight, norm), dtype, steps=10)


def expected_bodies(tokens: int) -> list[str]:
    """Of `linear`, `gated_linear` and `linear_add`."""
    if tokens == 1:
        return ["one_token"] * 3
    return ["tiled_product"] * 3 if tokens <= tiled_file.MAX_TOKENS else []


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 31, 64, 65, 128, 129])
def test_the_public_functions_serve_every_count_of_tokens(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_file, "use_triton", lambda tensor: True)
    taken: list[str] = []
    for body in (one_token, tiled_product):

        def noted(*args: Any, body: Any = body, **more: Any) -> torch.Tensor:
            taken.append(body.__name__)
            return body(*args, **more)

        monkeypatch.setattr(linear_file, body.__name__, noted)
    hidden, weight = random_product(tokens, tokens, 22, 256, torch.bfloat16)
    norm = random_norm(256, torch.bfloat16)
    there, weight_there, norm_there = hidden.to(device), weight.to(device), moved(norm, device)
    before = torch.randn(tokens, 22).bfloat16()
    assert_near(linear(there, weight_there, norm_there), exact(hidden, weight, norm), torch.bfloat16, steps=4)
    gated = gated_linear(there, weight_there, norm_there)
    assert_near(gated, exact_gated(hidden, weight, norm), torch.bfloat16, steps=10)
    added = linear_add(before.to(device, copy=True), there, weight_there)
    assert_near(added, before.double() + exact(hidden, weight), torch.bfloat16, steps=4)
    assert taken == expected_bodies(tokens)


@pytest.mark.parametrize("tokens", [1, 5, 129])
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_a_product_can_be_put_into_memory_that_is_there(
    tokens: int, triton: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_file, "use_triton", lambda tensor: triton)
    hidden, weight = (tensor.to(device) for tensor in random_product(tokens, tokens, 24, 128, torch.bfloat16))
    kept = torch.full((tokens + 2, 24), 7.0, dtype=torch.bfloat16, device=device)
    product = linear(hidden, weight, out=kept[:tokens])
    assert product.data_ptr() == kept.data_ptr()
    assert torch.equal(kept[:tokens], linear(hidden, weight))
    assert (kept[tokens:] == 7.0).all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_past_the_end_are_not_written(tokens: int, device: torch.device) -> None:
    """Tokens and outputs are both padded inside; what lies behind the result must survive."""
    hidden, weight = random_product(0, tokens, 21, 64, torch.bfloat16)
    kept = torch.full((tokens * 21 + 64,), 7.0, dtype=torch.bfloat16, device=device)
    body = one_token if tokens == 1 else tiled_product
    body(hidden.to(device), weight.to(device), residual=kept[: tokens * 21].view(tokens, 21))
    assert (kept[tokens * 21 :] == 7.0).all()


def test_what_does_not_suit_one_token() -> None:
    hidden, weight = random_product(0, 1, 8, 128, torch.bfloat16)
    assert suits_one_token(hidden, weight)
    assert not suits_one_token(hidden[:0], weight)
    assert not suits_one_token(hidden.repeat(2, 1), weight)
    assert suits_one_token(hidden.new_empty(1, MAX_INPUT), hidden.new_empty(5, MAX_INPUT))
    assert not suits_one_token(hidden.new_empty(1, 2 * MAX_INPUT), hidden.new_empty(5, 2 * MAX_INPUT))
    assert not suits_one_token(hidden.float(), weight.float())
    assert not suits_one_token(hidden[:, :96].contiguous(), weight[:, :96].contiguous())
    assert not suits_one_token(hidden[:, :64].contiguous(), weight[:, :64])
