"""The sequential part of Gated DeltaNet's prefill: each head's state goes through the chunks of its sequence.

A program carries some values of a head, which are columns of its state and independent of each other. With names as in
gated_delta/intra_chunk.py a chunk takes the state S to

    u = T diag(beta) (v - exp(G) k S);    out = exp(G) q S + P u;    S <- exp(G_last) S + k^T (exp(G_last - G) u)

All of it is computed transposed, with S as [values, keys] and tokens in columns. The left operand of every dot is then
the result of the one before, in registers, where tensor cores take it, and the right operand was loaded: nothing passes
through shared memory from one dot to the next, and no barrier is between them.

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
_MIN_VALUES = 16
_NARROW_VALUES = 64  # as many rows as 4 warps give a tensor core


class ScanLaunch(NamedTuple):
    """Launch parameters of the state scan.

    values: number of columns of a state that a program carries; stages: number of chunks in flight or being computed.
    """

    values: int
    stages: int


def scan_launch(shape: GatedDeltaShape, sequences: int, element_bytes: int, device: torch.device) -> ScanLaunch:
    """Select the launch parameters. Programs carry whole heads if these give work to about half of the SMs.

    Keys are loaded once per program, so that fewer, larger programs load less.
    """
    values = shape.value_dim
    if element_bytes == 4:
        values = _MIN_VALUES
    elif sequences * shape.heads < 0.45 * sm_count(device):
        values = min(values, _NARROW_VALUES)
    stage_bytes = (2 * shape.key_dim + 2 * CHUNK + values) * CHUNK * element_bytes
    return ScanLaunch(values, max(1, min(3, (shared_memory_bytes(device) - 2**13) // stage_bytes)))


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
    sequences, num_decodes = len(metadata.state_slots) - metadata.num_decodes, metadata.num_decodes
    conv_states, states = params.conv_states, params.recurrent_states
    launch = launch or scan_launch(shape, sequences, projected.element_size(), projected.device)
    outputs = projected.new_empty(len(prepared.scales), shape.heads, shape.value_dim, CHUNK)
    _scan_kernel[(shape.heads, shape.value_dim // launch.values, sequences)](
        *(projected, convolved, *prepared, conv_states, states, metadata.context_lens, metadata.state_slots),
        *(metadata.query_start_loc, outputs, num_decodes),
        *(projected.stride(0), conv_states.stride(0), states.stride(0)),
        **constants(shape),
        CHUNK=CHUNK,
        VALUES=launch.values,
        num_warps=4 if launch.values <= _NARROW_VALUES else 8,
        num_stages=launch.stages,
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
        *(projected, outputs, params.norm, metadata.query_start_loc, chunks, out, params.eps, metadata.num_decodes),
        projected.stride(0),
        **constants(shape),
        CHUNK=CHUNK,
        NATIVE=capability(projected.device) > 0,
        num_warps=4,
    )


@triton.jit
def _store_inputs(inputs, ring, channels, start, num_remaining, stride, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """Store a sequence's last inputs in the ring for later steps. channels: [DIM]."""
    for steps_back in tl.static_range(KERNEL):
        token = num_remaining - 1 - steps_back
        inputs_kept = tl.load(inputs + token.to(tl.int64) * stride + channels, token >= 0, other=0.0)
        entry = ring + (start + tl.maximum(token, 0)) % KERNEL * CHANNELS
        tl.store(entry + channels, inputs_kept, token >= 0)


