"""The output gate's Triton body against the torch one."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels import output_gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("tokens", "size"), [(1, 4096), (5, 64), (3, 1500), (0, 128)])
def test_gates_are_read_out_of_wider_rows(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(tokens)
    mixed, wide = torch.randn(tokens, size).to(dtype), (4 * torch.randn(tokens, size + 96)).to(dtype)
    expected = (mixed.double() * wide[:, 32 : 32 + size].double().sigmoid()).to(dtype)
    torch.testing.assert_close(output_gate._gate_torch(mixed.clone(), wide[:, 32 : 32 + size]), expected)
    ours = mixed.to(device)
    result = output_gate._gate_triton(ours, wide.to(device)[:, 32 : 32 + size])
    assert result is ours
    torch.testing.assert_close(result.cpu(), expected)


def test_what_is_not_contiguous_is_refused(device: torch.device) -> None:
    wide = torch.zeros(4, 64, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        output_gate._gate_triton(wide[:, :32], wide[:, 32:])
