"""Gated DeltaNet of a step's tokens, from the layer's fused projection to the input of its output projection."""

from __future__ import annotations

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.common import GatedDeltaParams, require_layout
from meltcore.kernels.gated_delta.decode import gated_delta_decode
from meltcore.kernels.gated_delta.prefill import gated_delta_prefill
from meltcore.kernels.gated_delta.window import gated_delta_windows


def gated_delta_net(projected: torch.Tensor, params: GatedDeltaParams, metadata: AttentionMetadata) -> torch.Tensor:
    """Compute convolution, delta rule and gated norm of a step's tokens, and update the states in the slots.

    projected: [tokens, width], with the columns of `GatedDeltaShape`. A sequence without tokens before this step starts
    from zeros, and any other sequence starts from its slot. Returns [tokens, heads * value_dim] in the type of
    `projected`. Raises ValueError for decodes that are no windows, in the slots of an engine that speculates.
    """
    shape = params.shape
    require_layout(projected, params, shape)
    out = projected.new_empty(len(projected), shape.heads * shape.value_dim)
    num_decodes, num_windows = metadata.num_decodes, metadata.num_windows
    if num_windows < num_decodes and params.conv_states.shape[1] > shape.kernel:
        raise ValueError(f"{num_decodes} decodes and {num_windows} windows: slots with windows take no other decodes")
    if num_windows:
        gated_delta_windows(projected, params, metadata, shape, out)
    elif num_decodes:
        positions, slots = metadata.context_lens[:num_decodes], metadata.state_slots[:num_decodes]
        gated_delta_decode(projected[:num_decodes], params, positions, slots, shape, out[:num_decodes])
    if metadata.first_prompt < len(metadata.state_slots):
        gated_delta_prefill(projected, params, metadata, shape, out)
    return out
