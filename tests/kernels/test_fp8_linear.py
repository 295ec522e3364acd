"""FP8 linear: quantization and every kernel, against float64 on the dequantized numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_tools import in_triton
from test_linear import assert_near, assert_rounded_once, moved, random_matmul, random_norm
from triton.runtime import interpreter

from meltcore.kernels.fp8.fp8 import FP8, FP8_MAX, Fp8Tensor, quantize, quantize_reference
from meltcore.kernels.fp8.fp8_gemv import fp8_gemv, fp8_skinny_gemm, supports
from meltcore.kernels.fp8.fp8_linear import SIZE_MULTIPLE, fp8_linear, uses_tma
from meltcore.kernels.fp8.fp8_split_k import fp8_split_k_gemm
from meltcore.kernels.gemm import tma
from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.gemm.tma import tma_gemm
from meltcore.kernels.norm import Norm, rms_norm

TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
SHAPES = pytest.mark.parametrize(
    ("seed", "tokens", "n", "k"),
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


def random_fp8_matmul(seed: int, tokens: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, Fp8Tensor]:
    """Outputs of unit variance; weight rows and tokens differ in size, so that a wrong scale shows."""
    hidden, weight = random_matmul(seed, tokens, n, k, dtype)
    hidden = hidden * torch.linspace(0.5, 2.0, tokens)[:, None].to(dtype)
    weight = weight * torch.linspace(0.5, 2.0, n)[:, None].to(dtype)
    return hidden, quantize_reference(weight, None)


def there(weight: Fp8Tensor, device: torch.device) -> Fp8Tensor:
    return Fp8Tensor(weight.values.to(device), weight.scales.to(device))


def few(
    hidden: torch.Tensor,
    weight: Fp8Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The Triton kernels for one token and for several."""
    if hidden.shape[0] == 1:
        return fp8_gemv(hidden, weight, norm, gated=gated, residual=residual)
    tokens = in_triton(quantize)(hidden, norm)
    return fp8_skinny_gemm(tokens, weight, hidden.dtype, gated=gated, residual=residual)


def exact(hidden: torch.Tensor, weight: Fp8Tensor, norm: Norm | None = None) -> torch.Tensor:
    """In float64, of the dequantized numbers."""
    tokens = quantize_reference(hidden, norm)
    sums = tokens.values.double() @ weight.values.double().T
    return sums * tokens.scales.double()[:, None] * weight.scales.double()


def exact_gated(hidden: torch.Tensor, weight: Fp8Tensor, norm: Norm | None = None) -> torch.Tensor:
    gate, up = exact(hidden, weight, norm).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("function", [quantize_reference, in_triton(quantize)], ids=["reference", "triton"])
def test_quantized_row_uses_the_whole_range(function, dtype: torch.dtype, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    rows = torch.randn(6, 200).to(dtype) * torch.tensor([1e-6, 1e-3, 1.0, 50.0, 1e4, 0.0])[:, None].to(dtype)
    values, scales = function(rows.to(device), None)
    assert values.dtype == FP8
    assert values.float().abs().amax(-1).tolist() == [FP8_MAX] * 5 + [0.0]
    back = Fp8Tensor(values, scales).dequantize().cpu()
    # e4m3 has 3 mantissa bits: half of the last one, or half of the smallest step, 2^-9.
    allowed = rows.float().abs() * 2.0**-4 + scales.cpu()[:, None] * 2.0**-10
    assert ((back - rows.float()).abs() <= allowed * 1.0001).all()


@TYPES
def test_both_implementations_quantize_to_the_same_values(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    hidden, norm = torch.randn(5, 700).to(dtype), random_norm(700, dtype)
    for given in (None, norm):
        expected = quantize_reference(hidden, given)
        found = in_triton(quantize)(hidden.to(device), moved(given, device))
        torch.testing.assert_close(found.scales.cpu(), expected.scales, rtol=1e-6, atol=0)
        assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))


