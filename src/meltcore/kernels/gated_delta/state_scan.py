"""The sequential part of Gated DeltaNet's prefill: each head's state goes through the chunks of its sequence.

A program carries some columns of a head's state, one per value. Columns are independent of each other. With names as in
gated_delta/intra_chunk.py a chunk takes the state S to

    u = T diag(beta) (v - exp(G) k S);    out = exp(G) q S + P u;    S <- exp(G_last) S + k^T (exp(G_last - G) u)

All of it is computed transposed, with S as [values, keys] and tokens in columns. The left operand of every dot is then
the result of the previous dot in registers, from which tensor cores can read it. The right operand was loaded. So no
result passes through shared memory, and no barrier is between two dots.

The gated norm, over all values of a head, is a kernel after this one, which transposes tokens back into rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.capability import capability, shared_memory_bytes, sm_count
from meltcore.kernels.gated_delta.common import (
    CHUNK,
    GatedDeltaParams,
    GatedDeltaShape,
    chunk_row,
    constants,
    gated_norm,
)
from meltcore.kernels.gated_delta.intra_chunk import PreparedChunks
from meltcore.kernels.jit import tl, triton

# tl.dot takes no narrower columns.
_MIN_BLOCK_VALUES = 16
_NARROW_BLOCK_VALUES = 64  # as many rows as 4 warps give a tensor core


class ScanLaunch(NamedTuple):
    """Launch parameters of the state scan.

    A program carries `block_values` columns of a state, and `num_stages` chunks are in flight or being computed.
    """

    block_values: int
    num_stages: int


def scan_launch(shape: GatedDeltaShape, sequences: int, element_bytes: int, device: torch.device) -> ScanLaunch:
    """Select the launch parameters. A program carries a whole head if whole heads give work to about half of the SMs.

    Keys are loaded once per program, so that fewer, larger programs load less.
    """
    block_values = shape.value_dim
    if element_bytes == 4:
        block_values = _MIN_BLOCK_VALUES
    elif sequences * shape.heads < 0.45 * sm_count(device):
        block_values = min(block_values, _NARROW_BLOCK_VALUES)
    stage_bytes = (2 * shape.key_dim + 2 * CHUNK + block_values) * CHUNK * element_bytes
    return ScanLaunch(block_values, max(1, min(3, (shared_memory_bytes(device) - 2**13) // stage_bytes)))


def scan_chunks(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    prepared: PreparedChunks,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    shape: GatedDeltaShape,
    launch: ScanLaunch | None = None,
) -> torch.Tensor:
    """Update the recurrent states and the convolution's rings, and return the outputs of all tokens.

    Outputs: [chunk_rows, heads, value_dim, CHUNK] in the type of `projected`, before the gated norm.
    """
    sequences, num_decodes = len(metadata.state_slots) - metadata.first_prompt, metadata.first_prompt
    conv_states, states = params.conv_states, params.recurrent_states
    launch = launch or scan_launch(shape, sequences, projected.element_size(), projected.device)
    outputs = projected.new_empty(len(prepared.scales), shape.heads, shape.value_dim, CHUNK)
    _scan_kernel[(shape.heads, shape.value_dim // launch.block_values, sequences)](
        *(projected, convolved, *prepared, conv_states, states, metadata.context_lens, metadata.state_slots),
        *(metadata.query_start_loc, outputs, num_decodes),
        *(projected.stride(0), conv_states.stride(0), states.stride(0)),
        **constants(shape),
        ENTRIES=conv_states.shape[1],
        COLUMNS=conv_states.shape[2],
        CHUNK=CHUNK,
        BLOCK_VALUES=launch.block_values,
        num_warps=4 if launch.block_values <= _NARROW_BLOCK_VALUES else 8,
        num_stages=launch.num_stages,
    )
    return outputs


def norm_chunks(
    projected: torch.Tensor,
    outputs: torch.Tensor,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    """Write the gated norm of `outputs`, the result of `scan_chunks`, to the rows of `out` that chunks cover."""
    chunks = metadata.chunk_indices
    _norm_kernel[(shape.heads, len(chunks))](
        *(projected, outputs, params.norm, metadata.query_start_loc, chunks, out, params.eps, metadata.first_prompt),
        projected.stride(0),
        **constants(shape),
        CHUNK=CHUNK,
        NATIVE=capability(projected.device) > 0,
        num_warps=4,
    )


@triton.jit
def _store_inputs(
    inputs,
    ring_ptr,
    channels,
    context_len,
    num_remaining,
    stride,
    KERNEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store a sequence's last inputs in the ring for later steps. channels: [DIM]."""
    for steps_back in tl.static_range(KERNEL):
        token = num_remaining - 1 - steps_back
        last_inputs = tl.load(inputs + token.to(tl.int64) * stride + channels, token >= 0, other=0.0)
        entry_ptr = ring_ptr + (context_len + tl.maximum(token, 0)) % ENTRIES * COLUMNS
        tl.store(entry_ptr + channels, last_inputs, token >= 0)


