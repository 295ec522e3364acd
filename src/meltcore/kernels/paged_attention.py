"""Attention over a paged key-value cache: writing new tokens into it, and attending to it.

A cache is [pages, page_size, kv_heads, head_dim]; a page table maps a sequence's page index to a page of the cache.
"""

from typing import NamedTuple

import torch

from meltcore.kernels.attention import decode_attention, prefill_attention
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.qkv import HeadNorms, store_kv, turned_queries


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
    """The sequences of one step, as attention and recurrent layers see them. The queries of a segment are neighbours.

    page_table: [rows, max_pages] int64, the engine's table; rows: [segments] int64, which row each segment has;
    starts: [segments] int64, position of the first query;
    slots: [tokens] int64, where each token's key and value go (page * page_size + offset), empty where all decode on
    CUDA, whose kernel finds its own;
    decodes: how many segments, the first ones, have a single query.

    For the Triton body, tiles: [tiles, 4] int32, the queries of the other segments (see `query_tiles`), counted from
    the first of them.
    For the torch body, places: [tokens] int64, where each token sits in the padded form of its group;
    groups: how segments are padded together, covering all of them in order.

    For recurrent layers, all empty where a model has none; the last two also where all decode in a graph.
    state_slots: [segments] int64, which slot holds each segment's state; first_tokens: [segments + 1] int64, index of
    each segment's first token, at last the number of tokens; chunks: [chunks, 2] int32, the pieces of the segments
    that are longer than one token (see `delta_chunks`).
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    decodes: int
    tiles: torch.Tensor
    places: torch.Tensor
    groups: list[SegmentGroup]
    state_slots: torch.Tensor
    first_tokens: torch.Tensor
    chunks: torch.Tensor


def paged_attention(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    segments: Segments,
    scale: float,
) -> torch.Tensor:
    """Store the new tokens' keys and values, and attend causally to each token's own sequence, itself included.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], heads a multiple of kv_heads (grouped-query attention); norms,
    rotary_table, positions and the caches: see `store_kv`. Returns [tokens, heads, head_dim].
    """
    body = _paged_attention_triton if use_triton(qkv) else _paged_attention_torch
    return body(qkv, norms, rotary_table, positions, key_cache, value_cache, segments, scale)


def _paged_attention_triton(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    segments: Segments,
    scale: float,
) -> torch.Tensor:
    """Single tokens and longer chunks have kernels of their own; both write their part of one output."""
    (tokens, width), (kv_heads, head_dim) = qkv.shape, key_cache.shape[2:]
    output = qkv.new_empty(tokens, width // head_dim - 2 * kv_heads, head_dim)
    decodes, page_table = segments.decodes, segments.page_table
    if decodes:
        decode_attention(
            qkv[:decodes],
            norms,
            rotary_table,
            segments.starts[:decodes],
            key_cache,
            value_cache,
            page_table,
            segments.rows[:decodes],
            scale,
            out=output[:decodes],
        )
    if decodes < tokens:
        rest = qkv[decodes:]
        slots = segments.slots[decodes:]
        store_kv(rest, norms, rotary_table, positions[decodes:], slots, key_cache, value_cache)
        prefill_attention(
            rest,
            norms,
            rotary_table,
            key_cache,
            value_cache,
            page_table,
            segments.tiles,
            scale,
            out=output[decodes:],
        )
    return output


def _paged_attention_torch(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    segments: Segments,
    scale: float,
) -> torch.Tensor:
    store_kv(qkv, norms, rotary_table, positions, segments.slots, key_cache, value_cache)
    queries = turned_queries(qkv, norms, rotary_table, positions, key_cache.shape[2])
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
    shape = (segments, pages * page_size, kv_heads, head_dim)
    keys = key_cache[page_table].view(shape).transpose(1, 2).to(queries.dtype)
    values = value_cache[page_table].view(shape).transpose(1, 2).to(queries.dtype)

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
