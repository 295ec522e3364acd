"""Gated DeltaNet of one new token of many sequences (decode)."""

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
    _decode_torch(projected, weights, conv_states, states, positions, slots, shape, out)


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
