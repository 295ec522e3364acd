"""The causal convolution before Gated DeltaNet, of chunks of prompts; queries and keys come out normalised.

A kernel of its own: beside a chunk's products its many loads would take the registers that hide their waiting.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.delta import CHUNK, DeltaShape, DeltaWeights, silu, unit_rows
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

_ROWS = 32  # tokens of a program: with 128 channels 32 numbers a thread


def convolve_chunks(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    shape: DeltaShape,
) -> torch.Tensor:
    """For `delta_prefill`'s arguments, in Triton: [tokens, conv_channels] in the type of `projected`.

    Normalised queries | keys | values; tokens that no chunk covers are left unwritten.
    """
    convolved = torch.empty(len(projected), shape.conv_channels, dtype=projected.dtype, device=projected.device)
    _convolve_kernel[(2 * shape.key_heads + shape.heads, CHUNK // _ROWS, len(chunks))](
        projected,
        weights.conv,
        conv_states,
        starts,
        slots,
        first_tokens,
        chunks,
        convolved,
        projected.stride(0),
        conv_states.stride(0),
        **shape.constants(),
        CHUNK=CHUNK,
        ROWS=_ROWS,
        num_warps=4,
    )
    return convolved


@triton.jit
def _convolved_rows(
    inputs,
    ring,
    conv,
    channels,
    earlier,
    start,
    count,
    stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """[ROWS, DIM] float32, rounded to the type of the inputs; the first is at `inputs`.

    earlier: tokens of the segment before it, in front of it in the step; before those the slot holds its last inputs.
    """
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, channels.shape[0]), tl.float32)
    if earlier == 0:
        for tap in tl.static_range(KERNEL - 1):
            position = start + row - (KERNEL - 1 - tap)
            in_slot = (position < start) & (position >= 0) & (row < count)
            entry = ring + (position + KERNEL) % KERNEL * CHANNELS
            values = tl.load(entry[:, None] + channels[None, :], in_slot[:, None], other=0.0)
            total += values.to(tl.float32) * tl.load(conv + channels * KERNEL + tap).to(tl.float32)[None, :]
    for tap in tl.static_range(KERNEL):
        token = row - (KERNEL - 1 - tap)
        in_step = (earlier + token >= 0) & (row < count)
        values = tl.load(inputs + (token * stride)[:, None] + channels[None, :], in_step[:, None], other=0.0)
        total += values.to(tl.float32) * tl.load(conv + channels * KERNEL + tap).to(tl.float32)[None, :]
    return silu(total).to(inputs.dtype.element_ty).to(tl.float32)


# Indices may lie at any address of a longer tensor.
@triton.jit(do_not_specialize=["starts", "slots", "first_tokens", "chunks"])
def _convolve_kernel(
    projected,
    conv,
    conv_states,
    starts,
    slots,
    first_tokens,
    chunks,
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
):
    """Some tokens of a chunk for one head of the queries, keys or values, which lie side by side in this order."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    head = tl.program_id(0)
    segment = tl.load(chunks + tl.program_id(2) * 2).to(tl.int64)
    earlier = tl.load(chunks + tl.program_id(2) * 2 + 1) * CHUNK + tl.program_id(1) * ROWS
    first = tl.load(first_tokens + segment) + earlier
    count = (tl.load(first_tokens + segment + 1) - first).to(tl.int32)
    if count <= 0:
        return
    start = tl.load(starts + segment).to(tl.int32)
    inputs = projected + first * projected_stride
    ring = conv_states + tl.load(slots + segment) * conv_stride
    row = tl.arange(0, ROWS)
    inside = (row < count)[:, None]
    outputs = convolved + (first + row)[:, None] * CHANNELS
    if head < 2 * KEY_HEADS:
        of_key = head * KEY_DIM + tl.arange(0, KEY_DIM)
        key = _convolved_rows(
            inputs, ring, conv, of_key, earlier, start, count, projected_stride, CHANNELS, KERNEL, ROWS
        )
        key = unit_rows(key) * tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
        tl.store(outputs + of_key[None, :], key.to(convolved.dtype.element_ty), inside)
    else:
        of_value = 2 * KEYS + (head - 2 * KEY_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
        value = _convolved_rows(
            inputs, ring, conv, of_value, earlier, start, count, projected_stride, CHANNELS, KERNEL, ROWS
        )
        tl.store(outputs + of_value[None, :], value.to(convolved.dtype.element_ty), inside)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    shape = DeltaShape(*model.delta)
    projected, weights, slots = shape.examples(512, dtype)
    index = torch.empty(4, dtype=torch.int64, device="meta")
    chunks = torch.empty(8, 2, dtype=torch.int32, device="meta")
    return [lambda: convolve_chunks(projected, weights, slots[0], index, index, index, chunks, shape)]
