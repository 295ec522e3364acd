"""Attention over a paged key-value cache: writing new tokens into it, and attending to it.

A cache is [pages, page_size, kv_heads, head_dim]; a page table maps a sequence's page index to a page of the cache.
"""

from typing import NamedTuple

import torch

from meltcore.kernels.attention import decode_attention, prefill_attention
from meltcore.kernels.dispatch import use_triton


class SegmentGroup(NamedTuple):
    """Neighbouring segments [first, last) of a batch, padded to one query length and one page count.

    Padding is the cost of a plain torch body; the planner sorts segments so that it stays below a factor of two.
    """

    first: int
    last: int
    first_token: int
    last_token: int
    max_queries: int
    pages: int


class Segments(NamedTuple):
    """The sequences of one step, as the attention sees them. The queries of a segment are neighbours.

    page_table: [rows, max_pages] int64, the engine's table; rows: [segments] int64, which row each segment has;
    starts: [segments] int64, position of the first query; lengths: [segments] int64, keys a single query sees;
    slots: [tokens] int64, where each token's key and value go (page * page_size + offset);
    decodes: how many segments, the first ones, have a single query.

    For the Triton body, tiles: [tiles, 4] int32, the queries of the other segments (see `query_tiles`).
    For the torch body, places: [tokens] int64, where each token sits in the padded form of its group;
    groups: how segments are padded together, covering all of them in order.
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    decodes: int
    tiles: torch.Tensor
    places: torch.Tensor
    groups: list[SegmentGroup]


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store the new tokens' keys and values: [tokens, kv_heads, head_dim] into the caches at `slots` [tokens]."""
    key_cache.flatten(0, 1).index_copy_(0, slots, keys)
    value_cache.flatten(0, 1).index_copy_(0, slots, values)


def paged_attention(
    queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Causal attention of every query to its own sequence's keys, itself included.

    queries: [tokens, heads, head_dim]; heads is a multiple of kv_heads (grouped-query attention).
    The tokens' own keys and values are in the cache already. Returns [tokens, heads, head_dim].
    """
    if use_triton(queries):
        return _paged_attention_triton(queries, key_cache, value_cache, segments, scale)
    return _paged_attention_torch(queries, key_cache, value_cache, segments, scale)


def _paged_attention_triton(
    queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Single queries and longer chunks have a kernel each; both write their part of one output."""
    output = torch.empty_like(queries)
    decodes = segments.decodes
    if decodes:
        decode_attention(
            queries[:decodes],
            key_cache,
            value_cache,
            segments.page_table,
            segments.rows[:decodes],
            segments.lengths[:decodes],
            scale,
            out=output[:decodes],
        )
    if decodes < queries.shape[0]:
        prefill_attention(queries, key_cache, value_cache, segments.page_table, segments.tiles, scale, out=output)
    return output


def _paged_attention_torch(
    queries: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    output = torch.empty_like(queries)
    for group in segments.groups:
        rows = slice(group.first, group.last)
        tokens = slice(group.first_token, group.last_token)
        output[tokens] = _attend_group(
            queries[tokens],
            key_cache,
            value_cache,
            segments.page_table[segments.rows[rows], : group.pages],
            segments.starts[rows],
            segments.places[tokens],
            group.max_queries,
            scale,
        )
    return output


def causal_mask(starts: torch.Tensor, max_queries: int, keys: int) -> torch.Tensor:
    """Which keys each query may see: [segments, max_queries, keys] bool; query i of a segment sits at start + i."""
    query_positions = starts[:, None] + torch.arange(max_queries, device=starts.device)
    return torch.arange(keys, device=starts.device) <= query_positions[:, :, None]


def _attend_group(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor,
    max_queries: int,
    scale: float,
) -> torch.Tensor:
    """One padded group. The query heads that share a key head are laid beside each other as extra query rows."""
    segments, pages = page_table.shape
    _, page_size, kv_heads, head_dim = key_cache.shape
    heads = queries.shape[1]
    shared = heads // kv_heads
    keys = key_cache[page_table].view(segments, pages * page_size, kv_heads, head_dim).transpose(1, 2)
    values = value_cache[page_table].view(segments, pages * page_size, kv_heads, head_dim).transpose(1, 2)

    uniform = queries.shape[0] == segments * max_queries
    if uniform:
        padded = queries.view(segments, max_queries, heads, head_dim)
    else:
        padded = queries.new_zeros(segments * max_queries, heads, head_dim).index_copy_(0, places, queries)
        padded = padded.view(segments, max_queries, heads, head_dim)
    # [segments, queries, kv_heads, shared, dim] -> [segments, kv_heads, shared * queries, dim]
    packed = padded.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = causal_mask(starts, max_queries, pages * page_size)[:, None].repeat(1, 1, shared, 1)
    mixed = torch.nn.functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    mixed = mixed.unflatten(2, (shared, max_queries)).permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)
    return mixed if uniform else mixed[places]
