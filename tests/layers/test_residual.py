"""The residual stream: all-reduces are deferred until it is read, and return it normalized."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.norm import Norm, rms_norm
from meltcore.layers.norm import RMSNorm
from meltcore.layers.residual import ResidualStream
from meltcore.layers.tensor_parallel import TensorParallelGroup


class TwoEqualRanks(TensorParallelGroup):
    """A group whose other rank has the same partial sums."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.all_reduces = 0

    def all_reduce_add_rms_norm(
        self, residual: torch.Tensor | None, partial_sum: torch.Tensor, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.all_reduces += 1
        total = 2 * partial_sum if residual is None else residual.add_(2 * partial_sum)
        return total, total if norm is None else rms_norm(total, *norm)


@pytest.fixture
def norm() -> RMSNorm:
    norm = RMSNorm(8, 1e-6)
    torch.nn.init.uniform_(norm.weight)
    return norm


def test_without_a_group_the_norm_is_returned_for_fusion(norm: RMSNorm) -> None:
    values = torch.randn(3, 8)
    residual = ResidualStream(values)
    hidden, remaining = residual.read(norm)
    assert hidden is values
    assert remaining == norm.parameters_for_fusion()
    residual.values.add_(1)
    torch.testing.assert_close(residual.normalized(norm), norm(values))


def test_with_a_group_reads_return_all_reduced_normalized_values(norm: RMSNorm) -> None:
    group, start, partial_sum = TwoEqualRanks(), torch.randn(3, 8), torch.randn(3, 8)
    residual = ResidualStream(start.clone(), group)
    hidden, remaining = residual.read(norm)
    torch.testing.assert_close(hidden, norm(2 * start))
    assert remaining is None
    residual.add_all_reduce(group, partial_sum.clone())
    torch.testing.assert_close(residual.normalized(norm), norm(2 * start + 2 * partial_sum))
    torch.testing.assert_close(residual.values, 2 * start + 2 * partial_sum)
    assert group.all_reduces == 2


@pytest.mark.parametrize("grouped", [False, True])
def test_a_layer_without_a_norm_reads_the_sum(norm: RMSNorm, grouped: bool) -> None:
    """Of ranks, whose embeddings and outputs are all-reduced first."""
    group = TwoEqualRanks() if grouped else None
    ranks, start, output = 1 + grouped, torch.randn(3, 8), torch.randn(3, 8)
    residual = ResidualStream(start.clone(), group)
    hidden, remaining = residual.read(None)
    torch.testing.assert_close(hidden, ranks * start)
    assert remaining is None
    residual.add_normalized(output.clone(), norm.parameters_for_fusion(), group)
    expected = ranks * start + norm(ranks * output)
    torch.testing.assert_close(residual.read(None)[0], expected)
    residual.add_normalized(output.clone(), norm.parameters_for_fusion(), group)
    torch.testing.assert_close(residual.normalized(norm), norm(expected + norm(ranks * output)))


def test_deferred_addition_must_be_read_before_the_next(norm: RMSNorm) -> None:
    group = TwoEqualRanks()
    residual = ResidualStream(torch.randn(3, 8), group)
    with pytest.raises(AssertionError, match="read the stream first"):
        residual.add_all_reduce(group, torch.randn(3, 8))
    residual.read(norm)
    residual.add_all_reduce(group, torch.randn(3, 8))
    with pytest.raises(AssertionError, match="read the stream first"):
        _ = residual.values
