"""Gated DeltaNet of chunks of prompts (prefill), ragged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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

# Tokens whose changes to the state are worked out together.
CHUNK = 64


def delta_chunks(sizes: Sequence[int], decodes: int) -> np.ndarray:
    """How segments of `sizes` tokens, the first `decodes` of which are single, are cut: [chunks, 2] int32.

    A row is a segment and which of its chunks of CHUNK tokens, counted from the segment's first token.
    """
    counts = -(-np.asarray(sizes[decodes:], dtype=np.int32) // CHUNK)
    segments = np.arange(decodes, len(sizes), dtype=np.int32).repeat(counts)
    within = np.arange(len(segments), dtype=np.int32) - (counts.cumsum() - counts).repeat(counts)
    return np.stack([segments, within.astype(np.int32)], 1)


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
    """
    shape = DeltaShape.of(weights, states, key_heads)
    require_layout(projected, weights, conv_states, states, shape)
    ends = first_tokens.tolist()
    for segment in range(decodes, len(ends) - 1):
        tokens = slice(ends[segment], ends[segment + 1])
        slot = int(slots[segment])
        out[tokens] = _segment_torch(
            projected[tokens], weights, conv_states[slot], states[slot], int(starts[segment]), shape
        )


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