@triton.jit
def _state_update(old_state, key, value, update_matrix, decays):
    """Return a chunk's updates u, transposed: [BLOCK_VALUES, CHUNK] float32. old_state: the state before the chunk."""
    state_times_key = tl.dot(old_state, tl.trans(key), input_precision="ieee") * -decays
    update = tl.dot(tl.trans(value), tl.trans(update_matrix), input_precision="ieee")
    return tl.dot(state_times_key.to(old_state.dtype), tl.trans(update_matrix), update, input_precision="ieee")


# Indices are slices of a longer tensor, at any alignment.
@triton.jit(do_not_specialize=["context_lens", "slots", "query_start_loc", "num_decodes"])
def _scan_kernel(
    projected,
    convolved,
    updates,
    reads,
    scales,
    conv_states,
    states,
    context_lens,
    slots,
    query_start_loc,
    outputs,
    num_decodes,
    projected_stride,
    conv_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """Each program carries BLOCK_VALUES values of one head through all chunks of one sequence."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    dtype: tl.constexpr = convolved.dtype.element_ty
    head = tl.program_id(0)
    # The engine sorts sequences by their tokens; the longest start first.
    sequence = (num_decodes + tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    first_token = tl.load(query_start_loc + sequence)
    num_remaining = (tl.load(query_start_loc + sequence + 1) - first_token).to(tl.int32)
    if num_remaining <= 0:
        return
    context_len = tl.load(context_lens + sequence).to(tl.int32)
    slot = tl.load(slots + sequence)

    row, key_dims = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    value_dims = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    # Offsets of this head's tiles in a chunk's row, and of the elements in a tile.
    key_tile_offset = head // GROUP * (CHUNK * KEY_DIM)
    value_tile_offset = CHUNK * (2 * KEYS + head * VALUE_DIM)
    key_offsets = row[:, None] * KEY_DIM + key_dims[None, :]
    value_offsets = row[:, None] * VALUE_DIM + value_dims[None, :]
    matrix_offsets = row[:, None] * CHUNK + row[None, :]
    output_offsets = value_dims[:, None] * CHUNK + row[None, :]
    state_ptr = states + slot * state_stride + (head * KEY_DIM + key_dims[None, :]) * VALUE_DIM + value_dims[:, None]
    state = tl.load(state_ptr, context_len > 0, other=0.0)
    chunk_idx = chunk_row(query_start_loc, sequence, 0, num_decodes, CHUNK)
    for _ in range(0, num_remaining, CHUNK):
        tiles_ptr = convolved + chunk_idx * (CHUNK * CHANNELS)
        head_row = chunk_idx * HEADS + head
        key = tl.load(tiles_ptr + CHUNK * KEYS + key_tile_offset + key_offsets)
        value = tl.load(tiles_ptr + value_tile_offset + value_offsets)
        update_matrix = tl.load(updates + head_row * (CHUNK * CHUNK) + matrix_offsets)
        decays = tl.load(scales + head_row * (2 * CHUNK) + row)[None, :]
        decay_to_end = tl.load(scales + head_row * (2 * CHUNK) + CHUNK + row)[None, :]
        decay = tl.load(scales + head_row * (2 * CHUNK) + CHUNK - 1)
        old_state = state.to(dtype)
        update = _state_update(old_state, key, value, update_matrix, decays)
        # Loaded this late where the loop is not pipelined: least shared memory.
        query = tl.load(tiles_ptr + key_tile_offset + key_offsets)
        output = tl.dot(old_state, tl.trans(query), input_precision="ieee") * decays
        read_matrix = tl.load(reads + head_row * (CHUNK * CHUNK) + matrix_offsets)
        output = tl.dot(update.to(dtype), tl.trans(read_matrix), output, input_precision="ieee")
        state = tl.dot((update * decay_to_end).to(dtype), key, state * decay, input_precision="ieee")
        tl.store(outputs + head_row * (CHUNK * VALUE_DIM) + output_offsets, output.to(dtype))
        chunk_idx += 1
    tl.store(state_ptr, state)

    inputs = projected + first_token * projected_stride
    ring_ptr = conv_states + slot * conv_stride
    channels = 2 * KEYS + head * VALUE_DIM + value_dims
    _store_inputs(inputs, ring_ptr, channels, context_len, num_remaining, projected_stride, KERNEL, ENTRIES, COLUMNS)
    if (head % GROUP == 0) & (tl.program_id(1) == 0):
        key_channels = head // GROUP * KEY_DIM + key_dims
        _store_inputs(
            inputs, ring_ptr, key_channels, context_len, num_remaining, projected_stride, KERNEL, ENTRIES, COLUMNS
        )
        _store_inputs(
            inputs,
            ring_ptr,
            KEYS + key_channels,
            context_len,
            num_remaining,
            projected_stride,
            KERNEL,
            ENTRIES,
            COLUMNS,
        )


@triton.jit(do_not_specialize=["query_start_loc", "chunks", "num_decodes"])
def _norm_kernel(
    projected,
    outputs,
    norm,
    query_start_loc,
    chunks,
    out,
    eps,
    num_decodes,
    projected_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Each program normalizes one head of a chunk, with tokens as rows.

    The last chunks come first: L2 may hold them.
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    head = tl.program_id(0)
    chunk = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = tl.load(chunks + chunk * 2).to(tl.int64)
    chunk_number = tl.load(chunks + chunk * 2 + 1)
    first_token = tl.load(query_start_loc + sequence) + chunk_number * CHUNK
    num_remaining = tl.load(query_start_loc + sequence + 1) - first_token
    if num_remaining <= 0:
        return
    chunk_idx = chunk_row(query_start_loc, sequence, chunk_number, num_decodes, CHUNK)
    row, column = tl.arange(0, CHUNK), tl.arange(0, VALUE_DIM)
    row_mask = (row < num_remaining)[:, None]
    output_ptrs = outputs + (chunk_idx * HEADS + head) * (VALUE_DIM * CHUNK) + column[:, None] * CHUNK + row[None, :]
    output = tl.trans(tl.load(output_ptrs)).to(tl.float32)
    gate_offsets = (first_token + row)[:, None] * projected_stride + CHANNELS + head * VALUE_DIM + column[None, :]
    gate = tl.load(projected + gate_offsets, row_mask, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm + column).to(tl.float32)[None, :]
    result = gated_norm(output, gate, norm_weight, eps, VALUE_DIM, NATIVE)
    out_ptrs = out + ((first_token + row)[:, None] * HEADS + head) * VALUE_DIM + column[None, :]
    tl.store(out_ptrs, result.to(out.dtype.element_ty), row_mask)
