"""Drafts tokens with a model's layer for multi-token prediction (MTP).

The layer runs on the tokens of every step that is no decode graph: so its cache has the prompts too. Then it runs on
single tokens, once for each further draft, and writes its cache at positions that later steps write again. A decode
graph leaves a gap in the cache, which makes later drafts worse and no answer wrong.

Every rank has a shard of the layer, so every rank drafts. Ranks have equal inputs, sampled tokens and tables, so they
accept and draft the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from meltcore.engine.core.batch import Batch, MtpInputs
from meltcore.engine.core.kv_cache import PAGE_SIZE, pages_for
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.drafter import Drafter
from meltcore.engine.worker.transfer import to_device, to_device_together
from meltcore.kernels.attention.metadata import AttentionMetadata, PaddedGroup
from meltcore.kernels.sampling.drafts import start_lengths
from meltcore.models.decoders.model import MtpModel
from meltcore.settings.speculation import SpeculativeConfig


class StepStates(NamedTuple):
    """What the layer needs of a step.

    Args:
        hidden: [tokens, hidden_size], the model's hidden states.
        positions: [tokens] int64.
        batch: the step.
        metadata: the layer's metadata in this step.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    batch: Batch
    metadata: AttentionMetadata


class MtpDrafter(Drafter):
    """Accepts the drafts of a step, and drafts the next tokens with the layer."""

    def __init__(
        self,
        config: SpeculativeConfig,
        sizes: ModelRunnerConfig,
        seed: int,
        model: MtpModel,
        cache: tuple[torch.Tensor, torch.Tensor],
        argmax: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Allocate tables for each row of a model runner of these sizes.

        `cache` has the layer's keys and values. `argmax` returns the argmax of each row of the model's logits.
        """
        super().__init__(config, sizes.max_num_seqs + 1, 0, seed, model.device)  # nothing is looked up
        self._model, self._cache, self._argmax, self._max_model_len = model, cache, argmax, sizes.max_model_len
        self.states: StepStates | None = None  # of the newest step

    def propose(self, inputs: MtpInputs, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Run the layer on all tokens of the newest step, accept the step's drafts, and draft the next tokens.

        `token_ids` [rows] are the tokens that the step has sampled: each follows a token of the step. Returns the
        outcomes, as in `NgramDrafter`, or None if the step proposes no drafts.
        """
        states, self.states = self.states, None
        assert states is not None, "the step has hidden states"
        next_ids, last_tokens = to_device_together([inputs.next_ids, states.batch.last_tokens], self._device)
        next_ids[last_tokens] = self._valid_ids(token_ids)
        hidden = self._model.draft_hidden(next_ids, states.hidden, states.positions, self._cache, states.metadata)
        if not inputs.rows:
            return None
        rows, first_rows, max_drafts, num_pages, started_rows, started_lengths = to_device_together(
            inputs[1:], self._device
        )
        if inputs.started_rows:
            start_lengths(self._tables, started_rows, started_lengths)
        outcomes = self._accept(rows, first_rows, token_ids, max_drafts, None)
        last_rows = (first_rows[:-1] + outcomes[:, 0] - 1).clamp(0, len(last_tokens) - 1)
        tokens = last_tokens[last_rows]
        page_table = _own_pages(states.metadata.page_table[rows], num_pages)
        pages = min(page_table.shape[1], max(inputs.num_pages) + pages_for(self.max_drafts))
        drafts = self._draft(hidden[tokens], states.positions[tokens], page_table, pages)
        num_drafts = torch.minimum(max_drafts, self._max_model_len - self._tables.lengths[rows]).clamp(min=0)
        drafts.masked_fill_(torch.arange(self.max_drafts, device=self._device) >= num_drafts[:, None], -1)
        self._tables.num_drafts[rows] = outcomes[:, 1] = num_drafts
        self._tables.drafts[rows] = outcomes[:, 2:] = drafts
        return outcomes

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

    def _draft(
        self, hidden: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, pages: int
    ) -> torch.Tensor:
        """Return the drafts that follow the layer's states `hidden` at `positions`, [requests, drafts] int64.

        `pages` is an upper bound of the pages that a sequence has then.
        """
        drafts = [self._valid_ids(self._argmax(self._model.logits(hidden)))]
        while len(drafts) < self.max_drafts:
            positions = (positions + 1).clamp(max=self._max_model_len - 1)
            metadata = _single_tokens(positions, page_table, pages)
            hidden = self._model.draft_hidden(drafts[-1], hidden, positions, self._cache, metadata)
            drafts.append(self._valid_ids(self._argmax(self._model.logits(hidden))))
        return torch.stack(drafts, dim=1)


def _own_pages(page_table: torch.Tensor, num_pages: torch.Tensor) -> torch.Tensor:
    """Return the pages of sequences, [sequences, max_pages] int64, with the null page for all that they lack.

    Drafts may lie after the last page of a sequence, where its row has the pages of an earlier sequence.
    """
    return page_table * (torch.arange(page_table.shape[1], device=page_table.device) < num_pages[:, None])


def _single_tokens(positions: torch.Tensor, page_table: torch.Tensor, pages: int) -> AttentionMetadata:
    """Return the metadata of a step of one token per sequence. page_table: [sequences, max_pages] int64."""
    num_seqs, empty = len(page_table), positions.new_empty(0)
    rows = torch.arange(num_seqs, device=positions.device)
    return AttentionMetadata(
        page_table=page_table,
        rows=rows,
        context_lens=positions,
        slot_mapping=page_table[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        num_decodes=num_seqs,
        query_tiles=to_device([], torch.int32, positions.device),
        padded_index=rows,
        padded_groups=[PaddedGroup(0, num_seqs, 0, num_seqs, 1, pages)],
        state_slots=empty,
        query_start_loc=empty,
        chunk_indices=empty,
    )
