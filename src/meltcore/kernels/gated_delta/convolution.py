"""The causal convolution before Gated DeltaNet for chunks of prompts. It also normalizes queries and keys.

It is a separate kernel: if it were fused with a chunk's dot products, its many loads would need too many registers. A
thread has the same 8 channels of all tokens of its program, so it loads and converts each number once.
"""

from __future__ import annotations

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.capability import capability
from meltcore.kernels.gated_delta.common import (
    CHUNK,
    GatedDeltaParams,
    GatedDeltaShape,
    chunk_row,
    chunk_rows,
    constants,
    fast_silu,
    l2_normalize_rows,
)
from meltcore.kernels.jit import tl, triton

# Tokens of a program. A thread keeps all inputs of its channels, and the KERNEL - 1 before them, which are loaded
# again: 16 tokens leave registers for fewer programs and take 12 % longer (H200, 2026-11-21).
_BLOCK_TOKENS = 8
_BLOCK_CHANNELS = 1024  # of a program: 8 for each thread of 4 warps, 16 bytes


def convolve_chunks(
    projected: torch.Tensor, params: GatedDeltaParams, metadata: AttentionMetadata, shape: GatedDeltaShape
) -> torch.Tensor:
    """Compute the convolution of all chunks: [chunk_rows, conv_channels * CHUNK] in the type of `projected`.

    The row of a chunk (`chunk_row`) holds the normalized queries, the normalized keys and the values, one tile
    [CHUNK, dim] per head. Rows of a tile past the end of the sequence are zeros.
    """
    query_start_loc, chunks, num_decodes = metadata.query_start_loc, metadata.chunk_indices, metadata.first_prompt
    rows = chunk_rows(len(projected), len(metadata.state_slots) - num_decodes)
    convolved = projected.new_empty(rows, shape.conv_channels * CHUNK)
    key_heads = min(_BLOCK_CHANNELS // shape.key_dim, triton.next_power_of_2(2 * shape.key_heads))
    value_heads = min(_BLOCK_CHANNELS // shape.value_dim, triton.next_power_of_2(shape.heads))
    num_tiles = triton.cdiv(2 * shape.key_heads, key_heads) + triton.cdiv(shape.heads, value_heads)
    _convolve_kernel[(num_tiles, CHUNK // _BLOCK_TOKENS, len(chunks))](
        *(projected, params.conv, params.conv_states, metadata.context_lens, metadata.state_slots, query_start_loc),
        *(chunks, num_decodes, convolved, projected.stride(0), params.conv_states.stride(0)),
        **constants(shape),
        ENTRIES=params.conv_states.shape[1],
        COLUMNS=params.conv_states.shape[2],
        CHUNK=CHUNK,
        ROWS=_BLOCK_TOKENS,
        TILE_KEY_HEADS=key_heads,
        TILE_VALUE_HEADS=value_heads,
        NATIVE=capability(projected.device) > 0,
        num_warps=4,
    )
    return convolved


@triton.jit
def _convolve_rows(
    inputs,
    ring_ptr,
    conv_weight,
    outputs,
    channels,
    channel_mask,
    scale,
    num_earlier,
    context_len,
    num_remaining,
    stride,
    KERNEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Convolve ROWS tokens of channels [HEADS, DIM]. `inputs` points to the first token.

    num_remaining: number of tokens up to the sequence's end; later rows become zeros. outputs: [HEADS, DIM] pointers
    for the first token. NORMALIZE: scale each head to the length `scale` [HEADS, 1]. num_earlier: number of the
    sequence's tokens in this step before the first one. Older inputs are read from the sequence's slot.
    """
    dtype: tl.constexpr = inputs.dtype.element_ty
    DIM: tl.constexpr = channels.shape[1]
    tap = tl.arange(0, triton.next_power_of_2(KERNEL))[None, None, :]
    taps_ptr = conv_weight + channels[:, :, None] * KERNEL + tap
    weights = tl.load(taps_ptr, channel_mask[:, :, None] & (tap < KERNEL), other=0.0).to(tl.float32)
    taps = tl.tuple(())
    for index in tl.static_range(KERNEL):
        taps += (tl.sum(tl.where(tap == index, weights, 0.0), 2),)

    window = tl.tuple(())
    for index in tl.static_range(KERNEL - 1):
        token = num_earlier - (KERNEL - 1) + index
        step_ptr = inputs - (KERNEL - 1 - index) * stride + channels
        slot_ptr = ring_ptr + (context_len + token + ENTRIES) % ENTRIES * COLUMNS + channels
        from_step = tl.load(step_ptr, channel_mask & (token >= 0) & (num_remaining > 0), other=0.0)
        from_slot = tl.load(slot_ptr, channel_mask & (token < 0) & (context_len + token >= 0), other=0.0)
        window += (tl.where(token < 0, from_slot, from_step),)
    # All are loaded before the first is stored: the compiler cannot know that stores do not alias them.
    for row in tl.static_range(ROWS):
        window += (tl.load(inputs + row * stride + channels, channel_mask & (row < num_remaining), other=0.0),)
    for row in tl.static_range(ROWS):
        total = window[row].to(tl.float32) * taps[0]
        for index in tl.static_range(1, KERNEL):
            total += window[row + index].to(tl.float32) * taps[index]
        result = fast_silu(total, NATIVE).to(dtype)
        if NORMALIZE:
            result = (l2_normalize_rows(result.to(tl.float32)) * scale).to(dtype)
        tl.store(outputs + row * DIM, tl.where(row < num_remaining, result, 0.0), channel_mask)


# Indices are slices of a longer tensor, at any alignment.
@triton.jit(do_not_specialize=["context_lens", "slots", "query_start_loc", "chunks", "num_decodes"])
def _convolve_kernel(
    projected,
    conv_weight,
    conv_states,
    context_lens,
    slots,
    query_start_loc,
    chunks,
    num_decodes,
    convolved,
    projected_stride,
    conv_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEY_HEADS: tl.constexpr,
    TILE_VALUE_HEADS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Each program convolves ROWS tokens of a chunk, for some heads of queries and keys or for some heads of values."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    KEY_TILES: tl.constexpr = (2 * KEY_HEADS + TILE_KEY_HEADS - 1) // TILE_KEY_HEADS
    tile = tl.program_id(0)
    row_start = tl.program_id(1) * ROWS
    sequence = tl.load(chunks + tl.program_id(2) * 2).to(tl.int64)
    chunk_number = tl.load(chunks + tl.program_id(2) * 2 + 1)
    num_earlier = chunk_number * CHUNK + row_start
    first_token = tl.load(query_start_loc + sequence) + num_earlier
    num_remaining = (tl.load(query_start_loc + sequence + 1) - first_token).to(tl.int32)
    if num_remaining + row_start <= 0:
        return  # the chunk is padding, which no kernel reads
    context_len = tl.load(context_lens + sequence).to(tl.int32)
    inputs = projected + first_token * projected_stride
    ring_ptr = conv_states + tl.load(slots + sequence) * conv_stride
    outputs = convolved + chunk_row(query_start_loc, sequence, chunk_number, num_decodes, CHUNK) * (CHUNK * CHANNELS)
    if tile < KEY_TILES:
        key_head = (tile * TILE_KEY_HEADS + tl.arange(0, TILE_KEY_HEADS))[:, None]
        key_dims = tl.arange(0, KEY_DIM)[None, :]
        _convolve_rows(
            *(inputs, ring_ptr, conv_weight, outputs + (key_head * CHUNK + row_start) * KEY_DIM + key_dims),
            *(key_head * KEY_DIM + key_dims, key_head < 2 * KEY_HEADS),
            tl.where(key_head < KEY_HEADS, KEY_DIM**-0.5, 1.0),
            *(num_earlier, context_len, num_remaining, projected_stride, KERNEL, ENTRIES, COLUMNS, ROWS),
            NORMALIZE=True,
            NATIVE=NATIVE,
        )
    else:
        head = ((tile - KEY_TILES) * TILE_VALUE_HEADS + tl.arange(0, TILE_VALUE_HEADS))[:, None]
        value_dims = tl.arange(0, VALUE_DIM)[None, :]
        _convolve_rows(
            *(
                inputs,
                ring_ptr,
                conv_weight,
                outputs + 2 * KEYS * CHUNK + (head * CHUNK + row_start) * VALUE_DIM + value_dims,
            ),
            *(2 * KEYS + head * VALUE_DIM + value_dims, head < HEADS, 1.0),
            *(num_earlier, context_len, num_remaining, projected_stride, KERNEL, ENTRIES, COLUMNS, ROWS),
            NORMALIZE=False,
            NATIVE=NATIVE,
        )
