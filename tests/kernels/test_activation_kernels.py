"""Gated activations: the kernels against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.activation import apply_sigmoid_gate, geglu, swiglu


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("seed", "tokens", "size"), [(0, 1, 3072), (1, 3, 512), (2, 2, 1025), (3, 5, 7), (4, 0, 64)])
@pytest.mark.parametrize("activation", [swiglu, geglu])
def test_gated_activation_agrees_with_its_reference(
    activation: Callable[[torch.Tensor], torch.Tensor],
    seed: int,
    tokens: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(seed)
    gate_up = (torch.randn(tokens, 2 * size) * 6).to(dtype)
    result = in_triton(activation)(gate_up.to(device))
    # The tail of GELU is a difference of almost equal numbers in the reference.
    rtol, atol = (1.6e-2, 1e-5) if dtype == torch.bfloat16 else (1e-3, 1e-5)
    torch.testing.assert_close(result.cpu(), activation(gate_up), rtol=rtol, atol=atol)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", [swiglu, geglu])
def test_strided_rows_and_extremes(activation: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    wide = torch.full((3, 80), 2.0)
    wide[:, 8:16] = torch.tensor([-1e4, -100.0, -90.0, -0.0, 0.0, 90.0, 100.0, 1e4])
    rows = wide[:, 8:72]
    result = in_triton(activation)(rows.to(device))
    assert result.isfinite().all()
    torch.testing.assert_close(result.cpu(), activation(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("tokens", "size"), [(1, 4096), (5, 64), (3, 1500), (0, 128)])
def test_sigmoid_gate_reads_gates_of_wider_rows(
    tokens: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(tokens)
    hidden, wide = torch.randn(tokens, size).to(dtype), (4 * torch.randn(tokens, size + 96)).to(dtype)
    expected = (hidden.double() * wide[:, 32 : 32 + size].double().sigmoid()).to(dtype)
    torch.testing.assert_close(apply_sigmoid_gate(hidden.clone(), wide[:, 32 : 32 + size]), expected)
    ours = hidden.to(device)
    result = in_triton(apply_sigmoid_gate)(ours, wide.to(device)[:, 32 : 32 + size])
    assert result is ours
    torch.testing.assert_close(result.cpu(), expected)


def test_sigmoid_gate_refuses_strided_tensors(device: torch.device) -> None:
    wide = torch.zeros(4, 64, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        in_triton(apply_sigmoid_gate)(wide[:, :32], wide[:, 32:])
