"""The RMS norm's kernel against its reference."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.norm import Norm, add_rms_norm, norm_add_rms_norm, rms_norm, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different magnitudes, so that a norm over the wrong row shows."""
    return (torch.randn(shape) * torch.rand(*shape[:-1], 1).mul(8)).to(dtype)


@pytest.mark.parametrize(
    ("seed", "shape"),
    list(enumerate([(1, 128), (3, 1024), (7, 5, 128), (2, 192), (2, 8192), (9, 2, 3, 130), (1000,), (0, 256)])),
)
def test_rms_norm_agrees_with_its_reference(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(seed)
    hidden, weight = randn(*shape, dtype=dtype), torch.randn(shape[-1]).to(dtype)
    expected = rms_norm_reference(hidden, weight, EPS)
    result = in_triton(rms_norm)(hidden.to(device), weight.to(device), EPS)
    assert result.shape == hidden.shape
    torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize(("seed", "shape"), list(enumerate([(1, 128), (5, 1024), (2, 192), (3, 8192), (0, 256)])))
def test_add_rms_norm_adds_in_place(
    seed: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(seed)
    residual, added, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), torch.randn(shape[1]).to(dtype)
    total = residual.clone().to(device)
    result = in_triton(add_rms_norm)(total, added.to(device), weight.to(device), EPS)
    assert torch.equal(total.cpu(), residual + added)
    last_place = 2 * torch.finfo(dtype).eps
    expected = rms_norm_reference(residual + added, weight, EPS)
    torch.testing.assert_close(result.cpu(), expected, rtol=max(last_place, 2e-6), atol=1e-5)


@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
def test_float32_weight_multiplies_before_rounding(seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    hidden, weight = randn(5, 256, dtype=torch.bfloat16), 1 + torch.randn(256) / 256
    exact = rms_norm_reference(hidden.float(), weight, EPS).bfloat16()
    assert torch.equal(rms_norm_reference(hidden, weight, EPS), exact)
    result = in_triton(rms_norm)(hidden.to(device), weight.to(device), EPS)
    torch.testing.assert_close(result.cpu(), exact)
    rounded_twice = rms_norm_reference(hidden, weight.bfloat16(), EPS)
    assert not torch.equal(rounded_twice, exact)


@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
def test_rms_norm_reads_heads_out_of_a_wider_row(seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    fused, weight = randn(5, 7, 64, dtype=torch.bfloat16), torch.randn(64).bfloat16()
    expected = rms_norm_reference(fused[:, 1:6:2], weight, EPS)
    result = in_triton(rms_norm)(fused.to(device)[:, 1:6:2], weight.to(device), EPS)
    torch.testing.assert_close(result.cpu(), expected)
    # A last dimension that is not contiguous, and leading ones that do not collapse.
    transposed = randn(64, 5, dtype=torch.bfloat16)
    result = in_triton(rms_norm)(transposed.to(device).T, weight.to(device), EPS)
    torch.testing.assert_close(result.cpu(), rms_norm_reference(transposed.T, weight, EPS))
    blocks = randn(2, 3, 4, 64, dtype=torch.bfloat16)
    result = in_triton(rms_norm)(blocks.to(device)[:, :2, 1:3], weight.to(device), EPS)
    torch.testing.assert_close(result.cpu(), rms_norm_reference(blocks[:, :2, 1:3], weight, EPS))


@pytest.mark.parametrize(("seed", "shape"), list(enumerate([(1, 128), (5, 1152), (3, 5376), (0, 256)])))
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["weight as stream", "float32 weight"])
def test_norm_add_rms_norm_normalizes_before_and_after_the_addition(
    seed: int, shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype | None, device: torch.device
) -> None:
    torch.manual_seed(seed)
    residual, output = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    weights = [torch.randn(shape[1]).to(weight_dtype or dtype) for _ in range(2)]
    total = residual + rms_norm_reference(output, weights[0], EPS)
    norms = [Norm(weight.to(device), EPS) for weight in weights]
    stream = residual.clone().to(device)
    result = in_triton(norm_add_rms_norm)(stream, output.to(device), *norms)
    last_place = max(2 * torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(stream.cpu(), total, rtol=last_place, atol=last_place)
    expected = rms_norm_reference(stream.cpu(), weights[1], EPS)
    torch.testing.assert_close(result.cpu(), expected, rtol=last_place, atol=1e-5)
