"""The gated activation's Triton body against the torch one."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("seed", "tokens", "size"), [(0, 1, 3072), (1, 3, 512), (2, 2, 1025), (3, 5, 7), (4, 0, 64)])
def test_swiglu_agrees_with_its_reference(
    seed: int, tokens: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(seed)
    gate_up = (torch.randn(tokens, 2 * size) * 6).to(dtype)
    result = swiglu._swiglu_triton(gate_up.to(device))
    torch.testing.assert_close(result.cpu(), swiglu._swiglu_torch(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_reads_strided_rows_and_survives_extremes(device: torch.device) -> None:
    wide = torch.full((3, 80), 2.0)
    wide[:, 8:16] = torch.tensor([-1e4, -100.0, -90.0, -0.0, 0.0, 90.0, 100.0, 1e4])
    rows = wide[:, 8:72]
    result = swiglu._swiglu_triton(rows.to(device))
    assert result.isfinite().all()
    torch.testing.assert_close(result.cpu(), swiglu._swiglu_torch(rows))
