"""Gated DeltaNet of a step's sequences: between the fused product of a layer and its output product."""

from __future__ import annotations

import torch

from meltcore.kernels.delta import DeltaWeights
from meltcore.kernels.delta_decode import delta_decode
from meltcore.kernels.delta_places import delta_chunks
from meltcore.kernels.delta_prefill import delta_prefill
from meltcore.kernels.paged_attention import Segments

__all__ = ["DeltaWeights", "delta_chunks", "delta_net"]


def delta_net(
    projected: torch.Tensor,
    weights: DeltaWeights,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    segments: Segments,
    key_heads: int,
) -> torch.Tensor:
    """Convolution, delta rule and gated norm of every token, in the order of its own sequence.

    projected: [tokens, conv_channels + heads * (value_dim + 2)], a row being queries | keys | values (key_heads of
    key_dim twice, heads of value_dim) before the convolution | output gates z | b | a. conv_states: [slots, kernel,
    conv_channels] in the model's type; states: [slots, heads, key_dim, value_dim] float32 (see kernels/delta.py): the
    slots of the step's sequences are brought up to their last token. Returns [tokens, heads * value_dim] in the type of
    `projected`.

    A segment that starts at position 0 begins from nothing, any other from what its slot holds.
    """
    _, heads, _, value_dim = states.shape
    out = projected.new_empty(len(projected), heads * value_dim)
    decodes, starts, slots = segments.decodes, segments.starts, segments.state_slots
    if decodes:
        rows = slice(None, decodes)
        delta_decode(projected[rows], weights, conv_states, states, starts[rows], slots[rows], key_heads, out=out[rows])
    if decodes < len(projected):
        delta_prefill(
            projected,
            weights,
            conv_states,
            states,
            starts,
            slots,
            segments.first_tokens,
            segments.chunks,
            decodes,
            key_heads,
            out=out,
        )
    return out
