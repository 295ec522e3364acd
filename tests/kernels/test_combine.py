"""Combine: weighted sums of expert outputs, added to the residual and normalized, against float64."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.moe.combine import combine_add_rms_norm
from meltcore.kernels.norm import Norm, rms_norm

BEHIND = 64  # numbers after what is written


@pytest.mark.parametrize("wide_norm", [False, True], ids=["", "float32-norm"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "size", "dtype"),
    [
        (1, 8, 2048, torch.bfloat16),
        (5, 9, 96, torch.bfloat16),
        (33, 2, 1536, torch.float16),
        (513, 2, 96, torch.bfloat16),
        (7, 1, 40, torch.float32),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_residual_is_added_to_and_returned_normalized(
    tokens: int, top_k: int, size: int, dtype: torch.dtype, wide_norm: bool, implementation: str, device: torch.device
) -> None:
    torch.manual_seed(tokens)
    kept = torch.randn(tokens * size + BEHIND).to(dtype)
    outputs = torch.randn(tokens * top_k, size).to(dtype)
    weights = torch.rand(tokens, top_k)
    norm = Norm(torch.randn(size).to(torch.float32 if wide_norm else dtype), 1e-6)
    exact = kept[: tokens * size].double().view(tokens, size)
    exact = exact + (outputs.double().view(tokens, top_k, size) * weights.double()[:, :, None]).sum(1)

    written = kept.to(device, copy=True)
    residual = written[: tokens * size].view(tokens, size)
    given = residual, outputs.to(device), weights.to(device), Norm(norm.weight.to(device), norm.eps)
    function = in_triton(combine_add_rms_norm) if implementation == "triton" else combine_add_rms_norm
    normalized = function(*given)

    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(residual.cpu().double(), exact, rtol=precision, atol=4 * precision)
    assert torch.equal(written[tokens * size :].cpu(), kept[tokens * size :]), "memory behind the result was written"
    # Of the stored residual, which is rounded.
    expected = rms_norm(residual.cpu(), *norm)
    torch.testing.assert_close(normalized.cpu(), expected, rtol=2 * precision, atol=4 * precision)


def test_no_tokens(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert in_triton(combine_add_rms_norm)(
        empty, empty, torch.empty(0, 3, device=device), Norm(empty.new_ones(64), 1e-6)
    ).shape == (0, 64)
