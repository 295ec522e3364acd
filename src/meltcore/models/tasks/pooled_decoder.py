"""A decoder that embeds texts or scores pairs of texts with the hidden states of their last tokens.

The decoder's layers compute all inputs of a batch in one causal step over a paged cache. The cache is memory of the
step alone: every layer writes its keys and values over the values of the layer before it, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from meltcore.kernels.attention.metadata import AttentionMetadata, PaddedGroup, make_query_tiles
from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.tasks.pooled_decoder_config import GROUP_QUERIES, PAGE_SIZE, PooledDecoderConfig
from meltcore.models.tasks.pooling_model import PoolingModel

_UNUSED_HEAD = "unused.lm_head.weight"


class PooledDecoder(PoolingModel):
    """A decoder with pooling of the last token. Weights must be loaded and `prepare` called before it is used."""

    config: PooledDecoderConfig

    def __init__(self, config: PooledDecoderConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config, self.decoder = config, decoder
        head = nn.Linear(config.hidden_size, 1, bias=False, device=decoder.device, dtype=decoder.dtype)
        self.score = head if config.has_score_head else None

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.decoder.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.decoder.device

    def prepare(self) -> None:
        """Build the rotary table and turn gradients off."""
        super().prepare()
        self.decoder.prepare(self.config.most_tokens)
        self._answers = torch.tensor(self.config.answer_ids or (), dtype=torch.int64, device=self.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        second_starts: torch.Tensor,  # noqa: ARG002 - the model has no token types
        row_lens: Sequence[int],
    ) -> torch.Tensor:
        """See `PoolingModel.forward`."""
        device, decoder, config = self.device, self.decoder, self.config.decoder
        pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
        ends, first_pages = lengths.cumsum(0), pages.cumsum(0) - pages
        rows = torch.repeat_interleave(lengths, output_size=len(token_ids))
        positions = torch.arange(len(token_ids), device=device) - (ends - lengths)[rows]
        num_pages = sum(-(-length // PAGE_SIZE) for length in row_lens)
        page_table = first_pages[:, None] + torch.arange(-(-max(row_lens) // PAGE_SIZE), device=device)
        # Zeros, because the reference multiplies the unused slots of a page by 0.
        shape = num_pages, PAGE_SIZE, config.num_key_value_heads, config.head_dim
        cache = torch.zeros(shape, dtype=self.dtype, device=device), torch.zeros(shape, dtype=self.dtype, device=device)
        groups = _padded_groups(row_lens)
        empty = torch.empty(0, dtype=torch.int64, device=device)
        metadata = AttentionMetadata(
            page_table=page_table.clamp_(max=num_pages - 1),
            rows=_to_device(torch.tensor(groups.rows), device),
            context_lens=_to_device(torch.tensor(groups.context_lens), device),
            slot_mapping=first_pages[rows] * PAGE_SIZE + positions,
            num_decodes=0,
            query_tiles=_to_device(_query_tiles(row_lens), device),
            padded_index=empty,
            padded_groups=groups.groups,
            state_slots=empty,
            query_start_loc=empty,
            chunk_indices=empty,
        )
        num_layers = config.num_hidden_layers
        hidden = decoder(token_ids, positions, [cache] * num_layers, [metadata] * num_layers)[ends - 1].float()
        if self.config.is_reranker:
            no, yes = decoder.head_rows(self._answers).float() if self.score is None else (0, self.score.weight[0])
            scores: torch.Tensor = hidden @ (yes - no).float()
            return scores[:, None]
        return functional.normalize(hidden, dim=-1) if self.config.is_normalized else hidden

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor of a published checkpoint, by the tensor's name."""
        head = {} if self.score is None else {"score.weight": self.score.weight.data}
        return self.decoder.checkpoint_tensors() | head

    def fused_tensors(self) -> dict[str, Any]:
        """Return the checkpoint tensors that merge several of `checkpoint_tensors`, by name."""
        return self.decoder.fused_tensors()

    def canonical_name(self, name: str) -> str:
        """Return the name of a tensor. An embedding model's output head has another one, so that it is not read."""
        is_unused = name == "lm_head.weight" and not self.config.is_reranker
        return _UNUSED_HEAD if is_unused else self.decoder.canonical_name(name)

    def ignored_tensor(self, name: str) -> bool:
        """Return whether a tensor is an output head that is not read."""
        return name == _UNUSED_HEAD or self.decoder.ignored_tensor(name)


class _Groups(NamedTuple):
    """The rows of a batch for the reference attention, cut into sequences of at most GROUP_QUERIES queries.

    `rows` and `context_lens` have the row of each sequence, and the number of the row's tokens before the sequence.
    """

    groups: list[PaddedGroup]
    rows: list[int]
    context_lens: list[int]


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values from the host, without a wait for the step that a GPU computes."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _query_tiles(row_lens: Sequence[int]) -> torch.Tensor:
    """Return the tiles of queries for the prefill kernel: [tiles, 4] int32."""
    rows = enumerate(zip(accumulate(row_lens, initial=0), row_lens, strict=False))
    return torch.from_numpy(make_query_tiles((row, first_token, length, 0) for row, (first_token, length) in rows))


def _padded_groups(row_lens: Sequence[int]) -> _Groups:
    """Return groups without padding. Neighboring rows of equal lengths share groups of up to GROUP_QUERIES queries."""
    found = _Groups([], [], [])
    row = token = 0
    for length, run in groupby(row_lens):
        end_row = row + len(list(run))
        while row < end_row:
            count = min(end_row - row, max(1, GROUP_QUERIES // length))
            for start in range(0, length, GROUP_QUERIES):
                queries = min(GROUP_QUERIES, length - start)
                first, first_token = len(found.rows), token
                found.rows.extend(range(row, row + count))
                found.context_lens.extend([start] * count)
                token += count * queries
                pages = -(-(start + queries) // PAGE_SIZE)
                found.groups.append(PaddedGroup(first, first + count, first_token, token, queries, pages))
            row += count
    return found
