"""The residual stream: sums over ranks are put off until it is read, and come normalised then."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.norm import Norm, rms_norm
from meltcore.layers.group import Group
from meltcore.layers.norm import RMSNorm
from meltcore.layers.residual import Residual


class TwoAlike(Group):
    """A group in which the other rank has computed what this one has."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.sums = 0

    def add_sum_normalised(
        self, residual: torch.Tensor | None, share: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sums += 1
        total = 2 * share if residual is None else residual.add_(2 * share)
        return total, rms_norm(total, *norm)


@pytest.fixture
def norm() -> RMSNorm:
    norm = RMSNorm(8, 1e-6)
    torch.nn.init.uniform_(norm.weight)
    return norm


def test_alone_a_layer_is_given_its_norm_to_apply_on_the_way(norm: RMSNorm) -> None:
    values = torch.randn(3, 8)
    residual = Residual(values)
    hidden, still = residual.read(norm)
    assert hidden is values
    assert still == norm.parts()
    residual.values.add_(1)
    torch.testing.assert_close(residual.normalised(norm), norm(values))


def test_among_ranks_the_stream_begins_and_goes_on_as_sums_that_come_normalised(norm: RMSNorm) -> None:
    group, start, share = TwoAlike(), torch.randn(3, 8), torch.randn(3, 8)
    residual = Residual(start.clone(), group)
    hidden, still = residual.read(norm)
    torch.testing.assert_close(hidden, norm(2 * start))
    assert still is None
    residual.add_sum(group, share.clone())
    torch.testing.assert_close(residual.normalised(norm), norm(2 * start + 2 * share))
    torch.testing.assert_close(residual.values, 2 * start + 2 * share)
    assert group.sums == 2


def test_what_was_put_off_is_never_lost(norm: RMSNorm) -> None:
    group = TwoAlike()
    residual = Residual(torch.randn(3, 8), group)
    with pytest.raises(AssertionError, match="read it first"):
        residual.add_sum(group, torch.randn(3, 8))
    residual.read(norm)
    residual.add_sum(group, torch.randn(3, 8))
    with pytest.raises(AssertionError, match="read it first"):
        _ = residual.values
