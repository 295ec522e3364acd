"""FP8 products: quantising, the few-token body and torch's, against float64 on what the FP8 numbers stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too
from test_linear_kernel import assert_near, assert_rounded_once, moved, random_norm, random_product
from triton.runtime import interpreter

from meltcore.kernels import fp8_linear as fp8_file
from meltcore.kernels import fp8_quantise
from meltcore.kernels.fp8 import FP8, LARGEST
from meltcore.kernels.fp8_few_tokens import fp8_few_tokens, fp8_one_token, suits_fp8_few_tokens
from meltcore.kernels.fp8_linear import fp8_gated_linear, fp8_linear, fp8_linear_add
from meltcore.kernels.fp8_quantise import Fp8Rows, quantise
from meltcore.kernels.fp8_tiles import fp8_tiles
from meltcore.kernels.norm import Norm, rms_norm

TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
SHAPES = pytest.mark.parametrize(
    ("seed", "tokens", "output_size", "input_size"),
    [
        (0, 1, 40, 1024),
        (1, 1, 37, 192),
        (2, 2, 24, 1024),
        (3, 5, 133, 64),
        (4, 7, 19, 3072),
        (6, 16, 17, 512),
    ],
)


@pytest.fixture(autouse=True)
def conversions_of_fp8(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Triton 3.6's interpreter rounds the mantissa without carrying into the exponent; a GPU rounds as torch does."""
    convert = interpreter._convert_float

    def convert_fp8(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: Any) -> np.ndarray:
        if target == tl.float8e4nv and source == tl.float32:
            return torch.from_numpy(values.astype(np.float32)).to(FP8).view(torch.uint8).numpy()
        return convert(values, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_fp8)


def random_fp8_product(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Fp8Rows]:
    """Outputs of unit variance; rows of weights and tokens of unlike size, so that a scale of another one shows."""
    hidden, weight = random_product(seed, tokens, output_size, input_size, dtype)
    hidden = hidden * torch.linspace(0.5, 2.0, tokens)[:, None].to(dtype)
    weight = weight * torch.linspace(0.5, 2.0, output_size)[:, None].to(dtype)
    return hidden, fp8_quantise._quantise_torch(weight, None)


def there(weight: Fp8Rows, device: torch.device) -> Fp8Rows:
    return Fp8Rows(weight.values.to(device), weight.scales.to(device))


