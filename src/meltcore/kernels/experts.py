"""The feed-forward of routed experts: each token through the few that its router chose."""

from __future__ import annotations

import torch

from meltcore.kernels.routing import Routing, by_expert
from meltcore.kernels.swiglu import swiglu


def experts_add(
    residual: torch.Tensor, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Add, for each token, the weighted sum of its experts' outputs to `residual` in place, and return it.

    An expert's output is down (silu(gate x) * up x), rounded to the type of `hidden` where it is stored; the sum over a
    token's experts is float32, in the order of `routing`. residual, hidden: [tokens, hidden_size], contiguous;
    gate_up: [experts, 2 * width, hidden_size], the gate's rows above those of what it gates; down: [experts,
    hidden_size, width].
    """
    return _experts_add_torch(residual, hidden, routing, gate_up, down)


def _experts_add_torch(
    residual: torch.Tensor, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Expert by expert, those that have tokens. Where segments end is read by the host."""
    tokens, choices = routing.experts.shape
    pairs, bounds = by_expert(routing.experts, gate_up.shape[0])
    outputs = torch.empty(tokens * choices, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    ends = bounds.tolist()
    for expert, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if start < end:
            own = pairs[start:end]
            activated = swiglu(hidden[own // choices] @ gate_up[expert].t())
            outputs[own] = activated @ down[expert].t()
    weighted = outputs.view(tokens, choices, -1).float() * routing.weights[:, :, None]
    return residual.add_(weighted.sum(1))
