"""Defines the metadata of a step, and the parameters of a layer, for the attention kernels."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

# Maximum number of queries in a tile: with two heads of a group packed, 128 rows of a matrix instruction.
BLOCK_QUERIES = 64


class PaddedGroup(NamedTuple):
    """Neighboring sequences [first, last) of a step, padded to one query length and one page count.

    Padding costs the reference implementation time. The engine sorts sequences so that padding costs less than a factor
    of two.
    """

    first: int
    last: int
    first_token: int
    last_token: int
    max_queries: int
    pages: int


class AttentionMetadata(NamedTuple):
    """The sequences of one step, for attention and recurrent layers. The queries of a sequence are neighbors.

    Args:
        page_table: [rows, max_pages] int64, the engine's persistent table.
        rows: [sequences] int64, each sequence's row.
        context_lens: [sequences] int64, the number of tokens before this step, which is the position of the first
            query. Padding has -1.
        slot_mapping: [tokens] int64, the cache slot of each token's key and value, page * page_size + offset. It is
            empty if all sequences decode on CUDA, because that kernel reads the page table itself.
        num_decodes: the number of sequences with a single query, which come first.
        query_tiles: [tiles, 4] int32 from `make_query_tiles`, for the prefill kernel: the tokens of the other
            sequences, counted from the first of these tokens.
        padded_index: [tokens] int64, for the reference: each token's index in the padded form of its group.
        padded_groups: for the reference: the groups of sequences that are padded together, in order.
        shared: results that layers with the same page table compute once per step and share. None shares nothing.
        state_slots: [sequences] int64, the slot of each sequence's recurrent state.
        query_start_loc: [sequences + 1] int64, the index of each sequence's first token, then the number of all tokens.
        chunk_indices: [chunks, 2] int32, the chunks of the sequences from `first_prompt` on (`make_chunk_indices`).
        num_windows: in an engine that speculates, the number of sequences that decode, which come first. Each has one
            query or more. Only recurrent layers need it.
        replay_lens: [num_windows] int64, how many of the tokens before each window its recurrent state does not hold.
        max_tile_queries: no query tile has more queries.

    `state_slots`, `query_start_loc` and `chunk_indices` are empty if a model has no recurrent layers. `query_start_loc`
    and `chunk_indices` are also empty if all sequences decode in a CUDA graph.
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    query_tiles: torch.Tensor
    padded_index: torch.Tensor
    padded_groups: list[PaddedGroup]
    state_slots: torch.Tensor
    query_start_loc: torch.Tensor
    chunk_indices: torch.Tensor
    shared: dict[Hashable, Any] | None = None
    num_windows: int = 0
    replay_lens: torch.Tensor | None = None
    max_tile_queries: int = BLOCK_QUERIES

    @property
    def first_prompt(self) -> int:
        """The index of the first sequence whose queries recurrent layers compute in chunks."""
        return max(self.num_decodes, self.num_windows)


class HeadNorms(NamedTuple):
    """The weights of RMS norms of single heads. query, key: [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class AttentionParams(NamedTuple):
    """The parameters of a layer's attention, the same at every step. Masks are causal.

    Args:
        norms: the norms of query and key heads. None means that heads are not normalized.
        rotary_table: [max_positions, head_dim] float32, see `rotary_table`.
        key_cache: [pages, page_size, kv_heads, head_dim], contiguous.
        value_cache: [pages, page_size, kv_heads, head_dim], contiguous.
        scale: factor of the scores.
        sliding_window: the number of newest keys that a query sees, including its own. None lets it see all keys.
    """

    norms: HeadNorms | None
    rotary_table: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    scale: float
    sliding_window: int | None = None

    def empty_output(self, qkv: torch.Tensor) -> torch.Tensor:
        """Allocate the output [tokens, heads, head_dim] for a `qkv` [tokens, (heads + 2 * kv_heads) * head_dim]."""
        kv_heads, head_dim = self.key_cache.shape[2:]
        return qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)

    def max_query_pages(self, max_pages: int) -> int:
        """Return the maximum number of pages with keys of one query, if a sequence has at most `max_pages`."""
        if self.sliding_window is None:
            return max_pages
        page_size = self.key_cache.shape[1]
        return min(max_pages, -(-(self.sliding_window - 1) // page_size) + 1)  # the oldest key may end its page


def make_query_tiles(chunks: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
    """Cut chunks of prompts into tiles of at most BLOCK_QUERIES tokens.

    A chunk is (row in the page table, index of the first token, number of tokens, position of the first token). Returns
    [tiles, 4] int32 with these four numbers of each tile, in the order of `longest_first`.
    """
    table = np.array(list(chunks), dtype=np.int32).reshape(-1, 4)
    tile_counts = -(-table[:, 2] // BLOCK_QUERIES)
    if (tile_counts == 1).all():  # windows of drafts, for which the device waits
        return longest_first(table)
    tiles = table.repeat(tile_counts, axis=0)
    chunk_offset = (np.arange(len(tiles)) - (tile_counts.cumsum() - tile_counts).repeat(tile_counts)).astype(
        np.int32
    ) * BLOCK_QUERIES
    tiles[:, 1] += chunk_offset
    tiles[:, 2] = np.minimum(tiles[:, 2] - chunk_offset, BLOCK_QUERIES)
    tiles[:, 3] += chunk_offset
    return longest_first(tiles)


def longest_first(tiles: np.ndarray) -> np.ndarray:
    """Sort tiles [tiles, 4], those with most keys first.

    The device starts tiles in this order, and short tiles fill the gaps at the end.
    """
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")]


def require_layout(qkv: torch.Tensor, params: AttentionParams, page_table: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError for layouts that the kernels do not support. Rows of `qkv` may be part of wider rows."""
    if params.sliding_window is not None and params.sliding_window < 1:
        raise ValueError(f"a sliding window of {params.sliding_window}; a query sees at least 1 key, its own")
    if not (params.key_cache.is_contiguous() and params.value_cache.is_contiguous() and out.is_contiguous()):
        raise ValueError("caches and output must be contiguous")
    if qkv.shape[0] and not qkv[0].is_contiguous():
        raise ValueError("a token's heads must be contiguous")
    if page_table.stride(1) != 1:
        raise ValueError("a sequence's page numbers must be contiguous")
