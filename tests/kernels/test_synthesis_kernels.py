"""Kernels of speech synthesis against their references, which run on the CPU."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.activation import linear_gelu
from meltcore.kernels.grouped_convolution import grouped_convolution, taps_first
from meltcore.kernels.layer_norm import add_modulated_layer_norm, modulated_layer_norm
from meltcore.kernels.rotary import rotate_pairs

EPS = 1e-6
# Relative to the largest value of a result: sums in another order, and one rounding more or less.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    limit = TOLERANCE[expected.dtype] * float(expected.float().abs().max())
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=0, atol=limit)


@pytest.mark.parametrize("modulated_rows", [1, 3])
@pytest.mark.parametrize(("size", "dtype"), [(48, torch.float32), (1024, torch.bfloat16), (520, torch.float16)])
def test_modulated_norms(modulated_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(size)
    # Rows of different magnitudes, and modulations as rows of a table, so that those of another row show.
    hidden = ((1 + torch.randn(3, 5, size)) * torch.rand(3, 5, 1).mul(4)).to(dtype)
    added, table = torch.randn(3, 5, size).to(dtype), torch.randn(modulated_rows, 6, size).to(dtype)
    gate, shift, scale = table[:, 2:5].unbind(1)
    total = hidden.float() + gate[:, None].float() * added.float()
    stored = total.to(dtype)

    def normed(values: torch.Tensor) -> torch.Tensor:
        centered = values.double() - values.double().mean(-1, keepdim=True)
        norm = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt()
        return (norm * (1 + scale[:, None].double()) + shift[:, None].double()).to(dtype)

    on = table.to(device)[:, 2:5].unbind(1)
    assert_close(modulated_layer_norm(hidden, scale, shift, EPS), normed(hidden))
    assert_close(in_triton(modulated_layer_norm)(hidden.to(device), on[2], on[1], EPS), normed(hidden))
    changed, on_device = hidden.clone(), hidden.to(device)
    assert_close(add_modulated_layer_norm(changed, added, gate, scale, shift, EPS), normed(stored))
    found = in_triton(add_modulated_layer_norm)(on_device, added.to(device), on[0], on[2], on[1], EPS)
    assert_close(changed, stored)
    assert_close(on_device, stored)
    assert_close(found, normed(on_device.cpu()))


def test_modulations_of_other_rows_are_refused(device: torch.device) -> None:
    hidden, table = torch.randn(3, 5, 16, device=device), torch.randn(2, 16, device=device)
    with pytest.raises(ValueError, match="of 1 or 3 rows"):
        in_triton(modulated_layer_norm)(hidden, table, table, EPS)
    with pytest.raises(ValueError, match="must be alike"):
        in_triton(add_modulated_layer_norm)(hidden, hidden, table[:1], table[:1], table, EPS)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [None, [140, 3, 129]], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("groups", "group_size", "taps", "dtype"),
    [(4, 2, 31, torch.float32), (2, 24, 7, torch.float32), (2, 64, 31, torch.bfloat16), (3, 16, 5, torch.float16)],
)
def test_grouped_convolution(
    groups: int, group_size: int, taps: int, dtype: torch.dtype, lengths: list[int] | None, device: torch.device
) -> None:
    torch.manual_seed(taps)
    channels = groups * group_size
    hidden, bias = torch.randn(3, 140, channels).to(dtype), torch.randn(channels).to(dtype)
    weight = taps_first((torch.randn(channels, group_size, taps) / (group_size * taps) ** 0.5).to(dtype))
    ends = None if lengths is None else torch.tensor(lengths)
    expected = grouped_convolution(hidden.float(), weight.float(), bias.float(), ends).to(dtype)
    on_device = [values if values is None else values.to(device) for values in (hidden, weight, bias, ends)]
    assert on_device[1].stride() == weight.stride()
    found = in_triton(grouped_convolution)(*on_device)
    for row, end in enumerate(lengths or [140] * 3):  # each row as if it were alone
        assert_close(found[row, :end], expected[row, :end])
        alone = grouped_convolution(hidden[row : row + 1, :end].float(), weight.float(), bias.float())[0]
        torch.testing.assert_close(expected[row, :end].float(), alone, rtol=0.02, atol=0.02)


def test_mish_of_large_and_small_values(device: torch.device) -> None:
    """By a convolution of one tap that copies."""
    values = torch.tensor([-200.0, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 19.0, 21.0, 1e4]).repeat(2)[None, :, None]
    weight, bias = taps_first(torch.ones(1, 1, 1)), torch.zeros(1)
    found = in_triton(grouped_convolution)(values.to(device), weight.to(device), bias.to(device))
    torch.testing.assert_close(found.cpu(), torch.nn.functional.mish(values), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(("head_dim", "dtype"), [(8, torch.float32), (64, torch.bfloat16), (48, torch.float16)])
def test_rotation_of_pairs(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of the first head of queries and keys: complex numbers times the angles' exponentials, and no other head."""
    torch.manual_seed(head_dim)
    angles = torch.rand(50, head_dim // 2) * 100
    table = torch.stack([angles.cos(), angles.sin()])[:, :37]
    qkv = torch.randn(2, 37, 3, 4, head_dim).to(dtype)
    expected = qkv.clone()
    pairs = torch.view_as_complex(qkv[:, :, :2, 0].double().unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(*table.double())[:, None]
    expected[:, :, :2, 0] = torch.view_as_real(turned).flatten(-2).to(dtype)
    for place, function in (("cpu", rotate_pairs), (device, in_triton(rotate_pairs))):
        found = qkv.clone().to(place)
        function(found[:, :, :2, 0], table.to(place))
        assert_close(found, expected)
        assert torch.equal(found[:, :, :, 1:].cpu(), qkv[:, :, :, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gelu_as_epilogue(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(2, 37, 64), torch.randn(128, 64) / 4, torch.randn(128)
    given = [values.to(dtype) for values in (hidden, weight, bias)]
    expected = linear_gelu(*(values.float() for values in given)).to(dtype)
    inner = torch.nn.functional.linear(*(values.double() for values in given))
    formula = inner / 2 * (1 + (0.7978845608028654 * (inner + 0.044715 * inner**3)).tanh())
    assert_close(expected, formula.to(dtype))
    assert_close(linear_gelu(*(values.to(device) for values in given)), expected)
