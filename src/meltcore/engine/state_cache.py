"""Recurrent states on the device: one slot a running sequence, and the table that says which."""

from __future__ import annotations

import torch

from meltcore.engine.batch import StateStep
from meltcore.engine.transfer import to_device, to_device_together
from meltcore.models.cache import StateGroup


class StateCache:
    """The states of all recurrent layers, those of one slot beside each other.

    conv: [slots + 1, layers, conv_width, conv_channels] in the model's type;
    states: [slots + 1, layers, heads, key_dim, value_dim] float32. Slot 0 is the null slot.
    """

    def __init__(self, group: StateGroup, *, slots: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        conv = (slots + 1, group.layers, group.conv_width, group.conv_channels)
        states = (slots + 1, group.layers, group.heads, group.key_dim, group.value_dim)
        # Zeros, not whatever was there: what a sequence at position 0 has not written yet is multiplied by zero.
        self.conv = torch.zeros(conv, dtype=dtype, device=device)
        self.states = torch.zeros(states, dtype=torch.float32, device=device)
        self._slot_of_row = torch.zeros(rows, dtype=torch.int64, device=device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(conv_states, states) of the recurrent layer `index`, counted among the recurrent ones: [slots + 1, ...]."""
        return self.conv[:, index], self.states[:, index]

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows] int64: the slots of these table rows."""
        return self._slot_of_row[rows]

    def begin(self, step: StateStep, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Before a step of these rows: what `Segments` has for recurrent layers, slots, first_tokens and chunks."""
        slots, first_tokens = to_device_together([step.slots, step.first_tokens], rows.device)
        self.note(rows, slots)
        return slots, first_tokens, to_device(step.pieces, torch.int32, rows.device)

    def note(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Remember the slots of these rows, for the steps in which the host names rows alone."""
        self._slot_of_row[rows] = slots

    def restore(self, step: StateStep) -> None:
        """Before a step: bring its snapshots to their slots."""
        self._copy(step.restores)

    def keep(self, step: StateStep) -> None:
        """After a step: take its snapshots."""
        self._copy(step.snapshots)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Slot to slot, one after the other in the order of the stream."""
        for source, target in pairs:
            self.conv[target].copy_(self.conv[source])
            self.states[target].copy_(self.states[source])
