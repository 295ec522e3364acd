"""Gated DeltaNet for chunks of prompts (prefill) of different lengths.

Four kernels run one after another. The first computes the convolution of all tokens. The second computes, for each
chunk of 64 tokens, what does not depend on the recurrent state. The third scans each state over the chunks of its
sequence. The last is the gated norm.
"""

from __future__ import annotations

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.common import (
    GatedDeltaParams,
    GatedDeltaShape,
    conv_reference,
    delta_rule_reference,
    gated_norm_reference,
    gates_reference,
    heads_reference,
)
from meltcore.kernels.gated_delta.convolution import convolve_chunks
from meltcore.kernels.gated_delta.intra_chunk import prepare_chunks
from meltcore.kernels.gated_delta.state_scan import norm_chunks, scan_chunks
from meltcore.kernels.launch import use_triton


def gated_delta_prefill(
    projected: torch.Tensor,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    """Compute the tokens of all sequences in prefill into `out` and update the states.

    A CUDA graph is padded by sequences without tokens, on slot 0, and by their chunks. Programs of padding return
    immediately: a graph has up to twice as many chunks as its tokens fill.

    Args:
        projected: [tokens, width].
        params: the parameters and states of the layer.
        metadata: the sequences of the step.
        shape: the sizes of the layer.
        out: [tokens, heads * value_dim], unchanged for tokens that decode.
    """
    if not use_triton(projected):
        _prefill_reference(projected, params, metadata, shape, out)
    elif len(metadata.chunk_indices):
        convolved = convolve_chunks(projected, params, metadata, shape)
        prepared = prepare_chunks(projected, convolved, params, metadata, shape)
        output = scan_chunks(projected, convolved, prepared, params, metadata, shape)
        norm_chunks(projected, output, params, metadata, shape, out)


def _prefill_reference(
    projected: torch.Tensor,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    query_start_loc = metadata.query_start_loc.tolist()
    for sequence in range(metadata.first_prompt, len(query_start_loc) - 1):
        if query_start_loc[sequence] == query_start_loc[sequence + 1]:
            continue  # padding
        tokens, slot = (
            slice(query_start_loc[sequence], query_start_loc[sequence + 1]),
            int(metadata.state_slots[sequence]),
        )
        context_len = int(metadata.context_lens[sequence])
        out[tokens] = _sequence_reference(projected[tokens], params, slot, context_len, shape)


def _sequence_reference(
    projected: torch.Tensor, params: GatedDeltaParams, slot: int, context_len: int, shape: GatedDeltaShape
) -> torch.Tensor:
    """Compute one sequence's tokens from position `context_len` on and update its slot."""
    ring, state = params.conv_states[slot, :, : shape.conv_channels], params.recurrent_states[slot]
    kernel, num_tokens = shape.kernel, len(projected)
    new_inputs = projected[:, : shape.conv_channels]
    earlier_positions = torch.arange(context_len + 1 - kernel, context_len, device=ring.device)
    earlier_inputs = ring[earlier_positions % len(ring)].masked_fill((earlier_positions < 0)[:, None], 0)
    inputs = torch.cat([earlier_inputs, new_inputs])
    kept_tokens = torch.arange(max(0, num_tokens - kernel), num_tokens, device=ring.device)
    ring[(context_len + kept_tokens) % len(ring)] = new_inputs[kept_tokens]

    query, key, value = heads_reference(conv_reference(inputs, params.conv), shape)
    g, beta = gates_reference(projected, params, shape)
    current_state = state if context_len else torch.zeros_like(state)
    output = torch.empty_like(value)
    for i in range(num_tokens):
        output[i], current_state = delta_rule_reference(query[i], key[i], value[i], g[i], beta[i], current_state)
    state.copy_(current_state)
    return gated_norm_reference(output, projected, params, shape)
