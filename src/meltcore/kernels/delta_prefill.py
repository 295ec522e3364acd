"""Gated DeltaNet of chunks of prompts (prefill), ragged.

In Triton four steps: the convolution of all tokens; what each chunk of 64 tokens tells without the state; the states'
way through the chunks of their sequences; and the gated norm. Segments begin and end anywhere.
"""

from __future__ import annotations

import torch

from meltcore.kernels.delta import (
    DeltaShape,
    DeltaWeights,
    convolve_torch,
    delta_step_torch,
    gated_norm_torch,
    gates_torch,
    heads_torch,
    require_layout,
)
from meltcore.kernels.delta_chunks import prepare_chunks
from meltcore.kernels.delta_convolve import convolve_chunks
from meltcore.kernels.delta_scan import norm_chunks, scan_chunks
from meltcore.kernels.dispatch import use_triton


def delta_prefill(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    decodes: int,
    key_heads: int,
    out: torch.Tensor,
) -> None:
    """projected: [tokens, width], see `DeltaShape`; starts, slots, first_tokens, chunks, decodes: see `Segments`.

    out: [tokens, heads * value_dim], left as it is at the tokens of the first `decodes` segments.
    Segments without tokens, on slot 0, are the padding of a CUDA graph, and so are pieces of them.
    """
    shape = DeltaShape.of(weights, states, key_heads)
    require_layout(projected, weights, conv_states, states, shape)
    body = _prefill_triton if use_triton(projected) else _prefill_torch
    body(projected, weights, conv_states, states, starts, slots, first_tokens, chunks, decodes, shape, out)


def _prefill_triton(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    decodes: int,
    shape: DeltaShape,
    out: torch.Tensor,
) -> None:
    if len(chunks) == 0:
        return
    where = first_tokens, chunks
    convolved = convolve_chunks(projected, weights, conv_states, starts, slots, *where, decodes, shape)
    prepared = prepare_chunks(projected, convolved, weights, *where, decodes, shape)
    slot_of = conv_states, states, starts, slots, first_tokens
    mixed = scan_chunks(projected, convolved, prepared, *slot_of, decodes, shape)
    norm_chunks(projected, mixed, weights, *where, decodes, shape, out)


def _prefill_torch(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    decodes: int,
    shape: DeltaShape,
    out: torch.Tensor,
) -> None:
    ends = first_tokens.tolist()
    for segment in range(decodes, len(ends) - 1):
        if ends[segment] == ends[segment + 1]:
            continue  # padding
        tokens, slot = slice(ends[segment], ends[segment + 1]), int(slots[segment])
        kept = conv_states[slot], states[slot]
        out[tokens] = _segment_torch(projected[tokens], weights, *kept, int(starts[segment]), shape)


def _segment_torch(
    projected: torch.Tensor,
    weights: DeltaWeights,
    ring: torch.Tensor,
    state: torch.Tensor,
    start: int,
    shape: DeltaShape,
) -> torch.Tensor:
    """One segment, whose slot holds `ring` and `state`; both are brought up to its last token."""
    kernel, count = shape.kernel, len(projected)
    new = projected[:, : shape.conv_channels]
    before = torch.arange(start + 1 - kernel, start, device=ring.device)
    inputs = torch.cat([ring[before % kernel].masked_fill((before < 0)[:, None], 0), new])
    kept = torch.arange(max(0, count - kernel), count, device=ring.device)
    ring[(start + kept) % kernel] = new[kept]

    query, key, value = heads_torch(convolve_torch(inputs, weights.conv), shape)
    g, beta = gates_torch(projected, weights, shape)
    current = state if start else torch.zeros_like(state)
    mixed = torch.empty_like(value)
    for token in range(count):
        mixed[token], current = delta_step_torch(query[token], key[token], value[token], g[token], beta[token], current)
    state.copy_(current)
    return gated_norm_torch(mixed, projected, weights, shape)
