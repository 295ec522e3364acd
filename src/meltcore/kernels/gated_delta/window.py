"""Gated DeltaNet for windows: the newest known token of each sequence and the draft tokens after it.

An engine that speculates computes a window of 1 to 1 + k tokens in a step, and some of the drafts may be rejected. A
state is 64 KiB per head, so it is not stored for each token. It is stored once per step, after the window's first
token, which is never rejected. The raw inputs of all tokens, and their b and a, are stored in the sequence's ring
conv_states. The next step reads the state, replays the drafts that were accepted, and goes on through its own window.

So a step moves the state once each way, as in decode, however many tokens it computes. A token in the ring takes
conv_channels + 2 * heads numbers: 16.1 KiB per layer of Qwen3.5-35B-A3B, whose states take 2 MiB.

The ring has kernel + 2 * k entries. A launch replays at most k tokens, for whose convolution it reads kernel - 1
inputs more, and writes at most 1 + k inputs. Programs of several heads read the same queries and keys in no order, so
no entry that the launch writes may be one that it reads: kernel - 1 + k + 1 + k entries. Without drafts this is the
ring of decode.
"""

from __future__ import annotations

from pathlib import Path

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.capability import capability
from meltcore.kernels.gated_delta.common import (
    GatedDeltaParams,
    GatedDeltaShape,
    constants,
    conv_reference,
    delta_rule_reference,
    gated_norm_reference,
    gates_reference,
    heads_reference,
    l2_normalize_rows,
    silu,
)
from meltcore.kernels.gated_delta.decode import delta_rule
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait, use_triton
from meltcore.kernels.nvrtc import INSTRUCTIONS, CudaKernel

KERNEL = CudaKernel([INSTRUCTIONS, Path(__file__).with_suffix(".cu")], "gated_delta_windows")
_DIM, _PARTS, _CUDA_CAPABILITY = 128, 4, 90  # of queries, keys and values; threads of a column of a state
_BLOCK = 256  # sequences of a program of `count_replays`


def count_replays(
    folded: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_windows: int,
) -> torch.Tensor:
    """Return how many tokens each window of a step replays: [num_windows] int64. `folded` becomes that after the step.

    A window stores its state after its first token, a prompt after its last. Padding leaves any number in `folded` of
    the null slot, and its own result has no meaning.

    Args:
        folded: [slots + 1] int64, the number of tokens in the states of each slot.
        slots: [sequences] int64. They differ, except for padding.
        context_lens: [sequences] int64.
        query_start_loc: [sequences + 1] int64.
        num_windows: the number of sequences that are windows, which come first.
    """
    if not use_triton(folded):
        replay_lens = context_lens[:num_windows] - folded[slots[:num_windows]]
        ends = context_lens + query_start_loc.diff()
        ends[:num_windows] = context_lens[:num_windows] + 1
        folded[slots] = ends
        return replay_lens
    replay_lens = torch.empty(num_windows, dtype=torch.int64, device=folded.device)
    _count_replays_kernel[(triton.cdiv(len(slots), _BLOCK),)](
        *(folded, slots, context_lens, query_start_loc, replay_lens, len(slots), num_windows), BLOCK=_BLOCK
    )
    return replay_lens