@triton.jit
def _state_update(old_state, key, value, update_matrix, decays):
    """Return the updates u of a chunk's tokens, transposed: [VALUES, CHUNK] float32. old_state: before the chunk."""
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
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Each program carries VALUES values of one head through all chunks of one sequence."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    dtype: tl.constexpr = convolved.dtype.element_ty
    head = tl.program_id(0)
    # The engine sorts sequences by their tokens; the longest start first.
    sequence = (num_decodes + tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    first_token = tl.load(query_start_loc + sequence)
    num_remaining = (tl.load(query_start_loc + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(context_lens + sequence).to(tl.int32)
    slot = tl.load(slots + sequence)

    row, key_dims = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    value_dims = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    # Offsets of this head's tiles in a chunk's row, and of the elements in a tile.
    key_tile = head // GROUP * (CHUNK * KEY_DIM)
    value_tile = CHUNK * (2 * KEYS + head * VALUE_DIM)
    key_offsets = row[:, None] * KEY_DIM + key_dims[None, :]
    value_offsets = row[:, None] * VALUE_DIM + value_dims[None, :]
    matrix_offsets = row[:, None] * CHUNK + row[None, :]
    output_offsets = value_dims[:, None] * CHUNK + row[None, :]
    state_ptr = states + slot * state_stride + (head * KEY_DIM + key_dims[None, :]) * VALUE_DIM + value_dims[:, None]
    state = tl.load(state_ptr, start > 0, other=0.0)
    chunk_idx = chunk_row(query_start_loc, sequence, 0, num_decodes, CHUNK)
    for _ in range(0, num_remaining, CHUNK):
        tiles = convolved + chunk_idx * (CHUNK * CHANNELS)
        head_row = chunk_idx * HEADS + head
        key = tl.load(tiles + CHUNK * KEYS + key_tile + key_offsets)
        value = tl.load(tiles + value_tile + value_offsets)
        update_matrix = tl.load(updates + head_row * (CHUNK * CHUNK) + matrix_offsets)
        decays = tl.load(scales + head_row * (2 * CHUNK) + row)[None, :]
        decay_to_end = tl.load(scales + head_row * (2 * CHUNK) + CHUNK + row)[None, :]
        decay = tl.load(scales + head_row * (2 * CHUNK) + CHUNK - 1)
        old_state = state.to(dtype)
        update = _state_update(old_state, key, value, update_matrix, decays)
        # Loaded this late where the loop is not pipelined: least shared memory.
        query = tl.load(tiles + key_tile + key_offsets)
        output = tl.dot(old_state, tl.trans(query), input_precision="ieee") * decays
        read_matrix = tl.load(reads + head_row * (CHUNK * CHUNK) + matrix_offsets)
        output = tl.dot(update.to(dtype), tl.trans(read_matrix), output, input_precision="ieee")
        state = tl.dot((update * decay_to_end).to(dtype), key, state * decay, input_precision="ieee")
        tl.store(outputs + head_row * (CHUNK * VALUE_DIM) + output_offsets, output.to(dtype))
        chunk_idx += 1
    tl.store(state_ptr, state)

    inputs = projected + first_token * projected_stride
    ring = conv_states + slot * conv_stride
    channels = 2 * KEYS + head * VALUE_DIM + value_dims
    _store_inputs(inputs, ring, channels, start, num_remaining, projected_stride, CHANNELS, KERNEL)
    if (head % GROUP == 0) & (tl.program_id(1) == 0):
        key_channels = head // GROUP * KEY_DIM + key_dims
        _store_inputs(inputs, ring, key_channels, start, num_remaining, projected_stride, CHANNELS, KERNEL)
        _store_inputs(inputs, ring, KEYS + key_channels, start, num_remaining, projected_stride, CHANNELS, KERNEL)


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
    chunk_idx = chunk_row(query_start_loc, sequence, chunk_number, num_decodes, CHUNK)
    row, column = tl.arange(0, CHUNK), tl.arange(0, VALUE_DIM)
    row_mask = (row < num_remaining)[:, None]
    transposed = outputs + (chunk_idx * HEADS + head) * (VALUE_DIM * CHUNK) + column[:, None] * CHUNK + row[None, :]
    output = tl.trans(tl.load(transposed)).to(tl.float32)
    gate_offsets = (first_token + row)[:, None] * projected_stride + CHANNELS + head * VALUE_DIM + column[None, :]
    gate = tl.load(projected + gate_offsets, row_mask, other=0.0).to(tl.float32)
    weight = tl.load(norm + column).to(tl.float32)[None, :]
    result = gated_norm(output, gate, weight, eps, VALUE_DIM, NATIVE)
    rows = out + ((first_token + row)[:, None] * HEADS + head) * VALUE_DIM + column[None, :]
    tl.store(rows, result.to(out.dtype.element_ty), row_mask)
