"""Linear: the Triton kernels for few tokens against float64, and which kernel serves which count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.gemm import gemv as gemv_file
from meltcore.kernels.gemm import split_k as split_k_file
from meltcore.kernels.gemm.gemv import MAX_GATED_K, MAX_K, gemv, supports
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.gemm.split_k import split_k_gemm
from meltcore.kernels.norm import Norm

EPS = 1e-6
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
SHAPES = pytest.mark.parametrize(
    ("seed", "tokens", "n", "k"),
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


def random_matmul(seed: int, tokens: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs have unit variance."""
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, k).to(dtype)
    return hidden, (torch.randn(n, k) * k**-0.5).to(dtype)


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
    """For sums of rounded terms: the norm of the error, and the largest error relative to the mean result."""
    error = result.cpu().double() - expected
    step = torch.finfo(dtype).eps
    assert result.dtype == dtype
    assert error.norm() <= step * expected.norm()
    assert error.abs().max() <= steps * step * expected.pow(2).mean().sqrt()


@TYPES
@SHAPES
def test_matmul_is_rounded_once(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_matmul(seed, tokens, n, k, dtype)
    kernel = gemv if tokens == 1 else split_k_gemm
    result = kernel(hidden.to(device), weight.to(device))
    assert result.shape == (tokens, n)
    assert_rounded_once(result, exact(hidden, weight), dtype)
    assert_rounded_once(linear(hidden, weight), exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_sum_with_the_residual_is_rounded_once(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_matmul(seed, tokens, n, k, dtype)
    before = torch.randn(tokens, n).to(dtype)
    residual = before.to(device, copy=True)
    kernel = gemv if tokens == 1 else split_k_gemm
    assert kernel(hidden.to(device), weight.to(device), residual=residual) is residual
    assert_rounded_once(residual, before.double() + exact(hidden, weight), dtype)


@TYPES
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
@pytest.mark.parametrize(("seed", "n", "k"), [(0, 40, 1024), (1, 37, 192), (2, 5, 3072)])
def test_gemv_fuses_the_norm(seed: int, n: int, k: int, size: float, dtype: torch.dtype, device: torch.device) -> None:
    hidden, weight = random_matmul(seed, 1, n, k, dtype)
    hidden, norm = hidden * size, random_norm(k, dtype)
    result = gemv(hidden.to(device), weight.to(device), moved(norm, device))
    assert_near(result, exact(hidden, weight, norm), dtype, steps=4)


@TYPES
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(("seed", "size", "k"), [(0, 40, 1024), (1, 37, 192)])
def test_gemv_fuses_the_activation(
    seed: int, size: int, k: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_matmul(seed, 1, 2 * size, k, dtype)
    norm = random_norm(k, dtype) if normed else None
    result = gemv(hidden.to(device), weight.to(device), moved(norm, device), gated=True)
    assert result.shape == (1, size)
    assert_near(result, exact_gated(hidden, weight, norm), dtype, steps=10)


def expected_kernels(tokens: int) -> list[str]:
    """Kernels of `linear` alone, with activation and with residual."""
    if tokens == 1:
        return ["gemv"] * 3
    return ["split_k_gemm"] * 3 if tokens <= split_k_file.MAX_TOKENS else []


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 31, 64, 65, 128, 129])
def test_linear_serves_every_number_of_tokens(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for module, kernel in ((gemv_file, gemv), (split_k_file, split_k_gemm)):

        def noted(*args: Any, kernel: Any = kernel, **more: Any) -> torch.Tensor:
            called.append(kernel.__name__)
            return kernel(*args, **more)

        monkeypatch.setattr(module, kernel.__name__, noted)
    hidden, weight = random_matmul(tokens, tokens, 22, 256, torch.bfloat16)
    norm = random_norm(256, torch.bfloat16)
    there, weight_there, norm_there = hidden.to(device), weight.to(device), moved(norm, device)
    before = torch.randn(tokens, 22).bfloat16()
    assert_near(
        in_triton(linear)(there, weight_there, norm_there), exact(hidden, weight, norm), torch.bfloat16, steps=4
    )
    gated = in_triton(linear)(there, weight_there, norm_there, gated=True)
    assert_near(gated, exact_gated(hidden, weight, norm), torch.bfloat16, steps=10)
    added = in_triton(linear)(there, weight_there, residual=before.to(device, copy=True))
    assert_near(added, before.double() + exact(hidden, weight), torch.bfloat16, steps=4)
    assert called == expected_kernels(tokens)


@pytest.mark.parametrize("tokens", [1, 5, 129])
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_linear_writes_to_a_given_tensor(tokens: int, triton: bool, device: torch.device) -> None:
    function = in_triton(linear) if triton else linear
    hidden, weight = (tensor.to(device) for tensor in random_matmul(tokens, tokens, 24, 128, torch.bfloat16))
    kept = torch.full((tokens + 2, 24), 7.0, dtype=torch.bfloat16, device=device)
    output = function(hidden, weight, out=kept[:tokens])
    assert output.data_ptr() == kept.data_ptr()
    assert torch.equal(kept[:tokens], function(hidden, weight))
    assert (kept[tokens:] == 7.0).all()


@TYPES
@pytest.mark.parametrize(("tokens", "n"), [(1, 24), (5, 24), (129, 24), (3, split_k_file.MAX_ROWS + 8)])
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_sums_in_float32_are_not_rounded(
    tokens: int, n: int, triton: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """As a head needs them: by each kernel, and by the library for many tokens or rows."""
    hidden, weight = random_matmul(tokens, tokens, n, 128, dtype)
    kept = torch.full((tokens + 1, n), 7.0, device=device)
    output = (in_triton(linear) if triton else linear)(hidden.to(device), weight.to(device), out=kept[:tokens])
    assert output.data_ptr() == kept.data_ptr()
    torch.testing.assert_close(output.cpu().double(), exact(hidden, weight), rtol=1e-5, atol=1e-5)
    assert (kept[tokens:] == 7.0).all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_past_the_end_are_not_written(tokens: int, device: torch.device) -> None:
    """Tokens and outputs are both padded inside the kernel; memory behind the result must not change."""
    hidden, weight = random_matmul(0, tokens, 21, 64, torch.bfloat16)
    kept = torch.full((tokens * 21 + 64,), 7.0, dtype=torch.bfloat16, device=device)
    kernel = gemv if tokens == 1 else split_k_gemm
    kernel(hidden.to(device), weight.to(device), residual=kept[: tokens * 21].view(tokens, 21))
    assert (kept[tokens * 21 :] == 7.0).all()


def test_gemv_supports() -> None:
    hidden, weight = random_matmul(0, 1, 8, 128, torch.bfloat16)
    assert supports(hidden, weight)
    assert not supports(hidden[:0], weight)
    assert not supports(hidden.repeat(2, 1), weight)
    assert supports(hidden.new_empty(1, MAX_K), hidden.new_empty(5, MAX_K))
    assert not supports(hidden.new_empty(1, 2 * MAX_K), hidden.new_empty(5, 2 * MAX_K))
    for gated, most in ((True, MAX_GATED_K), (False, MAX_K)):
        for columns in (MAX_GATED_K, MAX_GATED_K + 64, MAX_K):
            given = hidden.new_empty(1, columns), hidden.new_empty(6, columns)
            assert supports(*given, gated=gated) == (columns <= most)
    assert not supports(hidden.float(), weight.float())
    assert not supports(hidden[:, :96].contiguous(), weight[:, :96].contiguous())
    assert not supports(hidden[:, :64].contiguous(), weight[:, :64])
