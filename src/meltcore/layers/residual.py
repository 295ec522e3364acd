"""The residual stream of a step, which every layer reads normalised and adds to."""

from __future__ import annotations

import torch

from meltcore.kernels.norm import Norm
from meltcore.layers.group import Group
from meltcore.layers.norm import RMSNorm


class Residual:
    """[tokens, hidden_size]. In a group of ranks what a layer adds is the sum of what each rank computed.

    That sum is put off until the stream is read, which is when its norm is known: exchange, addition and norm are then
    one launch for few tokens.
    """

    def __init__(self, values: torch.Tensor, group: Group | None = None) -> None:
        """It begins as `values`; with a group as the sum of every rank's."""
        self._values = None if group else values
        self._awaited = (group, values) if group else None

    def read(self, norm: RMSNorm) -> tuple[torch.Tensor, Norm | None]:
        """What a layer computes with: a tensor, and the norm that it still needs, if any."""
        if self._awaited is None:
            return self.values, norm.parts()
        group, share = self._awaited
        self._values, normalised = group.add_sum_normalised(self._values, share, norm.parts())
        self._awaited = None
        return normalised, None

    def normalised(self, norm: RMSNorm) -> torch.Tensor:
        values, still = self.read(norm)
        return values if still is None else norm(values)

    @property
    def values(self) -> torch.Tensor:
        """As they were last read; to add to in place, where there is no group."""
        assert self._values is not None
        assert self._awaited is None, "a sum over ranks is awaited: read it first"
        return self._values

    def add_sum(self, group: Group, share: torch.Tensor) -> None:
        """Add the sum of every rank's share [tokens, hidden_size], which is overwritten."""
        assert self._awaited is None, "a sum over ranks is awaited: read it first"
        self._awaited = group, share
