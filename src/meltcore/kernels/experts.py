"""The feed-forward of routed experts: each token through the few that its router chose.

In Triton it is three launches: a product with the gate and what it gates, one with the way down (expert_product.py),
and the sum over a token's experts (expert_sum.py). One token alone takes two (one_token_experts.py); for many, pairs
are put in place first and their tokens copied there (expert_tiles.py).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from itertools import pairwise

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.expert_product import ExpertsLaunch, Form, Pairs, expert_product, launches_of
from meltcore.kernels.expert_sum import add_choices_torch, add_choices_triton
from meltcore.kernels.expert_tiles import suits_tiles, tiles_of_experts
from meltcore.kernels.one_token_experts import one_token_experts, suits_one_token_experts
from meltcore.kernels.routing import Routing, by_expert
from meltcore.kernels.swiglu import swiglu


def experts_add(
    residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Add, for each token, the weighted sum of its `expert_outputs` to `residual` in place, and return it.

    Without a residual the sum alone is returned. Sums are float32. residual: [tokens, hidden_size], contiguous.
    """
    body = _experts_add_triton if use_triton(hidden) else _experts_add_torch
    return body(residual, hidden, routing, gate_up, down)


def expert_outputs(hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[tokens * choices, hidden_size]: down (silu(gate x) * up x) of each pair of a token and an expert.

    It is rounded to the type of `hidden` where it is stored in between. hidden: [tokens, hidden_size], contiguous;
    gate_up: [experts, 2 * width, hidden_size], the gate's rows above those of what it gates; down: [experts,
    hidden_size, width].
    """
    body = _outputs_triton if use_triton(hidden) else _outputs_torch
    return body(hidden, routing, gate_up, down)


def _experts_add_torch(
    residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return add_choices_torch(residual, _outputs_torch(hidden, routing, gate_up, down), routing.weights)


def _outputs_torch(hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Expert by expert, those that have tokens. The host reads where segments end, so no graph can hold this body."""
    tokens, choices = routing.experts.shape
    pairs, bounds = by_expert(routing.experts, gate_up.shape[0])
    outputs = torch.empty(tokens * choices, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert, (start, end) in enumerate(pairwise(bounds.tolist())):
        if start < end:
            own = pairs[start:end]
            activated = swiglu(hidden[own // choices] @ gate_up[expert].t())
            outputs[own] = activated @ down[expert].t()
    return outputs


def _experts_add_triton(
    residual: torch.Tensor | None,
    hidden: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    launch: ExpertsLaunch | None = None,
    form: Form | None = None,
) -> torch.Tensor:
    if form is None and launch is None and suits_one_token_experts(hidden, routing, gate_up, down):
        total = torch.empty_like(hidden) if residual is None else residual
        one_token_experts(total, hidden, routing, gate_up, down, added=residual is not None)
        return total
    outputs = _outputs_triton(hidden, routing, gate_up, down, launch=launch, form=form)
    return add_choices_triton(residual, outputs, routing.weights)


def _outputs_triton(
    hidden: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    launch: ExpertsLaunch | None = None,
    form: Form | None = None,
) -> torch.Tensor:
    (tokens, size), width, choices = hidden.shape, down.shape[2], routing.experts.shape[1]
    if form is None and launch is None and suits_tiles(hidden, routing.experts, gate_up, down):
        return tiles_of_experts(hidden, routing.experts, gate_up, down)
    outputs = torch.empty(tokens * choices, size, dtype=hidden.dtype, device=hidden.device)
    if tokens:
        up, way_down = (launch, launch) if launch else launches_of(routing.experts.numel(), gate_up, down)
        pairs = Pairs.of(routing.experts, down, up.pairs, form)
        activated = torch.empty(tokens * choices, width, dtype=hidden.dtype, device=hidden.device)
        expert_product(hidden, gate_up, activated, pairs, launch=up, gated=True)
        expert_product(activated, down, outputs, pairs, launch=way_down, gated=False)
    return outputs