def few(
    hidden: torch.Tensor,
    weight: Fp8Rows,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The Triton bodies for one token and for several."""
    if hidden.shape[0] == 1:
        return fp8_one_token(hidden, weight, norm, gated=gated, residual=residual)
    tokens = fp8_quantise._quantise_triton(hidden, norm)
    return fp8_few_tokens(tokens, weight, hidden.dtype, gated=gated, residual=residual)


def exact(hidden: torch.Tensor, weight: Fp8Rows, norm: Norm | None = None) -> torch.Tensor:
    """In float64, of what the FP8 numbers stand for."""
    tokens = fp8_quantise._quantise_torch(hidden, norm)
    sums = tokens.values.double() @ weight.values.double().T
    return sums * tokens.scales.double()[:, None] * weight.scales.double()


def exact_gated(hidden: torch.Tensor, weight: Fp8Rows, norm: Norm | None = None) -> torch.Tensor:
    gate, up = exact(hidden, weight, norm).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("body", [fp8_quantise._quantise_torch, fp8_quantise._quantise_triton], ids=["torch", "triton"])
def test_a_row_fills_the_range_of_its_type(body, dtype: torch.dtype, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    rows = torch.randn(6, 200).to(dtype) * torch.tensor([1e-6, 1e-3, 1.0, 50.0, 1e4, 0.0])[:, None].to(dtype)
    values, scales = body(rows.to(device), None)
    assert values.dtype == FP8
    assert values.float().abs().amax(-1).tolist() == [LARGEST] * 5 + [0.0]
    back = Fp8Rows(values, scales).wide().cpu()
    # e4m3 has 3 bits behind the point: half of the last of them, or half of the smallest step, 2^-9.
    allowed = rows.float().abs() * 2.0**-4 + scales.cpu()[:, None] * 2.0**-10
    assert ((back - rows.float()).abs() <= allowed * 1.0001).all()


@TYPES
def test_both_bodies_quantise_to_the_same_values(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    hidden, norm = torch.randn(5, 700).to(dtype), random_norm(700, dtype)
    for given in (None, norm):
        expected = fp8_quantise._quantise_torch(hidden, given)
        found = fp8_quantise._quantise_triton(hidden.to(device), moved(given, device))
        torch.testing.assert_close(found.scales.cpu(), expected.scales, rtol=1e-6, atol=0)
        assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))


@TYPES
@SHAPES
def test_a_product_of_few_tokens_is_rounded_once(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_product(seed, tokens, output_size, input_size, dtype)
    result = few(hidden.to(device), there(weight, device))
    assert result.shape == (tokens, output_size)
    assert_rounded_once(result, exact(hidden, weight), dtype)
    assert_rounded_once(fp8_linear(hidden, weight), exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_a_product_of_few_tokens_is_added_to_the_residual(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_product(seed, tokens, output_size, input_size, dtype)
    before = torch.randn(tokens, output_size).to(dtype)
    expected = before.double() + exact(hidden, weight)
    residual, reference = before.to(device, copy=True), before.clone()
    assert few(hidden.to(device), there(weight, device), residual=residual) is residual
    assert_rounded_once(residual, expected, dtype)
    assert fp8_linear_add(reference, hidden, weight) is reference
    assert_near(reference, expected, dtype, steps=4)


@TYPES
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(
    ("seed", "tokens", "size", "input_size"),
    [(0, 1, 40, 1024), (1, 1, 37, 192), (2, 3, 37, 192), (3, 16, 64, 1024)],
)
def test_the_halves_of_a_product_gate_each_other(
    seed: int, tokens: int, size: int, input_size: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_product(seed, tokens, 2 * size, input_size, dtype)
    norm = random_norm(input_size, dtype) if normed else None
    result = few(hidden.to(device), there(weight, device), moved(norm, device), gated=True)
    assert result.shape == (tokens, size)
    assert_near(result, exact_gated(hidden, weight, norm), dtype, steps=10)
    assert_near(fp8_gated_linear(hidden, weight, norm), exact_gated(hidden, weight, norm), dtype, steps=10)


@TYPES
@SHAPES
def test_a_token_is_normalised_before_it_is_quantised(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_product(seed, tokens, output_size, input_size, dtype)
    norm = random_norm(input_size, dtype)
    result = few(hidden.to(device), there(weight, device), moved(norm, device))
    assert_rounded_once(result, exact(hidden, weight, norm), dtype)
    wide = rms_norm(hidden, *norm).double() @ weight.wide().double().T
    assert (result.cpu().double() - wide).norm() <= 0.04 * wide.norm()  # what quantising a token costs


def test_what_does_not_suit_the_few_token_kernel() -> None:
    hidden, weight = random_fp8_product(0, 4, 8, 128, torch.bfloat16)
    assert suits_fp8_few_tokens(hidden, weight)
    assert not suits_fp8_few_tokens(hidden[:0], weight)
    assert not suits_fp8_few_tokens(hidden.repeat(5, 1), weight)
    assert not suits_fp8_few_tokens(hidden.float(), weight)
    assert not suits_fp8_few_tokens(hidden[:, :64], weight)
    narrow = Fp8Rows(weight.values[:, :96].contiguous(), weight.scales)
    assert not suits_fp8_few_tokens(hidden[:, :96].contiguous(), narrow)


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 33, 500, 3000])
def test_every_count_of_tokens_is_served_on_cuda(tokens: int, dtype: torch.dtype) -> None:
    cuda = torch.device("cuda")
    hidden, weight = random_fp8_product(tokens, tokens, 192, 512, dtype)
    norm = random_norm(512, dtype)
    on_cuda = there(weight, cuda)
    before = torch.randn(tokens, 192).to(dtype)
    expected, gated = exact(hidden, weight, norm), exact_gated(hidden, weight, norm)
    results = {
        "product": (fp8_linear(hidden.cuda(), on_cuda, moved(norm, cuda)), expected),
        "gated": (fp8_gated_linear(hidden.cuda(), on_cuda, moved(norm, cuda)), gated),
        "added": (fp8_linear_add(before.cuda(), hidden.cuda(), on_cuda), before.double() + exact(hidden, weight)),
    }
    for name, (result, wanted) in results.items():
        assert result.dtype == dtype
        # torch's product comes out in bfloat16 whatever is asked for.
        error = (result.cpu().double() - wanted).norm() / wanted.norm()
        assert error <= 2 * torch.finfo(torch.bfloat16).eps, name


def test_quantise_refuses_scattered_rows(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        fp8_quantise._quantise_triton(torch.zeros(8, 32, device=device)[:, :16], None)
    assert quantise(torch.zeros(0, 16)).values.shape == (0, 16)
    assert fp8_file.SIZE_MULTIPLE == 16


TILES = pytest.mark.parametrize(
    ("seed", "tokens", "output_size", "input_size"),
    [(0, 17, 70, 192), (1, 64, 33, 3072), (2, 40, 2, 64), (3, 3, 130, 1024), (4, 70, 66, 512), (5, 130, 2100, 64)],
)


def tiles(
    hidden: torch.Tensor, weight: Fp8Rows, *, gated: bool = False, residual: torch.Tensor | None = None
) -> torch.Tensor:
    tokens = fp8_quantise._quantise_triton(hidden, None)
    return fp8_tiles(tokens, weight, hidden.dtype, gated=gated, residual=residual)


def assert_summed_by_tensor_cores(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Hopper's keep about 13 bits of a sum of e4m3 products (2e-3 of what they add up to was measured for all)."""
    assert result.dtype == dtype
    error = result.cpu().double() - expected
    assert error.norm() <= (2e-3 + torch.finfo(dtype).eps / 2) * expected.norm()
    assert error.abs().max() <= (0.02 + 10 * torch.finfo(dtype).eps) * expected.pow(2).mean().sqrt()


@TYPES
@TILES
def test_a_product_in_tiles_is_what_its_numbers_stand_for(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A split sum and a whole one, alone and added to what is there."""
    hidden, weight = random_fp8_product(seed, tokens, output_size, input_size, dtype)
    before = torch.randn(tokens, output_size).to(dtype)
    residual = before.to(device, copy=True)
    result = tiles(hidden.to(device), there(weight, device))
    assert_summed_by_tensor_cores(result, exact(hidden, weight), dtype)
    assert tiles(hidden.to(device), there(weight, device), residual=residual) is residual
    assert_summed_by_tensor_cores(residual, before.double() + exact(hidden, weight), dtype)


@TYPES
@TILES
def test_the_halves_of_a_product_in_tiles_gate_each_other(
    seed: int, tokens: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_product(seed, tokens, 2 * output_size, input_size, dtype)
    result = tiles(hidden.to(device), there(weight, device), gated=True)
    assert result.shape == (tokens, output_size)
    assert_summed_by_tensor_cores(result, exact_gated(hidden, weight), dtype)
