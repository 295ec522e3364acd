"""The sum over a token's experts, added to the residual stream and normalised: both bodies against float64."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.expert_sum import _add_choices_triton, add_choices_normalised, add_choices_torch
from meltcore.kernels.norm import Norm, rms_norm

BEHIND = 64  # numbers after what is written


@pytest.mark.parametrize("wide_norm", [False, True], ids=["", "float32 norm"])
@pytest.mark.parametrize(
    ("tokens", "choices", "size", "dtype"),
    [
        (1, 8, 2048, torch.bfloat16),
        (5, 9, 96, torch.bfloat16),
        (33, 2, 1536, torch.float16),
        (7, 1, 40, torch.float32),
    ],
)
@pytest.mark.parametrize("body", ["torch", "triton"])
def test_the_stream_is_added_to_and_comes_back_normalised(
    tokens: int, choices: int, size: int, dtype: torch.dtype, wide_norm: bool, body: str, device: torch.device
) -> None:
    torch.manual_seed(tokens)
    kept = torch.randn(tokens * size + BEHIND).to(dtype)
    outputs = torch.randn(tokens * choices, size).to(dtype)
    weights = torch.rand(tokens, choices)
    norm = Norm(torch.randn(size).to(torch.float32 if wide_norm else dtype), 1e-6)
    exact = kept[: tokens * size].double().view(tokens, size)
    exact = exact + (outputs.double().view(tokens, choices, size) * weights.double()[:, :, None]).sum(1)

    written = kept.to(device, copy=True)
    residual = written[: tokens * size].view(tokens, size)
    given = residual, outputs.to(device), weights.to(device), Norm(norm.weight.to(device), norm.eps)
    if body == "triton":
        total, normalised = _add_choices_triton(*given)
        assert total is residual
    else:
        normalised = rms_norm(add_choices_torch(*given[:3]), *given[3])

    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(residual.cpu().double(), exact, rtol=precision, atol=4 * precision)
    assert torch.equal(written[tokens * size :].cpu(), kept[tokens * size :]), "what lies behind is not written"
    # Of the stream as it is stored, not as it was before rounding.
    expected = rms_norm(residual.cpu(), *norm)
    torch.testing.assert_close(normalised.cpu(), expected, rtol=2 * precision, atol=4 * precision)


def test_no_tokens_are_no_work(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert add_choices_normalised(
        empty, empty, torch.empty(0, 3, device=device), Norm(empty.new_ones(64), 1e-6)
    ).shape == (0, 64)
