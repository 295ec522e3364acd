"""Random layers and steps of Gated DeltaNet for its tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.common import GatedDeltaParams, GatedDeltaShape, make_chunk_indices

SMALL = GatedDeltaShape(key_heads=2, heads=4, key_dim=16, value_dim=16, kernel=4)


def make_params(
    shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device, decay: float = 1.0
) -> GatedDeltaParams:
    """Random weights without slots. `decay`: of the states; 16 is the strongest of the published initialization."""
    nothing = torch.empty(0, device=device)
    return GatedDeltaParams(
        conv=(0.5 * torch.randn(shape.conv_channels, shape.kernel)).to(device, dtype),
        a_log=(torch.rand(shape.heads) * decay).log().to(device),
        dt_bias=torch.randn(shape.heads).to(device),
        norm=(1 + 0.2 * torch.randn(shape.value_dim)).to(device, dtype),
        eps=1e-6,
        key_heads=shape.key_heads,
        conv_states=nothing,
        recurrent_states=nothing,
    )


class Slots(NamedTuple):
    """Slot 0 is the null slot. What no sequence has written yet is NaN, so reading it shows."""

    conv_states: torch.Tensor
    states: torch.Tensor

    def of(self, params: GatedDeltaParams) -> GatedDeltaParams:
        """`params` with these slots."""
        return params._replace(conv_states=self.conv_states, recurrent_states=self.states)

    @classmethod
    def make(
        cls, count: int, shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device, window: int = 1
    ) -> Slots:
        """`window`: the tokens of the longest window, drafts included."""
        nan = float("nan")
        entries, columns = shape.kernel + 2 * (window - 1), shape.conv_channels + 2 * shape.heads * (window > 1)
        conv = torch.full((count, entries, columns), nan, dtype=dtype, device=device)
        return cls(conv, torch.full((count, *shape[1:4]), nan, device=device))

    def clone(self) -> Slots:
        return Slots(self.conv_states.clone(), self.states.clone())


def make_metadata(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    slots: Sequence[int],
    device: torch.device,
    replay_lens: Sequence[int] = (),
) -> AttentionMetadata:
    """Single tokens first, as the engine sorts them. `replay_lens` makes as many of the first sequences windows."""
    assert list(query_lens) == sorted(query_lens, key=lambda size: size > 1)
    decodes = sum(size == 1 for size in query_lens)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return AttentionMetadata(
        page_table=nothing,
        rows=nothing,
        context_lens=torch.tensor(context_lens, device=device),
        slot_mapping=nothing,
        num_decodes=decodes,
        query_tiles=nothing,
        padded_index=nothing,
        padded_groups=[],
        state_slots=torch.tensor(slots, device=device),
        query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], device=device),
        chunk_indices=torch.from_numpy(make_chunk_indices(query_lens, max(decodes, len(replay_lens)))).to(device),
        num_windows=len(replay_lens),
        replay_lens=torch.tensor(replay_lens, dtype=torch.int64, device=device),
    )


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())
