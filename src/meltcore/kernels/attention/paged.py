"""Attention of a step's tokens over a paged cache: stores their keys and values, and attends."""

from __future__ import annotations

import torch

from meltcore.kernels.attention.decode import decode_attention
from meltcore.kernels.attention.kv_cache import rotated_queries, store_kv, store_kv_reference
from meltcore.kernels.attention.metadata import AttentionMetadata, AttentionParams, PaddedGroup
from meltcore.kernels.attention.prefill import prefill_attention
from meltcore.kernels.launch import use_triton


def paged_attention(
    qkv: torch.Tensor, params: AttentionParams, positions: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    """Store the new tokens' keys and values, and attend causally to each token's own sequence, itself included.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], heads a multiple of kv_heads (grouped-query attention); positions:
    [tokens] int64. Returns [tokens, heads, head_dim].
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
        prefill_attention(prompts, params, page_table, metadata.query_tiles, out=output[num_decodes:])
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


def _attend_group(
    queries: torch.Tensor, params: AttentionParams, metadata: AttentionMetadata, group: PaddedGroup
) -> torch.Tensor:
    """Compute the attention of one padded group. The query heads that share a key head become extra query rows."""
    sequences, max_queries = slice(group.first, group.last), group.max_queries
    pages = metadata.page_table[metadata.rows[sequences], : group.pages]
    padded_index = metadata.padded_index[group.first_token : group.last_token]
    (num_queries, heads, head_dim), (_, page_size, kv_heads, _) = queries.shape, params.key_cache.shape
    keys, values = (
        cache[pages].view(len(pages), group.pages * page_size, kv_heads, head_dim).transpose(1, 2).to(queries.dtype)
        for cache in (params.key_cache, params.value_cache)
    )
    is_unpadded = num_queries == len(pages) * max_queries
    if not is_unpadded:
        queries = queries.new_zeros(len(pages) * max_queries, heads, head_dim).index_copy_(0, padded_index, queries)
    padded_queries = queries.view(len(pages), max_queries, heads, head_dim)
    # [sequences, queries, kv_heads, group, dim] -> [sequences, kv_heads, group * queries, dim]
    packed_queries = padded_queries.unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    num_keys = group.pages * page_size
    mask = causal_mask(metadata.context_lens[sequences], max_queries, num_keys, params.sliding_window)
    mask = mask[:, None].repeat(1, 1, heads // kv_heads, 1)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    output: torch.Tensor = sdpa(packed_queries, keys, values, attn_mask=mask, scale=params.scale)
    output = output.unflatten(2, (heads // kv_heads, max_queries)).permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)
    return output if is_unpadded else output[padded_index]
