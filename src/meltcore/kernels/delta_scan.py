"""The sequential part of Gated DeltaNet's prefill: each head's state goes through the chunks of its sequence.

A program carries some values of a head, columns of its state: they do not depend on each other. With names as in
kernels/delta_chunks.py a chunk takes the state S to

    u = T diag(beta) (v - exp(G) k S);    out = exp(G) q S + P u;    S <- exp(G_last) S + k^T (exp(G_last - G) u)

All of it is computed turned, with S as [values, keys] and tokens in columns. Every product then has what the one before
it left in registers on its left, where tensor cores take registers, and what was loaded on its right: nothing passes
through shared memory from one product to the next, and no barrier stands between them.

The gated norm, over all values of a head, is a kernel after this one, which turns its tokens into rows again.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.capability import capability, processors, shared_bytes
from meltcore.kernels.delta import CHUNK, DeltaShape, DeltaWeights, gated_norm
from meltcore.kernels.delta_chunks import Prepared
from meltcore.kernels.delta_places import chunk_place, chunk_places
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

# tl.dot takes no narrower columns.
_LEAST_VALUES = 16
_NARROW_VALUES = 64  # as many rows as 4 warps give a tensor core at once


class ScanLaunch(NamedTuple):
    """values: columns of a state that a program carries; stages: chunks that are on their way or being computed."""

    values: int
    stages: int

    @property
    def warps(self) -> int:
        return 4 if self.values <= _NARROW_VALUES else 8


def scan_launch(shape: DeltaShape, sequences: int, element_bytes: int, device: torch.device) -> ScanLaunch:
    """Whole heads where those are programs for about half of the processors: keys are read once a program."""
    values = shape.value_dim
    if element_bytes == 4:
        values = _LEAST_VALUES
    elif sequences * shape.heads < 0.45 * processors(device):
        values = min(values, _NARROW_VALUES)
    a_stage = (2 * shape.key_dim + 2 * CHUNK + values) * CHUNK * element_bytes
    return ScanLaunch(values, max(1, min(3, (shared_bytes(device) - 2**13) // a_stage)))


def scan_chunks(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    prepared: Prepared,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first_tokens: torch.Tensor,
    decodes: int,
    shape: DeltaShape,
    launch: ScanLaunch | None = None,
) -> torch.Tensor:
    """For `delta_prefill`'s arguments and what was prepared, in Triton: the states and the convolution's rings.

    Returns what queries read, in the type of `projected`: [places, heads, value_dim, CHUNK].
    """
    sequences = len(slots) - decodes
    launch = launch or scan_launch(shape, sequences, projected.element_size(), projected.device)
    mixed = projected.new_empty(len(prepared.scales), shape.heads, shape.value_dim, CHUNK)
    _scan_kernel[(shape.heads, shape.value_dim // launch.values, sequences)](
        projected,
        convolved,
        *prepared,
        conv_states,
        states,
        starts,
        slots,
        first_tokens,
        mixed,
        decodes,
        projected.stride(0),
        conv_states.stride(0),
        states.stride(0),
        **shape.constants(),
        CHUNK=CHUNK,
        VALUES=launch.values,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return mixed


def norm_chunks(
    projected: torch.Tensor,
    mixed: torch.Tensor,
    weights: DeltaWeights,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    decodes: int,
    shape: DeltaShape,
    out: torch.Tensor,
) -> None:
    """The gated norm of what `scan_chunks` returned, into the rows of `out` that chunks cover."""
    _norm_kernel[(shape.heads, len(chunks))](
        projected,
        mixed,
        weights.norm,
        first_tokens,
        chunks,
        out,
        weights.eps,
        decodes,
        projected.stride(0),
        **shape.constants(),
        CHUNK=CHUNK,
        NATIVE=capability(projected.device) > 0,
        num_warps=4,
    )


@triton.jit
def _keep_inputs(inputs, ring, channels, start, count, stride, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """Store a segment's last inputs, [DIM] of the channels, where later steps look for them."""
    for back in tl.static_range(KERNEL):
        token = count - 1 - back
        kept = tl.load(inputs + token.to(tl.int64) * stride + channels, token >= 0, other=0.0)
        entry = ring + (start + tl.maximum(token, 0)) % KERNEL * CHANNELS
        tl.store(entry + channels, kept, token >= 0)


@triton.jit
def _changed(held, key, value, change, stays):
    """What a chunk's tokens change of the state that they began with, before it fades: [VALUES, CHUNK] float32."""
    known = tl.dot(held, tl.trans(key), input_precision="ieee") * -stays
    update = tl.dot(tl.trans(value), tl.trans(change), input_precision="ieee")
    return tl.dot(known.to(held.dtype), tl.trans(change), update, input_precision="ieee")


