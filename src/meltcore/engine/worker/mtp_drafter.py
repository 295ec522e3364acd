"""Drafts tokens with a model's layer for multi-token prediction (MTP).

The layer runs on the tokens of every step that is no decode graph: so its cache has the prompts too. Then it runs on
single tokens, once for each further draft, and writes its cache at positions that later steps write again. A decode
graph leaves a gap in the cache, which makes later drafts worse and no answer wrong.

A step of windows alone replays a graph, and its drafting replays another one after the sampler. Launched kernel by
kernel, drafting costs the host 2 to 3 ms.

Every rank has a shard of the layer, so every rank drafts. Ranks have equal inputs, sampled tokens and tables, so they
accept and draft the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from meltcore.engine.core.batch import Batch, MtpInputs
from meltcore.engine.core.kv_cache import PAGE_SIZE, pages_for
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.cuda_graphs import PADDING_POSITION, PADDING_ROW
from meltcore.engine.worker.drafter import Drafter
from meltcore.engine.worker.prefill_graphs import GraphBucket, PaddedInputs, padded_indices
from meltcore.engine.worker.transfer import to_device_together
from meltcore.kernels.attention.metadata import AttentionMetadata, PaddedGroup
from meltcore.kernels.memory_pools import memory_pool
from meltcore.kernels.sampling.drafts import start_lengths
from meltcore.models.decoders.model import MtpModel
from meltcore.settings.speculation import SpeculativeConfig


class StepStates(NamedTuple):
    """What the layer needs of a step, if it is launched kernel by kernel.

    Args:
        hidden: [tokens, hidden_size], the model's hidden states, perhaps with padding between and after the tokens.
        positions: [tokens] int64.
        metadata: the layer's metadata in this step.
        last_tokens: the batch's `last_tokens`.
        indices: the index in `hidden` of each token of the batch. None is for a step without padding.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    last_tokens: list[int]
    indices: np.ndarray | None = None


class _Windows(NamedTuple):
    """The sequences of a step that get drafts: the fields of `MtpInputs` on the device. Padding has row 0."""

    rows: torch.Tensor
    first_rows: torch.Tensor
    max_drafts: torch.Tensor
    num_pages: torch.Tensor


