"""Causal attention of chunks of prompts (prefill) over a paged cache. Tiles of queries allow chunks of any lengths."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meltcore.kernels.attention.blocks import attend_block, oldest_key, to_dot_type
from meltcore.kernels.attention.kv_cache import attention_reference, load_queries, rotated_queries
from meltcore.kernels.attention.metadata import BLOCK_QUERIES, AttentionParams, require_layout
from meltcore.kernels.attention.prefill_wgmma import is_faster, prefill_wgmma, supports
from meltcore.kernels.attention.windows import supports_windows, window_attention
from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton


class PrefillLaunch(NamedTuple):
    """The launch parameters of the prefill kernel.

    Args:
        packed_heads: the number of a group's heads in one tile.
        block_keys: the number of keys of a block.
        stages: the number of stages of the key pipeline.
        registers: registers per thread, or None for the compiler's choice.
    """

    packed_heads: int
    block_keys: int
    warps: int
    stages: int
    registers: int | None = None


def prefill_attention(
    qkv: torch.Tensor,
    params: AttentionParams,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    launch: PrefillLaunch | None = None,
    max_queries: int = BLOCK_QUERIES,
) -> torch.Tensor:
    """Compute causal attention of chunks of prompts, whose keys and values are already in the cache.

    With a sliding window, a tile reads no page-table entry before the page of its first query's oldest key.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]. The queries are loaded, normalized, and rotated by their
            positions.
        params: the parameters of the layer.
        page_table: [rows, max_pages] int64.
        tiles: [tiles, 4] int32 from `make_query_tiles`, on the device. Tiles without tokens are padding.
        out: memory for the result. None allocates new memory. Tokens that no tile covers are not written.
        launch: the launch parameters. None selects them by size.
        max_queries: no tile has more queries.

    Returns [tokens, heads, head_dim].
    """
    if out is None:
        out = params.empty_output(qkv)
    if not use_triton(qkv):
        if len(tiles) and int(tiles[:, 2].max()) > max_queries:
            raise ValueError(f"a tile of {int(tiles[:, 2].max())} queries; at most {max_queries} were promised")
        _prefill_reference(qkv, params, page_table, tiles, out)
        return out
    norms, rotary_table, key_cache, value_cache, scale, window = params
    (_, heads, head_dim), (_, page_size, kv_heads, _) = out.shape, key_cache.shape
    require_layout(qkv, params, page_table, out)
    if len(tiles) == 0:
        return out
    if launch is None and max_queries < BLOCK_QUERIES and supports_windows(params, heads, max_queries):
        window_attention(qkv, params, page_table, tiles, max_queries, out)
        return out
    if launch is None and supports(qkv, params, heads) and is_faster(len(tiles), heads, qkv.device):
        prefill_wgmma(qkv, params, page_table, tiles, out)
        return out
    launch = launch or select_launch(qkv, key_cache, heads, len(tiles))
    # Heads vary fastest, so that the tiles start in their order, most keys first.
    _prefill_kernel[(heads // launch.packed_heads, len(tiles))](
        *(qkv, norms.query if norms else qkv, rotary_table, key_cache, value_cache, page_table, tiles, out),
        *(norms.eps if norms else 0.0, scale * math.log2(math.e), qkv.stride(0), page_table.stride(0), window),
        NORM=norms is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PACKED=launch.packed_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_QUERIES=BLOCK_QUERIES,
        BLOCK_KEYS=launch.block_keys,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **({"maxnreg": launch.registers} if launch.registers else {}),
    )
    return out


def _prefill_reference(
    qkv: torch.Tensor, params: AttentionParams, page_table: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor
) -> None:
    for row, first_token, num_queries, context_len in tiles.tolist():
        tokens, positions = (
            slice(first_token, first_token + num_queries),
            torch.arange(context_len, context_len + num_queries, device=qkv.device),
        )
        queries = rotated_queries(qkv[tokens], params, positions)
        out[tokens] = attention_reference(queries, params, page_table[row], context_len)


def prefill_launch(head_dim: int, element_bytes: int) -> PrefillLaunch:
    """Return the launch parameters for programs with 64 queries of one head.

    A block of keys and a block of values take 32 KiB together. With three stages (two of them in flight) and the
    queries, a program takes at most 112 KiB on Hopper, which keeps a third block for its asynchronous matrix
    instructions. On other GPUs it takes less, so that consumer GPUs support it.

    Heads of 256 have two stages and reach 258 and 375 TFLOP/s for two shapes. With 8 warps, with smaller or larger
    blocks or with a third stage, they reach 82 to 189 and 96 to 305 TFLOP/s. Float32 is for checking and does not use
    matrix units. It has one stage if the queries alone take 64 KiB.
    """
    if element_bytes > 2:
        return PrefillLaunch(1, max(16, 2**13 // (head_dim * element_bytes)), 8, stages=2 if head_dim <= 128 else 1)
    if head_dim > 128:
        return PrefillLaunch(1, 2**13 // head_dim, warps=4, stages=2)
    return PrefillLaunch(1, 64, warps=4, stages=3)


# Two heads of a group load each key once, and two such programs fit on a Hopper SM where a thread does with 128
# registers and blocks are one ahead: 28 prompts of 128 to 1,024 tokens take 183 us where single heads take 212, eight
# of 576 47 us for 54. One of 300, whose programs all run concurrently, takes 12.9 us for 9.4 (H200, 2026-11-21).
PACKED_PAIRS = PrefillLaunch(2, 64, warps=8, stages=2, registers=128)


def select_launch(qkv: torch.Tensor, key_cache: torch.Tensor, heads: int, num_tiles: int) -> PrefillLaunch:
    """Return the launch parameters for a number of tiles and heads.

    About half of the tiles in a CUDA graph are padding, whose programs exit immediately.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    can_pack = (
        capability(qkv.device) == 90
        and head_dim <= 128
        and qkv.element_size() == key_cache.element_size() == 2
        and heads // kv_heads % 2 == 0
    )
    if can_pack and heads * num_tiles > 4 * sm_count(qkv.device):
        return PACKED_PAIRS
    return prefill_launch(head_dim, qkv.element_size())