# Indices may lie at any address of a longer tensor.
@triton.jit(do_not_specialize=["starts", "slots", "first_tokens", "decodes"])
def _scan_kernel(
    projected,
    convolved,
    changes,
    reads,
    scales,
    conv_states,
    states,
    starts,
    slots,
    first_tokens,
    mixeds,
    decodes,
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
    """Some values of one head of one segment, from its first chunk to its last."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    dtype: tl.constexpr = convolved.dtype.element_ty
    head = tl.program_id(0)
    # The engine sorts segments by size; the longest begin first.
    segment = (decodes + tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    segment_first = tl.load(first_tokens + segment)
    count = (tl.load(first_tokens + segment + 1) - segment_first).to(tl.int32)
    start = tl.load(starts + segment).to(tl.int32)
    slot = tl.load(slots + segment)

    row, key_dims = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    value_dims = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    # Where a chunk's tiles for this head begin, and what lies where in them.
    key_tile = head // GROUP * (CHUNK * KEY_DIM)
    value_tile = CHUNK * (2 * KEYS + head * VALUE_DIM)
    keys_at = row[:, None] * KEY_DIM + key_dims[None, :]
    values_at = row[:, None] * VALUE_DIM + value_dims[None, :]
    pairs_at = row[:, None] * CHUNK + row[None, :]
    mixed_at = value_dims[:, None] * CHUNK + row[None, :]
    state_at = states + slot * state_stride + (head * KEY_DIM + key_dims[None, :]) * VALUE_DIM + value_dims[:, None]
    state = tl.load(state_at, start > 0, other=0.0)
    place = chunk_place(first_tokens, segment, 0, decodes, CHUNK)
    for _ in range(0, count, CHUNK):
        tiles = convolved + place * (CHUNK * CHANNELS)
        of_head = place * HEADS + head
        key = tl.load(tiles + CHUNK * KEYS + key_tile + keys_at)
        value = tl.load(tiles + value_tile + values_at)
        change = tl.load(changes + of_head * (CHUNK * CHUNK) + pairs_at)
        stays = tl.load(scales + of_head * (2 * CHUNK) + row)[None, :]
        to_end = tl.load(scales + of_head * (2 * CHUNK) + CHUNK + row)[None, :]
        stay = tl.load(scales + of_head * (2 * CHUNK) + CHUNK - 1)
        held = state.to(dtype)
        update = _changed(held, key, value, change, stays)
        # Loaded as late as this where nothing runs ahead: least shared memory.
        query = tl.load(tiles + key_tile + keys_at)
        mixed = tl.dot(held, tl.trans(query), input_precision="ieee") * stays
        read = tl.load(reads + of_head * (CHUNK * CHUNK) + pairs_at)
        mixed = tl.dot(update.to(dtype), tl.trans(read), mixed, input_precision="ieee")
        state = tl.dot((update * to_end).to(dtype), key, state * stay, input_precision="ieee")
        tl.store(mixeds + of_head * (CHUNK * VALUE_DIM) + mixed_at, mixed.to(dtype))
        place += 1
    tl.store(state_at, state)

    inputs = projected + segment_first * projected_stride
    ring = conv_states + slot * conv_stride
    channels = 2 * KEYS + head * VALUE_DIM + value_dims
    _keep_inputs(inputs, ring, channels, start, count, projected_stride, CHANNELS, KERNEL)
    if (head % GROUP == 0) & (tl.program_id(1) == 0):
        of_key = head // GROUP * KEY_DIM + key_dims
        _keep_inputs(inputs, ring, of_key, start, count, projected_stride, CHANNELS, KERNEL)
        _keep_inputs(inputs, ring, KEYS + of_key, start, count, projected_stride, CHANNELS, KERNEL)


@triton.jit(do_not_specialize=["first_tokens", "chunks", "decodes"])
def _norm_kernel(
    projected,
    mixeds,
    norm,
    first_tokens,
    chunks,
    out,
    eps,
    decodes,
    projected_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One head of a chunk, whose tokens become rows here. The last chunks come first: they may still be in the L2."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    head = tl.program_id(0)
    chunk = tl.num_programs(1) - 1 - tl.program_id(1)
    segment = tl.load(chunks + chunk * 2).to(tl.int64)
    number = tl.load(chunks + chunk * 2 + 1)
    first = tl.load(first_tokens + segment) + number * CHUNK
    count = tl.load(first_tokens + segment + 1) - first
    place = chunk_place(first_tokens, segment, number, decodes, CHUNK)
    row, column = tl.arange(0, CHUNK), tl.arange(0, VALUE_DIM)
    inside = (row < count)[:, None]
    turned = mixeds + (place * HEADS + head) * (VALUE_DIM * CHUNK) + column[:, None] * CHUNK + row[None, :]
    mixed = tl.trans(tl.load(turned)).to(tl.float32)
    gates_at = (first + row)[:, None] * projected_stride + CHANNELS + head * VALUE_DIM + column[None, :]
    gate = tl.load(projected + gates_at, inside, other=0.0).to(tl.float32)
    weight = tl.load(norm + column).to(tl.float32)[None, :]
    result = gated_norm(mixed, gate, weight, eps, VALUE_DIM, NATIVE)
    rows = out + ((first + row)[:, None] * HEADS + head) * VALUE_DIM + column[None, :]
    tl.store(rows, result.to(out.dtype.element_ty), inside)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    shape = DeltaShape(*model.delta)
    projected, weights, caches = shape.examples(512, dtype)
    out = torch.empty(512, shape.heads * shape.value_dim, dtype=dtype, device="meta")
    chunks = torch.empty(8, 2, dtype=torch.int32, device="meta")

    def case(sequences: int) -> CompileCase:
        index = torch.empty(sequences, dtype=torch.int64, device="meta")
        places = chunk_places(512, sequences)
        convolved = torch.empty(places, shape.conv_channels * CHUNK, dtype=dtype, device="meta")
        pairs = torch.empty(places, shape.heads, CHUNK, CHUNK, dtype=dtype, device="meta")
        scales = torch.empty(places, shape.heads, 2, CHUNK, device="meta")
        prepared = Prepared(pairs, pairs, scales)

        def launch() -> None:
            mixed = scan_chunks(projected, convolved, prepared, *caches, index, index, index, 0, shape)
            norm_chunks(projected, mixed, weights, index, chunks, 0, shape, out)

        return launch

    return [case(1), case(256)]
