"""Gated DeltaNet of one new token of many sequences (decode).

One kernel takes a token from the fused product to the input of the output product. It is bound by the states, 64 KiB a
head that are read once and written once. A program has a whole head: cutting values would leave the norm, which is over
all of them, to another kernel or to whichever program ends last, and either takes longer than one processor does to
move 64 KiB.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.delta import (
    DeltaShape,
    DeltaWeights,
    convolve_torch,
    delta_step_torch,
    gated_norm_torch,
    gates,
    gates_torch,
    heads_torch,
    require_layout,
    silu,
    unit_rows,
)
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps


def delta_decode(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_heads: int,
    out: torch.Tensor,
) -> None:
    """projected: [sequences, width], see `DeltaShape`; positions, slots: [sequences] int64, the new token's.

    out: [sequences, heads * value_dim]. A position of -1 is the padding of a CUDA graph, on slot 0: zeros come out.
    """
    shape = DeltaShape.of(weights, states, key_heads)
    require_layout(projected, weights, conv_states, states, shape)
    body = _decode_triton if use_triton(projected) else _decode_torch
    body(projected, weights, conv_states, states, positions, slots, shape, out)


def _decode_torch(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    shape: DeltaShape,
    out: torch.Tensor,
) -> None:
    new = projected[:, : shape.conv_channels]
    earlier = positions[:, None] + torch.arange(1 - shape.kernel, 0, device=positions.device)
    window = conv_states[slots[:, None], earlier % shape.kernel].masked_fill((earlier < 0)[:, :, None], 0)
    convolved = convolve_torch(torch.cat([window, new[:, None]], 1), weights.conv)[:, 0]
    conv_states[slots, positions % shape.kernel] = new

    begun = (positions > 0)[:, None, None, None]
    state = torch.where(begun, states[slots], 0)
    g, beta = gates_torch(projected, weights, shape)
    mixed, states[slots] = delta_step_torch(*heads_torch(convolved, shape), g, beta, state)
    out.copy_(gated_norm_torch(mixed, projected, weights, shape))
    out.masked_fill_((positions < 0)[:, None], 0)


def _warps(shape: DeltaShape) -> int:
    """A thread holds up to 128 numbers of the state. Twice the warps, with half as many each, take 30 % longer: each
    sum over the state goes through all of them (H200, 64 sequences, 2026-11-21).
    """
    return max(4, shape.key_dim * shape.value_dim // 4096)


def _decode_triton(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    shape: DeltaShape,
    out: torch.Tensor,
) -> None:
    if len(projected) == 0:
        return
    overlap = overlaps(projected.device)
    # Heads vary fastest: those of a sequence lie side by side.
    _decode_kernel[(shape.heads, len(projected))](
        projected,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        conv_states,
        states,
        positions,
        slots,
        out,
        weights.eps,
        projected.stride(0),
        conv_states.stride(0),
        states.stride(0),
        **shape.constants(),
        OVERLAP=overlap,
        num_warps=_warps(shape),
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def _earlier(ring, conv, channels, position, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """The convolution's sum over what is in the ring, of [ROWS, DIM] channels: float32 of this shape."""
    tap = tl.arange(0, triton.next_power_of_2(KERNEL))[:, None, None]
    earlier = position - (KERNEL - 1) + tap
    entries = ring + (earlier + KERNEL) % KERNEL * CHANNELS + channels[None, :, :]
    inputs = tl.load(entries, (earlier >= 0) & (tap < KERNEL - 1), other=0.0)
    weights = tl.load(conv + channels[None, :, :] * KERNEL + tap, tap < KERNEL - 1, other=0.0)
    return tl.sum(inputs.to(tl.float32) * weights.to(tl.float32), 0)


@triton.jit
def _convolved(total, new, newest_weight):
    """`total` of the earlier inputs and the new one, rounded as the torch body does."""
    total += new.to(tl.float32) * newest_weight.to(tl.float32)
    return silu(total).to(new.dtype).to(tl.float32)