class MtpDrafter(Drafter):
    """Accepts the drafts of a step, and drafts the next tokens with the layer."""

    def __init__(
        self,
        config: SpeculativeConfig,
        sizes: ModelRunnerConfig,
        seed: int,
        last_tokens: torch.Tensor,
        model: MtpModel,
        cache: tuple[torch.Tensor, torch.Tensor],
        argmax: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Allocate tables for each row of a model runner of these sizes.

        `cache` has the layer's keys and values. `argmax` returns the argmax of each row of the model's logits.
        """
        super().__init__(config, last_tokens, 0, seed)  # nothing is looked up
        self._model, self._cache, self._argmax, self._max_model_len = model, cache, argmax, sizes.max_model_len
        # Of the newest step: its states, or a function that replays the graph of its drafting.
        self.states: StepStates | Callable[[torch.Tensor], torch.Tensor] | None = None
        self.graph_hidden = torch.empty(0)  # [tokens, hidden_size] that the graphs of steps write

    def keep_hidden_states(self, max_tokens: int) -> None:
        """Let padded steps of up to `max_tokens` keep the hidden states of all tokens.

        All graphs write to the same memory, which takes gigabytes otherwise.
        """
        shape = max_tokens, self._model.config.hidden_size
        with memory_pool("kv_cache"):
            self.graph_hidden = torch.empty(shape, dtype=self._model.dtype, device=self._device)

    def read_padded(self, inputs: PaddedInputs, bucket: GraphBucket, batch: Batch, metadata: AttentionMetadata) -> None:
        """Let `propose` read the states of a batch that was padded to `bucket`, and is not followed by a graph."""
        indices = padded_indices(range(len(batch.token_ids)), batch, bucket)
        hidden = self.graph_hidden[: bucket.size]
        self.states = StepStates(hidden, inputs.positions, metadata, batch.last_tokens, indices)

    def propose(self, inputs: MtpInputs, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Run the layer on all tokens of the newest step, accept the step's drafts, and draft the next tokens.

        `token_ids` [rows] are the tokens that the step has sampled: each follows a token of the step. Returns the
        outcomes, as in `NgramDrafter`, or None if the step proposes no drafts.
        """
        states, self.states = self.states, None
        assert states is not None, "the step has hidden states"
        if inputs.started_rows:
            start_lengths(
                self._tables, *to_device_together([inputs.started_rows, inputs.started_lengths], self._device)
            )
        if not isinstance(states, StepStates):
            return states(token_ids)
        indices = np.arange(len(inputs.next_ids)) if states.indices is None else states.indices
        ids = np.zeros(len(states.hidden), dtype=np.int64)
        ids[indices] = inputs.next_ids
        next_ids, last_tokens, *windows = to_device_together(
            [ids, indices[states.last_tokens], *inputs[1:5]], self._device
        )
        next_ids[last_tokens] = self._valid_ids(token_ids)
        hidden = self._model.draft_hidden(next_ids, states.hidden, states.positions, self._cache, states.metadata)
        if not inputs.rows:
            return None
        pages = max(inputs.num_pages) + pages_for(self.max_drafts)
        return self._propose(
            hidden, states.positions, states.metadata, last_tokens, token_ids, _Windows(*windows), pages
        )

    def propose_padded(
        self, inputs: PaddedInputs, bucket: GraphBucket, metadata: AttentionMetadata, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute `propose` from a padded step of windows alone, reading nothing from the host, as for a graph.

        Every token of such a step is sampled. Returns the outcomes [windows, 2 + drafts] int64, zeros and -1 for
        padding.
        """
        hidden, positions = self.graph_hidden[: bucket.size], inputs.positions
        windows = _Windows(inputs.rows[: bucket.windows], inputs.first_samples, inputs.max_drafts, inputs.num_pages)
        next_ids = self._valid_ids(token_ids)
        hidden = self._model.draft_hidden(next_ids, hidden, positions, self._cache, metadata)
        return self._propose(hidden, positions, metadata, inputs.last_tokens, token_ids, windows, None)

    @torch.inference_mode()
    def warm_up(self, counts: Sequence[int]) -> None:
        """Launch the drafting of padding for these numbers of sequences, and for each number up to 8.

        No padding makes their attention one of these numbers, as it does in decode graphs.
        """
        for count in sorted({*counts, *range(1, min(8, max(counts, default=0)) + 1)}):
            positions = torch.zeros(count, dtype=torch.int64, device=self._device)
            page_table = positions.new_zeros(count, pages_for(self._max_model_len))
            hidden = torch.zeros(count, self._model.config.hidden_size, dtype=self._model.dtype, device=self._device)
            self._draft(hidden, positions, page_table, 1)

    def _valid_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return ids that an embedding can look up: kernels that `rehearse` skips leave any numbers."""
        return token_ids.clamp(0, self._model.config.vocab_size - 1)

    def _propose(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        last_tokens: torch.Tensor,
        token_ids: torch.Tensor,
        windows: _Windows,
        pages: int | None,
    ) -> torch.Tensor:
        """Accept the drafts of windows, and draft the next tokens after the layer's states `hidden` of a step."""
        rows, first_rows, max_drafts, num_pages = windows
        outcomes = self._accept(rows, first_rows, token_ids, max_drafts, None)
        last_rows = (first_rows[:-1] + outcomes[:, 0] - 1).clamp(0, len(last_tokens) - 1)
        tokens = last_tokens[last_rows]
        positions = positions[tokens]
        if pages is None:
            positions.masked_fill_(rows == PADDING_ROW, PADDING_POSITION)
        drafts = self._draft(hidden[tokens], positions, _own_pages(metadata.page_table[rows], num_pages), pages)
        num_drafts = torch.minimum(max_drafts, self._max_model_len - self._tables.lengths[rows]).clamp(min=0)
        drafts.masked_fill_(torch.arange(self.max_drafts, device=self._device) >= num_drafts[:, None], -1)
        self._tables.num_drafts[rows] = outcomes[:, 1] = num_drafts
        self._tables.drafts[rows] = outcomes[:, 2:] = drafts
        return outcomes

    def _draft(
        self, hidden: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, pages: int | None
    ) -> torch.Tensor:
        """Return the drafts that follow the layer's states `hidden` at `positions`, [requests, drafts] int64.

        `pages` is an upper bound of the pages that a sequence has then. None leaves the reference out, as in graphs,
        and then padding has position -1.
        """
        drafts = [self._valid_ids(self._argmax(self._model.logits(hidden)))]
        while len(drafts) < self.max_drafts:
            # Padding stays where it is.
            positions = (positions + (positions != PADDING_POSITION)).clamp(max=self._max_model_len - 1)
            metadata = _single_tokens(positions, page_table, pages)
            hidden = self._model.draft_hidden(drafts[-1], hidden, positions, self._cache, metadata)
            drafts.append(self._valid_ids(self._argmax(self._model.logits(hidden))))
        return torch.stack(drafts, dim=1)


def _own_pages(page_table: torch.Tensor, num_pages: torch.Tensor) -> torch.Tensor:
    """Return the pages of sequences, [sequences, max_pages] int64, with the null page for all that they lack.

    Drafts may lie after the last page of a sequence, where its row has the pages of an earlier sequence.
    """
    return page_table * (torch.arange(page_table.shape[1], device=page_table.device) < num_pages[:, None])


def _single_tokens(positions: torch.Tensor, page_table: torch.Tensor, pages: int | None) -> AttentionMetadata:
    """Return the metadata of a step of one token per sequence. page_table: [sequences, max_pages] int64.

    The kernels find slots and lengths on the device. The reference needs `pages`, see `MtpDrafter._draft`.
    """
    num_seqs, slots, groups = len(page_table), positions.new_empty(0), []
    rows, empty = torch.arange(num_seqs, device=positions.device), positions.new_empty(0)
    if pages is not None:
        slots = page_table[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        groups = [PaddedGroup(0, num_seqs, 0, num_seqs, 1, min(pages, page_table.shape[1]))]
    return AttentionMetadata(
        page_table=page_table,
        rows=rows,
        context_lens=positions,
        slot_mapping=slots,
        num_decodes=num_seqs,
        query_tiles=empty.to(torch.int32),
        padded_index=rows,
        padded_groups=groups,
        state_slots=empty,
        query_start_loc=empty,
        chunk_indices=empty,
    )
