"""The device memory of a model's caches: pages of keys and values with their tables, and slots of recurrent states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from meltcore.engine.core.batch import NewPages, RecurrentBatch
from meltcore.engine.core.kv_cache import PAGE_SIZE, PageLayout, pages_for
from meltcore.engine.worker.transfer import to_device, to_device_together
from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.window import count_replays
from meltcore.models.decoders.kv_cache_specs import KVCacheGroups, RecurrentStateSpec


class ModelRunnerConfig(NamedTuple):
    """The sizes of a runner.

    Args:
        pages: number of pages without the null page.
        recurrent_slots: number of slots without the null slot.
        max_num_seqs: the maximum number of sequences per step.
        max_model_len: the maximum number of tokens per sequence.
        max_num_batched_tokens: the maximum number of tokens per step.
        logit_rows: the maximum number of sequences that are sampled from their logits in one block, without ranks.
        window: the maximum number of tokens of a decoding sequence in a step, drafts included.
    """

    pages: int
    recurrent_slots: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    logit_rows: int
    window: int = 1


def allocate_caches(
    groups: KVCacheGroups,
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    states: RecurrentStateCache | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Allocate one pair of tensors per layer, in the order of the layers.

    An attention layer has pages of keys and pages of values, each [pages, page_size, kv_heads, head_dim]. The
    sub-groups of a model share these tensors: layer i of each sub-group has the same tensors, but its own pages. A
    recurrent layer has the pair (conv_states, states).
    """
    # Zeros: a masked key still takes part as 0 * value, and uninitialized memory may hold NaN.
    shape = (pages, page_size, groups.attention[0].spec.kv_heads * groups.attention[0].spec.head_dim)
    shared_tensors = [
        tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)) for _ in range(groups.layers_per_page)
    ]
    specs = {layer: group.spec for group in groups.attention for layer in group.layers}
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for sub_group in groups.sub_groups:
        for layer, (keys, values) in zip(sub_group, shared_tensors, strict=True):
            heads = specs[layer].kv_heads, specs[layer].head_dim
            caches[layer] = keys.unflatten(-1, heads), values.unflatten(-1, heads)
    if states is not None:
        caches |= {layer: states.layer(index) for index, layer in enumerate(groups.recurrent_layers)}
    return [caches[layer] for layer in sorted(caches)]