@triton.jit
def _delta_rule(state, query, key, value, a, b, log, bias):
    """A token's output, [VALUE_DIM], and the state [KEY_DIM, VALUE_DIM] after it."""
    g, beta = gates(a, b, log, bias)
    stays = tl.exp(g)
    # The query reads the old state and what is added to it, so that both sums over the state are one pass.
    held = tl.sum(state * key[:, None], 0)
    read = tl.sum(state * query[:, None], 0)
    change = beta * (value - stays * held)
    mixed = stays * read + tl.sum(query * key, 0) * change
    return mixed, stays * state + key[:, None] * change[None, :]


# Indices may lie at any address of a longer tensor.
@triton.jit(do_not_specialize=["positions", "slots"])
def _decode_kernel(
    projected,
    conv,
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
    OVERLAP: tl.constexpr,
):
    """One value head of one sequence, all of its state at once in registers."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + sequence).to(tl.int32)
    slot = tl.load(slots + sequence)
    key_dims, value_dims = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    of_value = head * VALUE_DIM + value_dims
    result = out + sequence * (HEADS * VALUE_DIM) + of_value

    # What no recent kernel wrote is asked for before the one in front has ended: all but the product.
    place = states + slot * state_stride + (head * KEY_DIM + key_dims[:, None]) * VALUE_DIM + value_dims[None, :]
    state = tl.load(place, position > 0, other=0.0)
    ring = conv_states + slot * conv_stride
    # Query and key are rows of one tile: of one with fewer elements than threads, Triton would not share out the work.
    which = tl.arange(0, 2)[:, None]
    key_channels = which * KEYS + head // GROUP * KEY_DIM + key_dims[None, :]
    value_channels = 2 * KEYS + of_value[None, :]
    both = _earlier(ring, conv, key_channels, position, CHANNELS, KERNEL)
    value = _earlier(ring, conv, value_channels, position, CHANNELS, KERNEL)
    newest_key_weight = tl.load(conv + key_channels * KERNEL + KERNEL - 1)
    newest_value_weight = tl.load(conv + value_channels * KERNEL + KERNEL - 1)
    log, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    weight = tl.load(norm + value_dims).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if position < 0:
        tl.store(result, tl.zeros((VALUE_DIM,), out.dtype.element_ty))
        return

    token = projected + sequence * projected_stride
    new_both, new_value = tl.load(token + key_channels), tl.load(token + value_channels)
    gate = tl.load(token + CHANNELS + of_value).to(tl.float32)
    b = tl.load(token + CHANNELS + HEADS * VALUE_DIM + head).to(tl.float32)
    a = tl.load(token + CHANNELS + HEADS * VALUE_DIM + HEADS + head).to(tl.float32)
    # Nobody reads this entry in this step: the heads that share a key head need no order among them.
    entry = ring + position % KERNEL * CHANNELS
    tl.store(entry + value_channels, new_value)
    if head % GROUP == 0:
        tl.store(entry + key_channels, new_both)

    both = unit_rows(_convolved(both, new_both, newest_key_weight))
    value = tl.sum(_convolved(value, new_value, newest_value_weight), 0)
    query = tl.sum(tl.where(which == 0, both, 0.0), 0) * (KEY_DIM**-0.5)
    key = tl.sum(tl.where(which == 1, both, 0.0), 0)
    mixed, state = _delta_rule(state, query, key, value, a, b, log, bias)
    tl.store(place, state)
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) / VALUE_DIM + eps) * weight * silu(gate)
    tl.store(result, mixed.to(out.dtype.element_ty))


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    shape = DeltaShape(*model.delta)
    projected, weights, slots = shape.examples(64, dtype)
    index = torch.empty(64, dtype=torch.int64, device="meta")
    out = torch.empty(64, shape.heads * shape.value_dim, dtype=dtype, device="meta")
    return [lambda: _decode_triton(projected, weights, *slots, index, index, shape, out)]
