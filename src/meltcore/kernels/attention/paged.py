"""Computes the attention of a step's tokens over a paged cache. It first stores the keys and values of the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.attention.decode import decode_attention
from meltcore.kernels.attention.kv_cache import rotated_queries, store_kv, store_kv_reference
from meltcore.kernels.attention.metadata import AttentionMetadata, AttentionParams, PaddedGroup
from meltcore.kernels.attention.prefill import prefill_attention
from meltcore.kernels.launch import use_triton


def paged_attention(
    qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    """Store the new tokens' keys and values, and attend causally to each token's sequence, including the token itself.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], heads a multiple of kv_heads (grouped-query attention).
        params: the parameters of the layer.
        positions: [tokens] int64.
        metadata: the sequences of the step.

    Returns [tokens, heads, head_dim].
    """
    if not use_triton(qkv):
        return _paged_attention_reference(qkv, params, positions, metadata)
    # Single tokens and longer chunks have kernels of their own; both write their part of one output.
    output = params.empty_output(qkv)
    tokens, num_decodes, page_table = qkv.shape[0], metadata.num_decodes, metadata.page_table
    if num_decodes:
        context_lens, rows = metadata.context_lens[:num_decodes], metadata.rows[:num_decodes]
        decode_attention(qkv[:num_decodes], params, context_lens, page_table, rows, out=output[:num_decodes])
    if num_decodes < tokens:
        prompts = qkv[num_decodes:]
        store_kv(prompts, params, positions[num_decodes:], metadata.slot_mapping[num_decodes:])
        prefill_attention(
            *(prompts, params, page_table, metadata.query_tiles),
            out=output[num_decodes:],
            max_queries=metadata.max_tile_queries,
        )
    return output


def _paged_attention_reference(
    qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    store_kv_reference(qkv, params, positions, metadata.slot_mapping)
    queries = rotated_queries(qkv, params, positions)
    output = torch.empty_like(queries)
    for group in metadata.padded_groups:
        tokens = slice(group.first_token, group.last_token)
        output[tokens] = _attend_group(queries[tokens], params, metadata, group)
    return output


def causal_mask(
    context_lens: torch.Tensor, max_queries: int, keys: int, sliding_window: int | None = None
) -> torch.Tensor:
    """Return which keys each query sees: [sequences, max_queries, keys] bool. Query i is at context_len + i."""
    query_positions = (context_lens[:, None] + torch.arange(max_queries, device=context_lens.device))[:, :, None]
    key_positions = torch.arange(keys, device=context_lens.device)
    mask = key_positions <= query_positions
    return mask if sliding_window is None else mask & (key_positions > query_positions - sliding_window)


class _GroupKeys(NamedTuple):
    """The pages of a padded group's keys, and a mask of the keys that each query sees.

    `pages` is a slice of neighboring pages, which needs no copy, or page numbers [sequences, pages]. `bias` is 0 for a
    key that a query sees, else minus infinity. It is [sequences, 1, rows, keys], with rows as in `_attend_group`. If
    each sequence has one query, `bias` has one row for all heads of a token.
    """

    pages: slice | torch.Tensor
    bias: torch.Tensor


def _attend_group(
    queries: torch.Tensor, params: AttentionParams, metadata: AttentionMetadata, group: PaddedGroup
) -> torch.Tensor:
    """Compute the attention of one padded group. The query heads that share a key head become extra query rows."""
    sequences, max_queries = group.last - group.first, group.max_queries
    padded_index = metadata.padded_index[group.first_token : group.last_token]
    (num_queries, heads, head_dim), (_, page_size, kv_heads, _) = queries.shape, params.key_cache.shape
    group_size, (pages, bias) = heads // kv_heads, _group_keys(params, metadata, group, heads // kv_heads)
    keys, values = (
        cache[pages].view(sequences, group.pages * page_size, kv_heads, head_dim).transpose(1, 2).to(queries.dtype)
        for cache in (params.key_cache, params.value_cache)
    )
    is_unpadded = num_queries == sequences * max_queries
    if not is_unpadded:
        queries = queries.new_zeros(sequences * max_queries, heads, head_dim).index_copy_(0, padded_index, queries)
    padded_queries = queries.view(sequences, max_queries, kv_heads, group_size, head_dim)
    # [sequences, queries, kv_heads, group, dim] -> [sequences, kv_heads, group * queries, dim]
    packed_queries = padded_queries.permute(0, 2, 3, 1, 4).flatten(2, 3)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    output: torch.Tensor = sdpa(packed_queries, keys, values, attn_mask=bias, scale=params.scale)
    output = output.unflatten(2, (group_size, max_queries)).permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)
    return output if is_unpadded else output[padded_index]


def _group_keys(
    params: AttentionParams, metadata: AttentionMetadata, group: PaddedGroup, group_size: int
) -> _GroupKeys:
    """Return the keys of a padded group. Layers of a step with the same window and heads share the result."""
    key = group, params.sliding_window, group_size, params.key_cache.shape[1]
    group_keys = None if metadata.shared is None else metadata.shared.get(key)
    if group_keys is None:
        group_keys = _find_keys(params, metadata, group, group_size)
        if metadata.shared is not None:
            metadata.shared[key] = group_keys
    return group_keys


def _find_keys(params: AttentionParams, metadata: AttentionMetadata, group: PaddedGroup, group_size: int) -> _GroupKeys:
    sequences = slice(group.first, group.last)
    pages = metadata.page_table[metadata.rows[sequences], : group.pages]
    num_keys = group.pages * params.key_cache.shape[1]
    mask = causal_mask(metadata.context_lens[sequences], group.max_queries, num_keys, params.sliding_window)[:, None]
    mask = mask if group.max_queries == 1 else mask.repeat(1, 1, group_size, 1)
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    first_page = int(pages[0, 0])
    are_neighbors = len(pages) == 1 and pages[0].tolist() == list(range(first_page, first_page + group.pages))
    return _GroupKeys(slice(first_page, first_page + group.pages) if are_neighbors else pages, bias)