# As for windows: indices have any alignment, and counts of all values share a kernel.
@triton.jit(
    do_not_specialize=["slots", "context_lens", "query_start_loc", "replay_lens", "num_sequences", "num_windows"]
)
def _count_replays_kernel(
    folded,
    slots,
    context_lens,
    query_start_loc,
    replay_lens,
    num_sequences,
    num_windows,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_sequence, is_window = sequence < num_sequences, sequence < num_windows
    slot = tl.load(slots + sequence, is_sequence, other=0)
    context_len = tl.load(context_lens + sequence, is_sequence, other=0)
    first_token = tl.load(query_start_loc + sequence, is_sequence, other=0)
    end_token = tl.load(query_start_loc + sequence + 1, is_sequence, other=0)
    num_folded = tl.load(folded + slot, is_window, other=0)
    tl.store(replay_lens + sequence, context_len - num_folded, is_window)
    num_added = tl.where(is_window, 1, end_token - first_token)
    tl.store(folded + slot, context_len + num_added, is_sequence)


def gated_delta_windows(
    projected: torch.Tensor,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    """Compute the windows of a step into `out` and update the states.

    A window at position -1 is the padding of a CUDA graph. It may have any number of tokens, whose output is zeros.

    Args:
        projected: [tokens, width]. The tokens of the windows come first.
        params: the parameters and states of the layer.
        metadata: the sequences of the step, of which the first `num_windows` are windows. `context_lens` has the
            positions of the first tokens.
        shape: the sizes of the layer.
        out: [tokens, heads * value_dim], unchanged for tokens after the windows.
    """
    assert metadata.replay_lens is not None, "metadata with windows has the number of tokens to replay"
    positions, slots, query_start_loc = metadata.context_lens, metadata.state_slots, metadata.query_start_loc
    if not use_triton(projected):
        _windows_reference(projected, params, metadata, metadata.replay_lens, shape, out)
        return
    conv_states, states = params.conv_states, params.recurrent_states
    if _supports_cuda(projected, params, shape):
        _launch_cuda(projected, params, metadata, shape, out)
        return
    _window_kernel[(shape.heads, metadata.num_windows)](
        *(projected, params.conv, params.a_log, params.dt_bias, params.norm, conv_states, states, positions, slots),
        *(metadata.replay_lens, query_start_loc, out, params.eps),
        *(projected.stride(0), conv_states.stride(0), states.stride(0)),
        **constants(shape),
        ENTRIES=conv_states.shape[1],
        COLUMNS=conv_states.shape[2],
        num_warps=max(4, shape.key_dim * shape.value_dim // 4096),  # as in decode
        **pdl_options(projected.device),
    )


def _supports_cuda(projected: torch.Tensor, params: GatedDeltaParams, shape: GatedDeltaShape) -> bool:
    """Return whether the kernel in CUDA C++ computes this layer. It reads pairs of inputs as words of 32 bits."""
    if not projected.is_cuda or capability(projected.device) < _CUDA_CAPABILITY:
        return False
    if projected.data_ptr() % 4 or projected.stride(0) % 2:
        return False
    in_bf16 = {each.dtype for each in (projected, params.conv, params.norm, params.conv_states)} == {torch.bfloat16}
    return in_bf16 and shape.key_dim == shape.value_dim == _DIM and shape.kernel > 1


def _shared_bytes(drafts: int) -> int:
    """Return the shared memory of a block, in the order of window.cu."""
    tokens, keys = 1 + drafts, 1 + 2 * drafts
    rows, padded = tokens + keys, -(-keys // 4) * 4
    tiled_rows = -(-rows // 16) * 16
    floats = rows * (_DIM + 4 * _PARTS) + (keys + tokens) * _DIM + tiled_rows**2
    return 4 * (floats + padded * (2 * tokens + 5) + tiled_rows * _DIM)


def _launch_cuda(
    projected: torch.Tensor,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    conv_states, states = params.conv_states, params.recurrent_states
    drafts = (conv_states.shape[1] - shape.kernel) // 2
    macros = ("KEY_HEADS", shape.key_heads), ("HEADS", shape.heads), ("DRAFTS", drafts), ("TAPS", shape.kernel)
    assert metadata.replay_lens is not None
    KERNEL.launch(
        (shape.heads * metadata.num_windows,),
        _PARTS * _DIM // 2,
        macros,
        [
            *(projected, params.conv, params.a_log, params.dt_bias, params.norm, conv_states, states),
            *(metadata.context_lens, metadata.state_slots, metadata.replay_lens, metadata.query_start_loc, out),
            *(params.eps, projected.stride(0), conv_states.stride(0), states.stride(0)),
        ],
        projected.device,
        shared_bytes=_shared_bytes(drafts),
        pdl=True,
    )


def _windows_reference(
    projected: torch.Tensor,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    replay_lens: torch.Tensor,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    ring, kernel, channels = params.conv_states, shape.kernel, shape.conv_channels
    entries = ring.shape[1]
    windows = slice(metadata.num_windows)
    positions, slots = metadata.context_lens[windows], metadata.state_slots[windows]
    first_tokens = metadata.query_start_loc[windows]
    sizes = torch.where(positions < 0, 1, metadata.query_start_loc.diff()[windows])  # whatever padding there is
    replay_lens = torch.where(positions > 0, replay_lens, 0)
    if int(replay_lens.min()) < 0 or kernel - 1 + int((replay_lens + sizes).max()) > entries:
        raise ValueError(
            f"windows of {sizes.tolist()} tokens after {replay_lens.tolist()} tokens to replay do not fit into a ring "
            f"of {entries} entries beside {kernel - 1} earlier inputs"
        )
    max_replay, max_size = int(replay_lens.max()), int(sizes.max())

    # Each window's inputs, from those before the first token that any window replays.
    earlier_positions = positions[:, None] + torch.arange(1 - kernel - max_replay, 0, device=ring.device)
    earlier = ring[slots[:, None], earlier_positions % entries].masked_fill((earlier_positions < 0)[:, :, None], 0)
    tokens = (first_tokens[:, None] + torch.arange(max_size, device=ring.device)).clamp(max=len(projected) - 1)
    new_inputs = torch.cat([projected[:, :channels], projected[:, -2 * shape.heads :]], 1)
    inputs = torch.cat([earlier, new_inputs[tokens]], 1)
    convolved = conv_reference(inputs[:, :, :channels], params.conv)
    gates = gates_reference(inputs[:, kernel - 1 :].flatten(0, 1), params, shape)
    rule_inputs = [
        values.unflatten(0, convolved.shape[:2])
        for values in (*heads_reference(convolved.flatten(0, 1), shape), *gates)
    ]

    out[: int(metadata.query_start_loc[metadata.num_windows])] = 0  # of padding
    state = torch.where((positions > 0)[:, None, None, None], params.recurrent_states[slots], 0)
    for step, token in enumerate(range(-max_replay, max_size)):
        is_active = (positions >= 0) & (token >= -replay_lens) & (token < sizes)
        query, key, value, g, beta = (values[:, step] for values in rule_inputs)
        output, next_state = delta_rule_reference(query, key, value, g, beta, state)
        state = torch.where(is_active[:, None, None, None], next_state, state)
        if token >= 0:
            rows = tokens[is_active, token]
            out[rows] = gated_norm_reference(output[is_active], projected[rows], params, shape)
            ring[slots[is_active], (positions[is_active] + token) % entries] = new_inputs[rows]
        if token == 0:
            params.recurrent_states[slots[is_active]] = state[is_active]


@triton.jit
def _convolve(
    ring_ptr,
    window_ptr,
    conv_weight,
    columns,
    position,
    tokens,
    is_token,
    stride,
    KERNEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    REPLAY: tl.constexpr,
):
    """Return the convolution of tokens followed by SiLU, rounded as in the reference: [TOKENS, DIM] float32.

    The window's first token is at `position` and has its inputs at `window_ptr`. `tokens` [TOKENS, 1] count from there.
    Inputs of earlier tokens are in the ring; with REPLAY all are. columns: [DIM]; is_token: [TOKENS, 1].
    """
    sums = tl.zeros((tokens.shape[0], columns.shape[0]), tl.float32)
    for tap in tl.static_range(KERNEL):
        offset = tokens - (KERNEL - 1) + tap
        entry_ptrs = ring_ptr + (position + offset + ENTRIES) % ENTRIES * COLUMNS + columns[None, :]
        inputs = tl.load(entry_ptrs, is_token & (offset < 0) & (position + offset >= 0), other=0.0)
        if not REPLAY:
            new = tl.load(window_ptr + offset * stride + columns[None, :], is_token & (offset >= 0), other=0.0)
            inputs = tl.where(offset < 0, inputs, new)
        weight = tl.load(conv_weight + columns * KERNEL + tap)  # of one dimension: see `_window_kernel`
        sums += inputs.to(tl.float32) * weight.to(tl.float32)[None, :]
    return silu(sums).to(inputs.dtype).to(tl.float32)


@triton.jit
def _convolve_heads(
    ring_ptr,
    window_ptr,
    conv_weight,
    query_channels,
    key_channels,
    value_channels,
    position,
    tokens,
    is_token,
    stride,
    KERNEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    REPLAY: tl.constexpr,
):
    """Return the normalized queries and keys, and the values of one head: [TOKENS, DIM] each, see `_convolve`."""
    queries = _convolve(
        *(ring_ptr, window_ptr, conv_weight, query_channels, position, tokens, is_token, stride),
        *(KERNEL, ENTRIES, COLUMNS, REPLAY),
    )
    keys = _convolve(
        *(ring_ptr, window_ptr, conv_weight, key_channels, position, tokens, is_token, stride),
        *(KERNEL, ENTRIES, COLUMNS, REPLAY),
    )
    values = _convolve(
        *(ring_ptr, window_ptr, conv_weight, value_channels, position, tokens, is_token, stride),
        *(KERNEL, ENTRIES, COLUMNS, REPLAY),
    )
    return l2_normalize_rows(queries), l2_normalize_rows(keys), values


@triton.jit
def _row(tile, row):
    """Return a row of a tile [ROWS, DIM] or [ROWS]: the sum of the tile without its other rows."""
    index = tl.arange(0, tile.shape[0])
    if len(tile.shape) == 2:
        index = index[:, None]
    return tl.sum(tl.where(index == row, tile, 0.0), 0)


# Indices are slices of a longer tensor, at any alignment.
@triton.jit(do_not_specialize=["positions", "slots", "replay_lens", "query_start_loc"])
def _window_kernel(
    projected,
    conv_weight,
    a_log,
    dt_bias,
    norm,
    conv_states,
    states,
    positions,
    slots,
    replay_lens,
    query_start_loc,
    out,
    eps,
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
    PDL: tl.constexpr,
):
    """Each program computes one value head of one window, with the head's whole state in registers.

    Tokens are convolved together, before the loops over them. With loads in the loops Triton gives each warp the whole
    state, which is four times what it has registers for (H200, one window: 458 us instead of 14).
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    DRAFTS: tl.constexpr = (ENTRIES - KERNEL) // 2
    # A tile of fewer rows than warps has another layout, which the state would get.
    ROWS: tl.constexpr = max(4, triton.next_power_of_2(1 + DRAFTS))
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    pdl_launch_dependents(PDL)
    position = tl.load(positions + sequence).to(tl.int32)
    slot = tl.load(slots + sequence)
    first_token = tl.load(query_start_loc + sequence)
    size = (tl.load(query_start_loc + sequence + 1) - first_token).to(tl.int32)
    replay_len = tl.where(position > 0, tl.load(replay_lens + sequence), 0).to(tl.int32)
    key_dims, value_dims = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    value_columns = head * VALUE_DIM + value_dims
    out_ptrs = out + first_token * (HEADS * VALUE_DIM) + value_columns
    window_ptr = projected + first_token * projected_stride

    # The state, the ring and the replay need nothing that a recent kernel wrote: it runs while the previous one ends.
    state_ptr = states + slot * state_stride + (head * KEY_DIM + key_dims[:, None]) * VALUE_DIM + value_dims[None, :]
    state = tl.load(state_ptr, position > 0, other=0.0)
    ring_ptr = conv_states + slot * conv_stride
    query_channels = head // GROUP * KEY_DIM + key_dims
    key_channels, value_channels = KEYS + query_channels, 2 * KEYS + value_columns
    head_a_log, head_dt_bias = tl.load(a_log + head), tl.load(dt_bias + head)
    norm_weight = tl.load(norm + value_dims).to(tl.float32)
    if DRAFTS > 0:
        index = tl.arange(0, ROWS)
        tokens, is_token = (index - replay_len)[:, None], (index < replay_len)[:, None]
        _queries, keys, values = _convolve_heads(
            *(ring_ptr, window_ptr, conv_weight, query_channels, key_channels, value_channels),
            *(position, tokens, is_token, projected_stride, KERNEL, ENTRIES, COLUMNS, True),
        )
        gates_ptrs = ring_ptr + (position - replay_len + index + ENTRIES) % ENTRIES * COLUMNS + CHANNELS + head
        b = tl.load(gates_ptrs, index < replay_len, other=0.0).to(tl.float32)
        a = tl.load(gates_ptrs + HEADS, index < replay_len, other=0.0).to(tl.float32)
        for step in range(replay_len):
            key = _row(keys, step)
            _, state = delta_rule(
                state, key, key, _row(values, step), _row(a, step), _row(b, step), head_a_log, head_dt_bias
            )
    pdl_wait(PDL)
    if position < 0:
        for token in range(size):
            tl.store(out_ptrs + token * (HEADS * VALUE_DIM), tl.zeros((VALUE_DIM,), out.dtype.element_ty))
        return

    index = tl.arange(0, ROWS)
    tokens, is_token = index[:, None], (index < size)[:, None]
    queries, keys, values = _convolve_heads(
        *(ring_ptr, window_ptr, conv_weight, query_channels, key_channels, value_channels),
        *(position, tokens, is_token, projected_stride, KERNEL, ENTRIES, COLUMNS, False),
    )
    token_ptrs = window_ptr + tokens * projected_stride
    gates = silu(tl.load(token_ptrs + CHANNELS + value_columns[None, :], is_token, other=0.0).to(tl.float32))
    gates_ptrs = window_ptr + index * projected_stride + CHANNELS + HEADS * VALUE_DIM + head
    b = tl.load(gates_ptrs, index < size, other=0.0)
    a = tl.load(gates_ptrs + HEADS, index < size, other=0.0)
    # No program reads these entries in this step: the heads that share a key head need no order among them.
    entries = ring_ptr + (position + index) % ENTRIES * COLUMNS
    tl.store(
        entries[:, None] + value_channels[None, :],
        tl.load(token_ptrs + value_channels[None, :], is_token, other=0.0),
        is_token,
    )
    tl.store(entries + CHANNELS + head, b, index < size)
    tl.store(entries + CHANNELS + HEADS + head, a, index < size)
    if head % GROUP == 0:
        new_queries = tl.load(token_ptrs + query_channels[None, :], is_token, other=0.0)
        tl.store(entries[:, None] + query_channels[None, :], new_queries, is_token)
        tl.store(
            entries[:, None] + key_channels[None, :],
            tl.load(token_ptrs + key_channels[None, :], is_token, other=0.0),
            is_token,
        )

    a, b = a.to(tl.float32), b.to(tl.float32)
    for token in range(size):
        query, key, value = _row(queries, token) * (KEY_DIM**-0.5), _row(keys, token), _row(values, token)
        output, state = delta_rule(state, query, key, value, _row(a, token), _row(b, token), head_a_log, head_dt_bias)
        if token == 0:
            tl.store(state_ptr, state)
        output *= tl.rsqrt(tl.sum(output * output, 0) / VALUE_DIM + eps) * norm_weight * _row(gates, token)
        tl.store(out_ptrs + token * (HEADS * VALUE_DIM), output.to(out.dtype.element_ty))
