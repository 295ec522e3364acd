"""Partly rotated heads: in half-split order they rotate like whole ones."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.rotary import apply_rope, half_split_order, rotary_table


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), (32, 8), (16, 2), (64, 64)])
def test_only_the_first_dimensions_rotate(head_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(rotary_dim)
    heads, positions = torch.randn(5, 3, head_dim), torch.tensor([0, 1, 7, 100, 299])
    device = torch.device("cpu")
    rotated = apply_rope(heads[..., :rotary_dim], rotary_table(rotary_dim, 300, 1e4, device), positions)
    expected = torch.cat([rotated, heads[..., rotary_dim:]], -1)
    order = half_split_order(head_dim, rotary_dim)
    ours = apply_rope(heads[..., order], rotary_table(head_dim, 300, 1e4, device, rotary_dim), positions)
    assert torch.equal(ours, expected[..., order])


def test_half_split_order_has_every_dimension_once() -> None:
    assert half_split_order(8, 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
