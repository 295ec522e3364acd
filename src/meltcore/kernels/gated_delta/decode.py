"""Gated DeltaNet for one new token of each sequence (decode).

One kernel takes a token from the projection to the input of the output projection. It is bound by the recurrent states,
64 KiB per head that are read and written once. A program computes a whole head. Splitting its values would leave the
norm, which is over all of them, to another kernel or to the program that finishes last. Either takes longer than one SM
needs to move 64 KiB.
"""

from __future__ import annotations

import torch

from meltcore.kernels.gated_delta.common import (
    GatedDeltaParams,
    GatedDeltaShape,
    constants,
    conv_reference,
    decay_and_beta,
    delta_rule_reference,
    gated_norm_reference,
    gates_reference,
    heads_reference,
    l2_normalize_rows,
    silu,
)
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait, use_triton


def gated_delta_decode(
    projected: torch.Tensor,
    params: GatedDeltaParams,
    positions: torch.Tensor,
    slots: torch.Tensor,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    """Compute one new token per sequence into `out` and update the states.

    Args:
        projected: [sequences, width].
        params: the parameters and states of the layer.
        positions: [sequences] int64, the positions of the new tokens. Position -1 is the padding of a CUDA graph, which
            uses slot 0. Its output is zeros.
        slots: [sequences] int64, the slots of the sequences' states.
        shape: the sizes of the layer.
        out: [sequences, heads * value_dim].
    """
    if not use_triton(projected):
        _decode_reference(projected, params, positions, slots, shape, out)
        return
    if len(projected) == 0:
        return
    conv_states, states = params.conv_states, params.recurrent_states
    # Heads vary fastest: those of a sequence are neighbors.
    _decode_kernel[(shape.heads, len(projected))](
        *(projected, params.conv, params.a_log, params.dt_bias, params.norm, conv_states, states, positions, slots),
        *(out, params.eps, projected.stride(0), conv_states.stride(0), states.stride(0)),
        **constants(shape),
        # A thread has up to 128 numbers of the state. Twice the warps, with half as many each, take 30 % longer: each
        # sum over the state goes through all of them (H200, 64 sequences, 2026-11-21).
        num_warps=max(4, shape.key_dim * shape.value_dim // 4096),
        **pdl_options(projected.device),
    )


def _decode_reference(
    projected: torch.Tensor,
    params: GatedDeltaParams,
    positions: torch.Tensor,
    slots: torch.Tensor,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    conv_states, states = params.conv_states, params.recurrent_states
    new_input = projected[:, : shape.conv_channels]
    earlier_positions = positions[:, None] + torch.arange(1 - shape.kernel, 0, device=positions.device)
    window = conv_states[slots[:, None], earlier_positions % shape.kernel].masked_fill(
        (earlier_positions < 0)[:, :, None], 0
    )
    convolved = conv_reference(torch.cat([window, new_input[:, None]], 1), params.conv)[:, 0]
    conv_states[slots, positions % shape.kernel] = new_input

    state = torch.where((positions > 0)[:, None, None, None], states[slots], 0)
    g, beta = gates_reference(projected, params, shape)
    output, states[slots] = delta_rule_reference(*heads_reference(convolved, shape), g, beta, state)
    out.copy_(gated_norm_reference(output, projected, params, shape))
    out.masked_fill_((positions < 0)[:, None], 0)


@triton.jit
def _conv_over_ring(ring_ptr, conv_weight, channels, position, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """Return the convolution's sum over the inputs in the ring: [ROWS, DIM] float32. channels: [ROWS, DIM]."""
    tap = tl.arange(0, triton.next_power_of_2(KERNEL))[:, None, None]
    input_pos = position - (KERNEL - 1) + tap
    entry_ptrs = ring_ptr + (input_pos + KERNEL) % KERNEL * CHANNELS + channels[None, :, :]
    inputs = tl.load(entry_ptrs, (input_pos >= 0) & (tap < KERNEL - 1), other=0.0)
    weights = tl.load(conv_weight + channels[None, :, :] * KERNEL + tap, tap < KERNEL - 1, other=0.0)
    return tl.sum(inputs.to(tl.float32) * weights.to(tl.float32), 0)


@triton.jit
def _add_new_input(conv_sum, new_input, new_weight):
    """Add the new input to the convolution's sum over earlier inputs and apply SiLU, rounded as in the reference."""
    conv_sum += new_input.to(tl.float32) * new_weight.to(tl.float32)
    return silu(conv_sum).to(new_input.dtype).to(tl.float32)


@triton.jit
def delta_rule(state, query, key, value, a, b, a_log, dt_bias):
    """Return a token's output [VALUE_DIM] and the state [KEY_DIM, VALUE_DIM] after the token."""
    g, beta = decay_and_beta(a, b, a_log, dt_bias)
    decay = tl.exp(g)
    # The query reads the old state and the update separately, so that both sums over the state are one pass.
    state_times_key = tl.sum(state * key[:, None], 0)
    state_times_query = tl.sum(state * query[:, None], 0)
    update = beta * (value - decay * state_times_key)
    output = decay * state_times_query + tl.sum(query * key, 0) * update
    return output, decay * state + key[:, None] * update[None, :]


# Indices are slices of a longer tensor, at any alignment.
@triton.jit(do_not_specialize=["positions", "slots"])
def _decode_kernel(
    projected,
    conv_weight,
    a_log,
    dt_bias,
    norm,
    conv_states,
    states,
    positions,
    slots,
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
    PDL: tl.constexpr,
):
    """Each program computes one value head of one sequence, with the head's whole state in registers."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    pdl_launch_dependents(PDL)
    position = tl.load(positions + sequence).to(tl.int32)
    slot = tl.load(slots + sequence)
    key_dims, value_dims = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    value_columns = head * VALUE_DIM + value_dims
    out_ptrs = out + sequence * (HEADS * VALUE_DIM) + value_columns

    # All that no recent kernel wrote, everything but the projection, is loaded before the previous kernel has ended.
    state_ptr = states + slot * state_stride + (head * KEY_DIM + key_dims[:, None]) * VALUE_DIM + value_dims[None, :]
    state = tl.load(state_ptr, position > 0, other=0.0)
    ring_ptr = conv_states + slot * conv_stride
    # Query and key are rows of one tile: Triton would not distribute one with fewer elements than threads.
    part_idx = tl.arange(0, 2)[:, None]
    key_channels = part_idx * KEYS + head // GROUP * KEY_DIM + key_dims[None, :]
    value_channels = 2 * KEYS + value_columns[None, :]
    query_and_key = _conv_over_ring(ring_ptr, conv_weight, key_channels, position, CHANNELS, KERNEL)
    value = _conv_over_ring(ring_ptr, conv_weight, value_channels, position, CHANNELS, KERNEL)
    new_key_weight = tl.load(conv_weight + key_channels * KERNEL + KERNEL - 1)
    new_value_weight = tl.load(conv_weight + value_channels * KERNEL + KERNEL - 1)
    head_a_log, head_dt_bias = tl.load(a_log + head), tl.load(dt_bias + head)
    norm_weight = tl.load(norm + value_dims).to(tl.float32)
    pdl_wait(PDL)
    if position < 0:
        tl.store(out_ptrs, tl.zeros((VALUE_DIM,), out.dtype.element_ty))
        return

    token_ptr = projected + sequence * projected_stride
    new_query_and_key, new_value = tl.load(token_ptr + key_channels), tl.load(token_ptr + value_channels)
    gate = tl.load(token_ptr + CHANNELS + value_columns).to(tl.float32)
    b = tl.load(token_ptr + CHANNELS + HEADS * VALUE_DIM + head).to(tl.float32)
    a = tl.load(token_ptr + CHANNELS + HEADS * VALUE_DIM + HEADS + head).to(tl.float32)
    # No program reads this entry in this step: the heads that share a key head need no order among them.
    entry_ptr = ring_ptr + position % KERNEL * CHANNELS
    tl.store(entry_ptr + value_channels, new_value)
    if head % GROUP == 0:
        tl.store(entry_ptr + key_channels, new_query_and_key)

    query_and_key = l2_normalize_rows(_add_new_input(query_and_key, new_query_and_key, new_key_weight))
    value = tl.sum(_add_new_input(value, new_value, new_value_weight), 0)
    query = tl.sum(tl.where(part_idx == 0, query_and_key, 0.0), 0) * (KEY_DIM**-0.5)
    key = tl.sum(tl.where(part_idx == 1, query_and_key, 0.0), 0)
    output, state = delta_rule(state, query, key, value, a, b, head_a_log, head_dt_bias)
    tl.store(state_ptr, state)
    output *= tl.rsqrt(tl.sum(output * output, 0) / VALUE_DIM + eps) * norm_weight * silu(gate)
    tl.store(out_ptrs, output.to(out.dtype.element_ty))
