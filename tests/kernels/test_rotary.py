"""Heads that turn in part: in half-split order they turn like those that turn whole."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.rotary import apply_rotary, half_split, rotary_table


@pytest.mark.parametrize(("head_dim", "turning"), [(256, 64), (32, 8), (16, 2), (64, 64)])
def test_the_first_dimensions_turn_and_the_others_stay(head_dim: int, turning: int) -> None:
    torch.manual_seed(turning)
    heads, positions = torch.randn(5, 3, head_dim), torch.tensor([0, 1, 7, 100, 299])
    device = torch.device("cpu")
    turned = apply_rotary(heads[..., :turning], rotary_table(turning, 300, 1e4, device), positions)
    expected = torch.cat([turned, heads[..., turning:]], -1)
    order = half_split(head_dim, turning)
    ours = apply_rotary(heads[..., order], rotary_table(head_dim, 300, 1e4, device, turning), positions)
    assert torch.equal(ours, expected[..., order])


def test_the_order_has_every_dimension_once() -> None:
    assert half_split(8, 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
