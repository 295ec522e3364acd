"""The residual stream of a step. Every layer reads the normalized stream and adds its output to the stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meltcore.kernels.moe.combine import combine_add_rms_norm
from meltcore.kernels.norm import Norm, add_rms_norm, norm_add_rms_norm, rms_norm
from meltcore.layers.norm import RMSNorm
from meltcore.layers.tensor_parallel import TensorParallelGroup

# Performs a deferred addition with the norm of the next layer; returns the stream after it, and that normalized. None
# in place of the norm returns the stream twice.
_AddNorm = Callable[[Norm | None], tuple[torch.Tensor, torch.Tensor]]


class ResidualStream:
    """The residual stream of a step, with deferred reductions.

    values: [tokens, hidden_size].

    An addition that is a reduction (all-reduce over ranks, weighted sum over experts) is deferred until the next read.
    The read applies a norm, so reduction, addition and norm run as one kernel.
    """

    def __init__(self, values: torch.Tensor, group: TensorParallelGroup | None = None) -> None:
        """Start with `values`, or with the all-reduce of `values` if there is a `group`."""
        self._values = None if group else values
        self._deferred_add: _AddNorm | None = partial(group.all_reduce_add_rms_norm, None, values) if group else None

    def read(self, norm: RMSNorm | None) -> tuple[torch.Tensor, Norm | None]:
        """Return (input, norm) for the next layer. The layer applies `norm` to `input`, [tokens, hidden_size].

        The returned norm is None if the input is normalized already, or if the argument `norm` is None.
        """
        fused_norm = None if norm is None else norm.parameters_for_fusion()
        if self._deferred_add is None:
            return self.values, fused_norm
        deferred_add, self._deferred_add = self._deferred_add, None
        self._values, normalized = deferred_add(fused_norm)
        return normalized, None

    def normalized(self, norm: RMSNorm) -> torch.Tensor:
        """Return norm(values), [tokens, hidden_size]."""
        values, unapplied_norm = self.read(norm)
        return values if unapplied_norm is None else norm(values)

    @property
    def values(self) -> torch.Tensor:
        """The residual stream, to which callers may add in place.

        Raises AssertionError while an addition is deferred.
        """
        assert self._values is not None
        assert self._deferred_add is None, "an addition is deferred: read the stream first"
        return self._values

    def add_all_reduce(self, group: TensorParallelGroup, partial_sum: torch.Tensor) -> None:
        """Add the all-reduce of all ranks' partial sums [tokens, hidden_size]. `partial_sum` is overwritten."""
        assert self._deferred_add is None, "an addition is deferred: read the stream first"
        self._deferred_add = partial(group.all_reduce_add_rms_norm, self._values, partial_sum)

    def add_normalized(self, output: torch.Tensor, post_norm: Norm, group: TensorParallelGroup | None = None) -> None:
        """Add post_norm(output). With a `group`, `output` [tokens, hidden_size] is all-reduced first."""
        values = self.values
        normalized = None if group is None else group.all_reduce_add_rms_norm(None, output, post_norm)[1]

        def add(norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
            if norm is None:
                values.add_(rms_norm(output, *post_norm) if normalized is None else normalized)
                return values, values
            if normalized is None:
                return values, norm_add_rms_norm(values, output, post_norm, norm)
            return values, add_rms_norm(values, normalized, *norm)

        self._deferred_add = add

    def add_experts(
        self, outputs: torch.Tensor, topk_weights: torch.Tensor, group: TensorParallelGroup | None = None
    ) -> None:
        """Add the weighted sum of each token's expert outputs, after an all-reduce if there is a `group`.

        outputs: [tokens * top_k, hidden_size]; topk_weights: [tokens, top_k] float32.
        """
        values = self.values

        def add(norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
            assert norm is not None, "a layer without a norm after routed experts"
            if group is not None:
                return group.combine_all_reduce_add_rms_norm(values, outputs, topk_weights, norm)
            return values, combine_add_rms_norm(values, outputs, topk_weights, norm)

        self._deferred_add = add