class PageTables:
    """The page tables of all sub-groups on the device, one after another.

    So a step's updates are written by one kernel. flat: [sub_groups * rows, pages of a sequence] int64.
    """

    def __init__(self, groups: KVCacheGroups, layers: int, config: ModelRunnerConfig, device: torch.device) -> None:
        """Allocate tables for a model of `layers` layers."""
        rows, columns = PageLayout.of(groups).table_rows(config.max_num_seqs), pages_for(config.max_model_len)
        self._tables = torch.zeros((len(groups.sub_groups), rows, columns), dtype=torch.int64, device=device)
        self.flat = self._tables.flatten(0, 1)
        self._sub_group_of_layer = [0] * layers  # of recurrent layers, which read no page table: any
        for index, sub_group in enumerate(groups.sub_groups):
            for layer in sub_group:
                self._sub_group_of_layer[layer] = index

    @property
    def sub_groups(self) -> int:
        """The number of sub-groups."""
        return len(self._tables)

    @property
    def rows(self) -> int:
        """The number of rows of a sub-group."""
        return self._tables.shape[1]

    def write(self, new: NewPages) -> None:
        """Write pages that were allocated to sequences."""
        if new.rows:
            rows, columns, pages = to_device_together(new, self.flat.device)
            self.flat[rows, columns] = pages

    def slot_mappings(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the cache slot of each token in each sub-group: [sub_groups, tokens] int64."""
        return self._tables[:, rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def layer_metadata(
        self, states: RecurrentStateCache | None, slot_mappings: torch.Tensor, num_windows: int, **fields: Any
    ) -> list[AttentionMetadata]:
        """Return each layer's metadata. `slot_mappings` is [sub_groups, tokens], and all layers share `fields`.

        `num_windows` counts the sequences that decode, which are windows for recurrent layers that can replay drafts.
        Without `state_slots` no recurrent layer runs.
        """
        if states is not None and states.has_windows and len(fields["state_slots"]):
            arrays = fields["state_slots"], fields["context_lens"], fields["query_start_loc"]
            fields |= {"num_windows": num_windows, "replay_lens": states.count_replays(*arrays, num_windows)}
        sub_group_metadata = [
            AttentionMetadata(page_table=table, slot_mapping=slots, **fields, shared={})
            for table, slots in zip(self._tables, slot_mappings, strict=True)
        ]
        return [sub_group_metadata[index] for index in self._sub_group_of_layer]


class RecurrentStateCache:
    """The states of all recurrent layers, the states of one slot next to each other, and the table of slots per row.

    conv: [slots + 1, layers, *ring_shape] in the model's type;
    states: [slots + 1, layers, heads, key_dim, value_dim] float32. Slot 0 is the null slot.

    With a `window` of more than one token (kernels/gated_delta/window.py), `folded` has the number of tokens in each
    slot's states: [slots + 1] int64. Tokens after these are in the ring, and some of them were rejected.
    """

    def __init__(
        self,
        spec: RecurrentStateSpec,
        layers: int,
        *,
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int = 1,
    ) -> None:
        self.has_windows = window > 1
        conv = (slots + 1, layers, *spec.ring_shape(window))
        states = (slots + 1, layers, spec.heads, spec.key_dim, spec.value_dim)
        # Zeros: inputs that a sequence at position 0 has not written yet are multiplied by zero.
        self.conv = torch.zeros(conv, dtype=dtype, device=device)
        self.states = torch.zeros(states, dtype=torch.float32, device=device)
        self.folded = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._slot_of_row = torch.zeros(rows, dtype=torch.int64, device=device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (conv_states, states) of a recurrent layer, [slots + 1, ...]. `index` counts recurrent layers."""
        return self.conv[:, index], self.states[:, index]

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the recurrent-state slots of `rows`, [rows] int64."""
        return self._slot_of_row[rows]

    def attention_inputs(
        self, batch: RecurrentBatch, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return slots, first_tokens and chunks of these rows, the attention metadata of recurrent layers."""
        slots, first_tokens = to_device_together([batch.slots, batch.first_tokens], rows.device)
        self.set_slots(rows, slots)
        return slots, first_tokens, to_device(batch.chunks, torch.int32, rows.device)

    def set_slots(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the slots of these rows, for steps that the host describes by rows alone."""
        self._slot_of_row[rows] = slots

    def count_replays(
        self, slots: torch.Tensor, context_lens: torch.Tensor, first_tokens: torch.Tensor, num_windows: int
    ) -> torch.Tensor:
        """Return the `replay_lens` of a step's windows, and set `folded` to what it will be after the step.

        All layers of the step read the result, so it is computed once, before the forward pass. Arguments are as in the
        attention metadata.
        """
        return count_replays(self.folded, slots, context_lens, first_tokens, num_windows)

    def restore_snapshots(self, batch: RecurrentBatch) -> None:
        """Copy snapshots to the slots of the sequences, before the step."""
        self._copy_slots(batch.restores)

    def take_snapshots(self, batch: RecurrentBatch) -> None:
        """Copy the slots of sequences to snapshots, after the step."""
        self._copy_slots(batch.snapshots)

    def _copy_slots(self, pairs: list[tuple[int, int]]) -> None:
        """Copy slots to slots, in stream order."""
        for source, target in pairs:
            self.conv[target].copy_(self.conv[source])
            self.states[target].copy_(self.states[source])
            if self.has_windows:
                self.folded[target].copy_(self.folded[source])
