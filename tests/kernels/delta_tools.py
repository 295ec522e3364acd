"""Random layers and steps of Gated DeltaNet for its tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meltcore.kernels.delta import DeltaShape, DeltaWeights
from meltcore.kernels.delta_net import delta_chunks
from meltcore.kernels.paged_attention import Segments

SMALL = DeltaShape(key_heads=2, heads=4, key_dim=16, value_dim=16, kernel=4)


def make_weights(shape: DeltaShape, dtype: torch.dtype, device: torch.device, decay: float = 1.0) -> DeltaWeights:
    """`decay`: how strongly states decay; at 16, the strongest that the published initialisation draws."""
    return DeltaWeights(
        conv=(0.5 * torch.randn(shape.conv_channels, shape.kernel)).to(device, dtype),
        a_log=(torch.rand(shape.heads) * decay).log().to(device),
        dt_bias=torch.randn(shape.heads).to(device),
        norm=(1 + 0.2 * torch.randn(shape.value_dim)).to(device, dtype),
        eps=1e-6,
    )


class Slots(NamedTuple):
    """Slot 0 is the null slot. What no sequence has written yet is NaN, so reading it shows."""

    conv_states: torch.Tensor
    states: torch.Tensor

    @classmethod
    def make(cls, count: int, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> Slots:
        nan = float("nan")
        conv = torch.full((count, shape.kernel, shape.conv_channels), nan, dtype=dtype, device=device)
        return cls(conv, torch.full((count, *shape[1:4]), nan, device=device))

    def clone(self) -> Slots:
        return Slots(self.conv_states.clone(), self.states.clone())


def make_segments(sizes: Sequence[int], starts: Sequence[int], slots: Sequence[int], device: torch.device) -> Segments:
    """Single tokens first, as the engine sorts them."""
    assert list(sizes) == sorted(sizes, key=lambda size: size > 1)
    decodes = sum(size == 1 for size in sizes)
    firsts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    nothing = torch.empty(0, dtype=torch.int64, device=device)

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Segments(
        page_table=nothing,
        rows=nothing,
        starts=whole(starts),
        slots=nothing,
        decodes=decodes,
        tiles=nothing,
        places=nothing,
        groups=[],
        state_slots=whole(slots),
        first_tokens=whole(firsts),
        chunks=torch.from_numpy(delta_chunks(sizes, decodes)).to(device),
    )


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())
