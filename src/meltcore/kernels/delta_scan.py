"""The sequential part of Gated DeltaNet's prefill: each head's state goes through the chunks of its sequence.

A program carries some values of a head, columns of its state: they do not depend on each other. Few sequences are cut
into narrow columns, so that every processor has work; the gated norm, over all values of a head, is then a kernel after
this one. With names as in kernels/delta_chunks.py a chunk takes the state S to

    u = T diag(beta) (v - exp(G) k S);    out = exp(G) q S + P u;    S <- exp(G_last) S + k^T (exp(G_last - G) u)
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.capability import processors, shared_bytes
from meltcore.kernels.delta import CHUNK, DeltaShape, DeltaWeights, gated_norm
from meltcore.kernels.delta_chunks import Prepared
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

# tl.dot takes no narrower columns.
_LEAST_VALUES = 16
_NORM_ELEMENTS = 4096


class ScanLaunch(NamedTuple):
    """values: columns of a state that a program carries; stages: chunks that are on their way or being computed."""

    values: int
    stages: int


def scan_launch(shape: DeltaShape, sequences: int, element_bytes: int, device: torch.device) -> ScanLaunch:
    """As many values as leave a program for most processors: queries and keys are read once a program."""
    values = shape.value_dim
    while values > _LEAST_VALUES and sequences * shape.heads * shape.value_dim < 0.75 * values * processors(device):
        values //= 2
    values = min(values, 64 if element_bytes == 2 else 16)
    a_stage = (2 * shape.key_dim + 2 * CHUNK + values) * CHUNK * element_bytes
    held = (2 * CHUNK + shape.key_dim) * values * element_bytes
    stages = max(1, min(3, (shared_bytes(device) - held - 2**12) // a_stage))
    return ScanLaunch(values, stages)


def scan_chunks(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    prepared: Prepared,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first_tokens: torch.Tensor,
    decodes: int,
    shape: DeltaShape,
    out: torch.Tensor,
    launch: ScanLaunch | None = None,
) -> None:
    """For `delta_prefill`'s arguments and what was prepared, in Triton: outputs, states and the convolution's rings."""
    sequences = len(slots) - decodes
    launch = launch or scan_launch(shape, sequences, projected.element_size(), projected.device)
    normed = launch.values == shape.value_dim
    _scan_kernel[(shape.heads, shape.value_dim // launch.values, sequences)](
        projected,
        convolved,
        *prepared,
        weights.norm,
        conv_states,
        states,
        starts,
        slots,
        first_tokens,
        out,
        weights.eps,
        decodes,
        projected.stride(0),
        conv_states.stride(0),
        states.stride(0),
        **shape.constants(),
        CHUNK=CHUNK,
        VALUES=launch.values,
        NORMED=normed,
        num_warps=4,
        num_stages=launch.stages,
    )
    if not normed:
        rows = max(1, _NORM_ELEMENTS // shape.value_dim)
        _norm_kernel[(triton.cdiv((len(out) - decodes) * shape.heads, rows),)](
            projected,
            weights.norm,
            out,
            weights.eps,
            decodes,
            len(out),
            projected.stride(0),
            HEADS=shape.heads,
            VALUE_DIM=shape.value_dim,
            GATE=shape.conv_channels,
            ROWS=rows,
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


# Indices may lie at any address of a longer tensor.
@triton.jit(do_not_specialize=["starts", "slots", "first_tokens", "decodes"])
def _scan_kernel(
    projected,
    convolved,
    decays,
    changes,
    reads,
    norm,
    conv_states,
    states,
    starts,
    slots,
    first_tokens,
    out,
    eps,
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
    NORMED: tl.constexpr,
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
    # What lies where from a chunk's first token on, in 32 bits.
    of_head = row * HEADS + head
    keys_at = row[:, None] * CHANNELS + head // GROUP * KEY_DIM + key_dims[None, :]
    values_at = row[:, None] * CHANNELS + 2 * KEYS + head * VALUE_DIM + value_dims[None, :]
    pairs_at = of_head[:, None] * CHUNK + row[None, :]
    outputs_at = of_head[:, None] * VALUE_DIM + value_dims[None, :]
    place = states + slot * state_stride + (head * KEY_DIM + key_dims[:, None]) * VALUE_DIM + value_dims[None, :]
    state = tl.load(place, start > 0, other=0.0)
    for done in range(0, count, CHUNK):
        first = segment_first + done
        inside = row < count - done
        rows, heads = convolved + first * CHANNELS, first * HEADS
        key = tl.load(rows + KEYS + keys_at, inside[:, None], other=0.0)
        value = tl.load(rows + values_at, inside[:, None], other=0.0)
        change = tl.load(changes + heads * CHUNK + pairs_at, inside[:, None], other=0.0)
        decay = tl.load(decays + heads + of_head, inside, other=0.0)
        last = tl.load(decays + heads + (tl.minimum(count - done, CHUNK) - 1) * HEADS + head)
        held = state.to(dtype)
        stays = tl.exp(decay)[:, None]
        surprise = value.to(tl.float32) - stays * tl.dot(key, held, input_precision="ieee")
        update = tl.dot(change, surprise.to(dtype), input_precision="ieee")

        # Loaded as late as this where nothing runs ahead: least shared memory.
        query = tl.load(rows + keys_at, inside[:, None], other=0.0)
        mixed = tl.dot(query, held, input_precision="ieee") * stays
        read = tl.load(reads + heads * CHUNK + pairs_at, inside[:, None], other=0.0)
        mixed = tl.dot(read, update.to(dtype), mixed, input_precision="ieee")
        left = (tl.exp(last - decay)[:, None] * update).to(dtype)
        state = tl.dot(tl.trans(key), left, state * tl.exp(last), input_precision="ieee")

        if NORMED:
            gates_at = row[:, None] * projected_stride + CHANNELS + head * VALUE_DIM + value_dims[None, :]
            gate = tl.load(projected + first * projected_stride + gates_at, inside[:, None], other=0.0)
            weight = tl.load(norm + value_dims).to(tl.float32)[None, :]
            mixed = gated_norm(mixed, gate.to(tl.float32), weight, eps, VALUE_DIM)
        tl.store(out + heads * VALUE_DIM + outputs_at, mixed.to(out.dtype.element_ty), inside[:, None])
    tl.store(place, state)

    inputs = projected + segment_first * projected_stride
    ring = conv_states + slot * conv_stride
    channels = 2 * KEYS + head * VALUE_DIM + value_dims
    _keep_inputs(inputs, ring, channels, start, count, projected_stride, CHANNELS, KERNEL)
    if (head % GROUP == 0) & (tl.program_id(1) == 0):
        of_key = head // GROUP * KEY_DIM + key_dims
        _keep_inputs(inputs, ring, of_key, start, count, projected_stride, CHANNELS, KERNEL)
        _keep_inputs(inputs, ring, KEYS + of_key, start, count, projected_stride, CHANNELS, KERNEL)


@triton.jit(do_not_specialize=["decodes", "tokens"])
def _norm_kernel(
    projected,
    norm,
    out,
    eps,
    decodes,
    tokens,
    projected_stride,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gated norm in place, of the heads of all tokens after the first `decodes`. GATE: where z begins in a row."""
    row = (decodes * HEADS + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, VALUE_DIM)[None, :]
    exists = row < tokens * HEADS
    place = out + row * VALUE_DIM + column
    mixed = tl.load(place, exists, other=0.0).to(tl.float32)
    gate = tl.load(
        projected + row // HEADS * projected_stride + GATE + row % HEADS * VALUE_DIM + column, exists, other=0.0
    ).to(tl.float32)
    weight = tl.load(norm + column).to(tl.float32)
    tl.store(place, gated_norm(mixed, gate, weight, eps, VALUE_DIM).to(out.dtype.element_ty), exists)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    shape = DeltaShape(*model.delta)
    projected, weights, caches = shape.examples(512, dtype)
    convolved = torch.empty(512, shape.conv_channels, dtype=dtype, device="meta")
    decays = torch.empty(512, shape.heads, device="meta")
    pairs = torch.empty(512, shape.heads, CHUNK, dtype=dtype, device="meta")
    out = torch.empty(512, shape.heads * shape.value_dim, dtype=dtype, device="meta")
    prepared = Prepared(decays, pairs, pairs)

    def case(sequences: int) -> CompileCase:
        index = torch.empty(sequences, dtype=torch.int64, device="meta")
        given = projected, convolved, prepared, weights, *caches, index, index, index
        return lambda: scan_chunks(*given, 0, shape, out)

    return [case(1), case(8), case(256)]
