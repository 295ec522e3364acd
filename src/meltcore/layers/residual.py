"""The residual stream of a step, which every layer reads normalised and adds to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meltcore.kernels.expert_sum import add_choices_normalised
from meltcore.kernels.norm import Norm
from meltcore.layers.group import Group
from meltcore.layers.norm import RMSNorm

# Does an addition that was put off; returns the stream as it then is, and that normalised.
AddNormalised = Callable[[Norm], tuple[torch.Tensor, torch.Tensor]]


class Residual:
    """[tokens, hidden_size]. What a layer adds may be a sum in itself: in a group of ranks of what each rank computed,
    after routed experts of what a token's own gave.

    Such a sum is put off until the stream is read, which is when its norm is known: sum, addition and norm are then one
    launch, in a group for few tokens.
    """

    def __init__(self, values: torch.Tensor, group: Group | None = None) -> None:
        """It begins as `values`; with a group as the sum of every rank's."""
        self._values = None if group else values
        self._awaited: AddNormalised | None = partial(group.add_sum_normalised, None, values) if group else None

    def read(self, norm: RMSNorm) -> tuple[torch.Tensor, Norm | None]:
        """What a layer computes with: a tensor, and the norm that it still needs, if any."""
        if self._awaited is None:
            return self.values, norm.parts()
        awaited, self._awaited = self._awaited, None
        self._values, normalised = awaited(norm.parts())
        return normalised, None

    def normalised(self, norm: RMSNorm) -> torch.Tensor:
        values, still = self.read(norm)
        return values if still is None else norm(values)

    @property
    def values(self) -> torch.Tensor:
        """As they were last read; to add to in place, where there is no group."""
        assert self._values is not None
        assert self._awaited is None, "a sum is awaited: read it first"
        return self._values

    def add_sum(self, group: Group, share: torch.Tensor) -> None:
        """Add the sum of every rank's share [tokens, hidden_size], which is overwritten."""
        assert self._awaited is None, "a sum is awaited: read it first"
        self._awaited = partial(group.add_sum_normalised, self._values, share)

    def add_choices(self, outputs: torch.Tensor, weights: torch.Tensor, group: Group | None = None) -> None:
        """Add each token's outputs [tokens * choices, hidden_size], weighted by [tokens, choices] float32; with a group
        the sum of every rank's."""
        values = self.values
        if group is not None:
            self._awaited = partial(group.add_choices_normalised, values, outputs, weights)
            return

        def add(norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
            return values, add_choices_normalised(values, outputs, weights, norm)

        self._awaited = add