@triton.jit
def _load_page(pages, position, end, PAGE_SIZE: tl.constexpr):
    """Return the page of the key at `position`; 0 from `end` on, where no key is used."""
    return tl.load(pages + position // PAGE_SIZE, position < end, other=0)


@triton.jit(do_not_specialize=["window"])
def _prefill_kernel(
    qkv,
    q_norm_weight,
    rotary_table,
    key_cache,
    value_cache,
    page_table,
    tiles,
    out,
    eps,
    scale_log2,
    qkv_stride,
    table_stride,
    window,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Each program computes a tile of queries for PACKED heads of a group; a query's heads are neighboring rows."""
    head = tl.program_id(0) * PACKED
    kv_head = head // (HEADS // KV_HEADS)
    tile = tiles + tl.program_id(1) * 4
    table_row = tl.load(tile).to(tl.int64)
    first_token = tl.load(tile + 1).to(tl.int64)
    num_queries = tl.load(tile + 2)
    context_len = tl.load(tile + 3)
    if num_queries == 0:
        return  # padding

    row = tl.arange(0, BLOCK_QUERIES * PACKED)
    dims = tl.arange(0, HEAD_DIM)
    # Tokens past the end repeat the last one: cheaper than a mask on every load.
    token = tl.minimum(row // PACKED, num_queries - 1)
    queries = load_queries(
        qkv + (first_token + token) * qkv_stride + (head + row % PACKED) * HEAD_DIM,
        rotary_table + (context_len + token).to(tl.int64) * HEAD_DIM,
        q_norm_weight,
        eps,
        NORM,
        BLOCK_QUERIES * PACKED,
        HEAD_DIM,
    )
    # One part, of all dims: Hopper's asynchronous dots take blocks from shared memory, where they are converted.
    queries = (to_dot_type(queries, key_cache),)
    acc = (tl.zeros((BLOCK_QUERIES * PACKED, HEAD_DIM), tl.float32),)
    l_i = tl.zeros((BLOCK_QUERIES * PACKED,), tl.float32)
    m_i = tl.full((BLOCK_QUERIES * PACKED,), float("-inf"), tl.float32)
    if window is not None:  # finite, since the first blocks may be before a late query's window
        m_i = tl.full((BLOCK_QUERIES * PACKED,), -1e38, tl.float32)

    pages = page_table + table_row * table_stride
    key_offset = tl.arange(0, BLOCK_KEYS)
    block_offsets = (key_offset[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
    # Blocks that every query sees whole, without a mask: from `full_begin` to `full_end`.
    oldest_pos = oldest_key(context_len, window)
    full_begin = oldest_pos // BLOCK_KEYS * BLOCK_KEYS
    full_end = (context_len + 1) // BLOCK_KEYS * BLOCK_KEYS
    page = tl.load(pages + full_begin // PAGE_SIZE)
    if window is not None:
        masked_begin = full_begin
        full_begin = tl.cdiv(oldest_key(context_len + num_queries - 1, window), BLOCK_KEYS) * BLOCK_KEYS
        full_begin = tl.minimum(full_begin, full_end)
        for block_key in range(masked_begin, full_begin, BLOCK_KEYS):
            next_page = _load_page(pages, block_key + BLOCK_KEYS, context_len + num_queries, PAGE_SIZE)
            block_start = (page * PAGE_SIZE + block_key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
            key_mask = (block_key + key_offset >= oldest_pos)[:, None]
            keys = tl.load(key_cache + block_start + block_offsets, key_mask, other=0.0)
            values = tl.load(value_cache + block_start + block_offsets, key_mask, other=0.0)
            visible = block_key + key_offset[None, :] > context_len + token[:, None] - window
            acc, l_i, m_i = attend_block(queries, keys, values, visible, acc, l_i, m_i, scale_log2, MASKED=True)
            page = next_page
    for block_key in range(full_begin, full_end, BLOCK_KEYS):
        next_page = _load_page(pages, block_key + BLOCK_KEYS, context_len + num_queries, PAGE_SIZE)
        block_start = (page * PAGE_SIZE + block_key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
        keys = tl.load(key_cache + block_start + block_offsets)
        values = tl.load(value_cache + block_start + block_offsets)
        acc, l_i, m_i = attend_block(queries, keys, values, None, acc, l_i, m_i, scale_log2, MASKED=False)
        page = next_page
    for block_key in range(full_end, context_len + num_queries, BLOCK_KEYS):
        next_page = _load_page(pages, block_key + BLOCK_KEYS, context_len + num_queries, PAGE_SIZE)
        block_start = (page * PAGE_SIZE + block_key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
        key_mask = (block_key + key_offset < context_len + num_queries)[:, None]
        if window is not None:
            key_mask &= (block_key + key_offset >= oldest_pos)[:, None]
        keys = tl.load(key_cache + block_start + block_offsets, key_mask, other=0.0)
        values = tl.load(value_cache + block_start + block_offsets, key_mask, other=0.0)
        visible = block_key + key_offset[None, :] <= context_len + row[:, None] // PACKED
        if window is not None:
            visible &= block_key + key_offset[None, :] > context_len + token[:, None] - window
        acc, l_i, m_i = attend_block(queries, keys, values, visible, acc, l_i, m_i, scale_log2, MASKED=True)
        page = next_page
    output = acc[0] / l_i[:, None]
    column = (head + row % PACKED)[:, None] * HEAD_DIM + dims[None, :]
    offset = (first_token + row // PACKED)[:, None] * (HEADS * HEAD_DIM) + column
    tl.store(out + offset, output.to(out.dtype.element_ty), (row // PACKED < num_queries)[:, None])
