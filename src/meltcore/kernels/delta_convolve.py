"""The causal convolution before Gated DeltaNet, of chunks of prompts; queries and keys come out normalised.

A kernel of its own: beside a chunk's products its many loads would take the registers that hide their waiting. Here a
thread has the same 8 channels of all tokens of its program, so it reads and widens each number once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.capability import capability
from meltcore.kernels.delta import CHUNK, DeltaShape, DeltaWeights, quick_silu, unit_rows
from meltcore.kernels.delta_places import chunk_place, chunk_places
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

# Tokens of a program. A thread keeps all inputs of its channels, and the KERNEL - 1 before them, which are read again:
# 16 leave room for fewer programs and take 12 % longer (H200, 2026-11-21).
_ROWS = 8
_CHANNELS = 1024  # of a program: 8 for each thread of 4 warps, 16 bytes


def convolve_chunks(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    decodes: int,
    shape: DeltaShape,
) -> torch.Tensor:
    """For `delta_prefill`'s arguments, in Triton: [places, conv_channels * CHUNK] in the type of `projected`.

    Of a chunk, whose place says `chunk_place`, first the normalised queries, then the keys, then the values, each head
    a tile [CHUNK, dim]; zeros stand where its segment has ended.
    """
    places = chunk_places(len(projected), len(slots) - decodes)
    convolved = projected.new_empty(places, shape.conv_channels * CHUNK)
    keys = min(_CHANNELS // shape.key_dim, triton.next_power_of_2(2 * shape.key_heads))
    values = min(_CHANNELS // shape.value_dim, triton.next_power_of_2(shape.heads))
    tiles = triton.cdiv(2 * shape.key_heads, keys) + triton.cdiv(shape.heads, values)
    _convolve_kernel[(tiles, CHUNK // _ROWS, len(chunks))](
        projected,
        weights.conv,
        conv_states,
        starts,
        slots,
        first_tokens,
        chunks,
        decodes,
        convolved,
        projected.stride(0),
        conv_states.stride(0),
        **shape.constants(),
        CHUNK=CHUNK,
        ROWS=_ROWS,
        KEYS_AT_ONCE=keys,
        VALUES_AT_ONCE=values,
        NATIVE=capability(projected.device) > 0,
        num_warps=4,
    )
    return convolved


@triton.jit
def _convolved_rows(
    inputs,
    ring,
    conv,
    outputs,
    channels,
    exists,
    scale,
    earlier,
    start,
    count,
    stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """ROWS tokens of the channels [HEADS, DIM], `count` of which exist, the first at `inputs`.

    outputs: where the first goes, [HEADS, DIM]; UNIT: its heads get the length `scale`, [HEADS, 1]. earlier: tokens of
    the segment before it, in front of it in the step; before those the slot holds its last inputs.
    """
    dtype: tl.constexpr = inputs.dtype.element_ty
    DIM: tl.constexpr = channels.shape[1]
    tap = tl.arange(0, triton.next_power_of_2(KERNEL))[None, None, :]
    of_taps = conv + channels[:, :, None] * KERNEL + tap
    weights = tl.load(of_taps, exists[:, :, None] & (tap < KERNEL), other=0.0).to(tl.float32)
    taps = tl.tuple(())
    for index in tl.static_range(KERNEL):
        taps += (tl.sum(tl.where(tap == index, weights, 0.0), 2),)

    window = tl.tuple(())
    for index in tl.static_range(KERNEL - 1):
        token = earlier - (KERNEL - 1) + index
        of_step = inputs - (KERNEL - 1 - index) * stride + channels
        of_slot = ring + (start + token + KERNEL) % KERNEL * CHANNELS + channels
        in_step = tl.load(of_step, exists & (token >= 0) & (count > 0), other=0.0)
        in_slot = tl.load(of_slot, exists & (token < 0) & (start + token >= 0), other=0.0)
        window += (tl.where(token < 0, in_slot, in_step),)
    # All are asked for before the first is stored: the compiler cannot know that nothing is written in between.
    for row in tl.static_range(ROWS):
        window += (tl.load(inputs + row * stride + channels, exists & (row < count), other=0.0),)
    for row in tl.static_range(ROWS):
        total = window[row].to(tl.float32) * taps[0]
        for index in tl.static_range(1, KERNEL):
            total += window[row + index].to(tl.float32) * taps[index]
        result = quick_silu(total, NATIVE).to(dtype)
        if UNIT:
            result = (unit_rows(result.to(tl.float32)) * scale).to(dtype)
        tl.store(outputs + row * DIM, tl.where(row < count, result, 0.0), exists)


# Indices may lie at any address of a longer tensor.
@triton.jit(do_not_specialize=["starts", "slots", "first_tokens", "chunks", "decodes"])
def _convolve_kernel(
    projected,
    conv,
    conv_states,
    starts,
    slots,
    first_tokens,
    chunks,
    decodes,
    convolved,
    projected_stride,
    conv_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS_AT_ONCE: tl.constexpr,
    VALUES_AT_ONCE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Some tokens of a chunk for some heads of queries and keys or of values, which lie side by side in this order."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    KEY_TILES: tl.constexpr = (2 * KEY_HEADS + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE
    tile = tl.program_id(0)
    done = tl.program_id(1) * ROWS
    segment = tl.load(chunks + tl.program_id(2) * 2).to(tl.int64)
    number = tl.load(chunks + tl.program_id(2) * 2 + 1)
    earlier = number * CHUNK + done
    first = tl.load(first_tokens + segment) + earlier
    count = (tl.load(first_tokens + segment + 1) - first).to(tl.int32)
    start = tl.load(starts + segment).to(tl.int32)
    inputs = projected + first * projected_stride
    ring = conv_states + tl.load(slots + segment) * conv_stride
    outputs = convolved + chunk_place(first_tokens, segment, number, decodes, CHUNK) * (CHUNK * CHANNELS)
    if tile < KEY_TILES:
        key_head = (tile * KEYS_AT_ONCE + tl.arange(0, KEYS_AT_ONCE))[:, None]
        key_dims = tl.arange(0, KEY_DIM)[None, :]
        _convolved_rows(
            *(inputs, ring, conv, outputs + (key_head * CHUNK + done) * KEY_DIM + key_dims),
            *(key_head * KEY_DIM + key_dims, key_head < 2 * KEY_HEADS),
            tl.where(key_head < KEY_HEADS, KEY_DIM**-0.5, 1.0),
            *(earlier, start, count, projected_stride, CHANNELS, KERNEL, ROWS),
            UNIT=True,
            NATIVE=NATIVE,
        )
    else:
        head = ((tile - KEY_TILES) * VALUES_AT_ONCE + tl.arange(0, VALUES_AT_ONCE))[:, None]
        value_dims = tl.arange(0, VALUE_DIM)[None, :]
        _convolved_rows(
            *(inputs, ring, conv, outputs + 2 * KEYS * CHUNK + (head * CHUNK + done) * VALUE_DIM + value_dims),
            *(2 * KEYS + head * VALUE_DIM + value_dims, head < HEADS, 1.0),
            *(earlier, start, count, projected_stride, CHANNELS, KERNEL, ROWS),
            UNIT=False,
            NATIVE=NATIVE,
        )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    shape = DeltaShape(*model.delta)
    projected, weights, slots = shape.examples(512, dtype)
    index = torch.empty(4, dtype=torch.int64, device="meta")
    chunks = torch.empty(8, 2, dtype=torch.int32, device="meta")
    return [lambda: convolve_chunks(projected, weights, slots[0], index, index, index, chunks, 0, shape)]