@TYPES
@SHAPES
def test_few_token_gemm_is_rounded_once(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_matmul(seed, tokens, n, k, dtype)
    result = few(hidden.to(device), there(weight, device))
    assert result.shape == (tokens, n)
    assert_rounded_once(result, exact(hidden, weight), dtype)
    assert_rounded_once(fp8_linear(hidden, weight), exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_few_token_gemm_adds_to_the_residual(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_matmul(seed, tokens, n, k, dtype)
    before = torch.randn(tokens, n).to(dtype)
    expected = before.double() + exact(hidden, weight)
    residual, reference = before.to(device, copy=True), before.clone()
    assert few(hidden.to(device), there(weight, device), residual=residual) is residual
    assert_rounded_once(residual, expected, dtype)
    assert fp8_linear(hidden, weight, residual=reference) is reference
    assert_near(reference, expected, dtype, steps=4)


@pytest.mark.slow
@TYPES
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(
    ("seed", "tokens", "size", "k"),
    [(0, 1, 40, 1024), (1, 1, 37, 192), (2, 3, 37, 192), (3, 16, 64, 1024)],
)
def test_few_token_gemm_fuses_the_activation(
    seed: int, tokens: int, size: int, k: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_matmul(seed, tokens, 2 * size, k, dtype)
    norm = random_norm(k, dtype) if normed else None
    result = few(hidden.to(device), there(weight, device), moved(norm, device), gated=True)
    assert result.shape == (tokens, size)
    assert_near(result, exact_gated(hidden, weight, norm), dtype, steps=10)
    assert_near(fp8_linear(hidden, weight, norm, gated=True), exact_gated(hidden, weight, norm), dtype, steps=10)


@TYPES
@SHAPES
def test_token_is_normalized_before_quantization(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_matmul(seed, tokens, n, k, dtype)
    norm = random_norm(k, dtype)
    result = few(hidden.to(device), there(weight, device), moved(norm, device))
    assert_rounded_once(result, exact(hidden, weight, norm), dtype)
    wide = rms_norm(hidden, *norm).double() @ weight.dequantize().double().T
    assert (result.cpu().double() - wide).norm() <= 0.04 * wide.norm()  # the error of quantizing a token


def test_few_token_kernel_supports() -> None:
    hidden, weight = random_fp8_matmul(0, 4, 8, 128, torch.bfloat16)
    assert supports(hidden, weight)
    assert not supports(hidden[:0], weight)
    assert not supports(hidden.repeat(5, 1), weight)
    assert not supports(hidden.float(), weight)
    assert not supports(hidden[:, :64], weight)
    narrow = Fp8Tensor(weight.values[:, :96].contiguous(), weight.scales)
    assert not supports(hidden[:, :96].contiguous(), narrow)


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 33, 65, 129, 257, 500, 1100, 3000, 12000])
def test_every_number_of_tokens_is_served_on_cuda(tokens: int, dtype: torch.dtype) -> None:
    cuda = torch.device("cuda")
    hidden, weight = random_fp8_matmul(tokens, tokens, 192, 512, dtype)
    norm = random_norm(512, dtype)
    on_cuda = there(weight, cuda)
    before = torch.randn(tokens, 192).to(dtype)
    expected, gated = exact(hidden, weight, norm), exact_gated(hidden, weight, norm)
    results = {
        "linear": (fp8_linear(hidden.cuda(), on_cuda, moved(norm, cuda)), expected),
        "gated": (fp8_linear(hidden.cuda(), on_cuda, moved(norm, cuda), gated=True), gated),
        "added": (fp8_linear(hidden.cuda(), on_cuda, residual=before.cuda()), before.double() + exact(hidden, weight)),
    }
    for name, (result, wanted) in results.items():
        assert result.dtype == dtype
        # torch's GEMM returns bfloat16 for every dtype.
        error = (result.cpu().double() - wanted).norm() / wanted.norm()
        assert error <= 2 * torch.finfo(torch.bfloat16).eps, name


def test_quantize_refuses_strided_rows(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        in_triton(quantize)(torch.zeros(8, 32, device=device)[:, :16], None)
    assert quantize(torch.zeros(0, 16)).values.shape == (0, 16)
    assert SIZE_MULTIPLE == 16


TILES = pytest.mark.parametrize(
    ("seed", "tokens", "n", "k"),
    [(0, 17, 70, 192), (1, 64, 33, 3072), (2, 40, 2, 64), (3, 3, 130, 1024), (4, 70, 66, 512), (5, 130, 2100, 64)],
)


def tiles(
    hidden: torch.Tensor, weight: Fp8Tensor, *, gated: bool = False, residual: torch.Tensor | None = None
) -> torch.Tensor:
    tokens = in_triton(quantize)(hidden, None)
    return fp8_split_k_gemm(tokens, weight, hidden.dtype, gated=gated, residual=residual)


def assert_summed_by_tensor_cores(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Hopper's keep about 13 bits of a sum of e4m3 products (2e-3 of what they add up to was measured for all)."""
    assert result.dtype == dtype
    error = result.cpu().double() - expected
    assert error.norm() <= (2e-3 + torch.finfo(dtype).eps / 2) * expected.norm()
    assert error.abs().max() <= (0.02 + 10 * torch.finfo(dtype).eps) * expected.pow(2).mean().sqrt()


@pytest.mark.slow
@TYPES
@TILES
def test_split_k_gemm_matches_dequantized_numbers(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    """With and without splits, with and without a residual."""
    hidden, weight = random_fp8_matmul(seed, tokens, n, k, dtype)
    before = torch.randn(tokens, n).to(dtype)
    residual = before.to(device, copy=True)
    result = tiles(hidden.to(device), there(weight, device))
    assert_summed_by_tensor_cores(result, exact(hidden, weight), dtype)
    assert tiles(hidden.to(device), there(weight, device), residual=residual) is residual
    assert_summed_by_tensor_cores(residual, before.double() + exact(hidden, weight), dtype)


@pytest.mark.slow
@TYPES
@TILES
def test_split_k_gemm_fuses_the_activation(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_fp8_matmul(seed, tokens, 2 * n, k, dtype)
    result = tiles(hidden.to(device), there(weight, device), gated=True)
    assert result.shape == (tokens, n)
    assert_summed_by_tensor_cores(result, exact_gated(hidden, weight), dtype)


@pytest.mark.slow
@TYPES
@pytest.mark.parametrize("config", [GemmConfig(64, 128, 128, 3, 4), GemmConfig(128, 256, 128, 3, 8)])
def test_tma_gemm_matches_dequantized_numbers(config: GemmConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Scales of rows and tokens that fill no tile; alone, added to a residual, and with the activation."""
    hidden, weight = random_fp8_matmul(0, 150, 336, 208, dtype)
    tokens, rows = in_triton(quantize)(hidden.to(device), None), there(weight, device)

    def multiply(*, gated: bool = False, residual: torch.Tensor | None = None) -> torch.Tensor:
        scales = tokens.scales, rows.scales
        return tma_gemm(tokens.values, rows.values, dtype, scales=scales, gated=gated, residual=residual, config=config)

    assert_summed_by_tensor_cores(multiply(), exact(hidden, weight), dtype)
    before = torch.randn(150, 336).to(dtype)
    residual = before.to(device, copy=True)
    assert multiply(residual=residual) is residual
    assert_summed_by_tensor_cores(residual, before.double() + exact(hidden, weight), dtype)
    assert_summed_by_tensor_cores(multiply(gated=True), exact_gated(hidden, weight), dtype)


def test_tma_is_used_for_many_tokens_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_used(tokens: int, *, gated: bool = False, k: int = 64) -> bool:
        return uses_tma(quantize_reference(torch.zeros(tokens, k)), quantize_reference(torch.zeros(32, k)), gated=gated)

    monkeypatch.setattr(tma, "capability", lambda device: 90)
    assert [is_used(tokens) for tokens in (256, 257, 5000)] == [False, True, True]
    assert [is_used(tokens, gated=True) for tokens in (128, 129)] == [False, True]
    assert not is_used(300, k=40)
    monkeypatch.setattr(tma, "capability", lambda device: 89)
    assert not is_used(5000)
