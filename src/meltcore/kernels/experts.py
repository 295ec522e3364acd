"""The feed-forward of routed experts: each token through the few that its router chose.

In Triton it is three launches: a product with the gate and what it gates, one with the way down (expert_product.py),
and the sum over a token's experts. One token alone takes two (one_token_experts.py); for many, pairs are put in place
first and their tokens copied there (expert_tiles.py).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.expert_product import ExpertsLaunch, Form, Pairs, expert_product
from meltcore.kernels.expert_tiles import suits_tiles, tiles_of_experts
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.one_token_experts import one_token_experts, suits_one_token_experts
from meltcore.kernels.overlap import overlaps
from meltcore.kernels.routing import Routing, by_expert
from meltcore.kernels.swiglu import swiglu

# Columns of a program that sums up: 8 elements a thread of 4 warps, 16 bytes in 16-bit types.
_SUM_BLOCK = 1024


def experts_add(
    residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Add, for each token, the weighted sum of its experts' outputs to `residual` in place, and return it.

    Without a residual the sum alone is returned. An expert's output is down (silu(gate x) * up x), rounded to the type
    of `hidden` where it is stored in between; the sum over a token's experts is float32. residual, hidden: [tokens,
    hidden_size], contiguous; gate_up: [experts, 2 * width, hidden_size], the gate's rows above those of what it gates;
    down: [experts, hidden_size, width].
    """
    body = _experts_add_triton if use_triton(hidden) else _experts_add_torch
    return body(residual, hidden, routing, gate_up, down)


def _experts_add_torch(
    residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Expert by expert, those that have tokens. The host reads where segments end, so no graph can hold this body."""
    tokens, choices = routing.experts.shape
    pairs, bounds = by_expert(routing.experts, gate_up.shape[0])
    outputs = torch.empty(tokens * choices, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert, (start, end) in enumerate(pairwise(bounds.tolist())):
        if start < end:
            own = pairs[start:end]
            activated = swiglu(hidden[own // choices] @ gate_up[expert].t())
            outputs[own] = activated @ down[expert].t()
    weighted = outputs.view(tokens, choices, -1).float() * routing.weights[:, :, None]
    total = weighted.sum(1)
    return total.to(hidden.dtype) if residual is None else residual.add_(total)


@triton.jit
def _add_choices_kernel(
    total_ptr,
    outputs_ptr,
    weights_ptr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of one token, one choice after the other. ADDED: to what stands there."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        output = tl.load(outputs_ptr + pair * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * output
    if ADDED:
        total += tl.load(total_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + token * SIZE + column, total, mask=inside)


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
    (tokens, size), width, choices = hidden.shape, down.shape[2], routing.experts.shape[1]
    total = torch.empty_like(hidden) if residual is None else residual
    if tokens == 0:
        return total
    if form is None and launch is None and suits_one_token_experts(hidden, routing, gate_up, down):
        one_token_experts(total, hidden, routing, gate_up, down, added=residual is not None)
        return total
    if form is None and launch is None and suits_tiles(hidden, routing.experts, gate_up, down):
        outputs = tiles_of_experts(hidden, routing.experts, gate_up, down)
    else:
        pairs = Pairs.of(routing.experts, down, form)
        activated = torch.empty(tokens * choices, width, dtype=hidden.dtype, device=hidden.device)
        outputs = torch.empty(tokens * choices, size, dtype=hidden.dtype, device=hidden.device)
        expert_product(hidden, gate_up, activated, pairs, gated=True, launch=launch)
        expert_product(activated, down, outputs, pairs, gated=False, launch=launch)
    _add_choices(total, outputs, routing.weights, added=residual is not None)
    return total


def _add_choices(total: torch.Tensor, outputs: torch.Tensor, weights: torch.Tensor, *, added: bool) -> None:
    """Into `total` the weighted sums of a token's outputs; added: to what is there."""
    (tokens, size), overlap = total.shape, overlaps(total.device)
    _add_choices_kernel[(tokens, triton.cdiv(size, _SUM_BLOCK))](
        total,
        outputs,
        weights,
        SIZE=size,
        CHOICES=weights.shape[1],
        BLOCK=_SUM_BLOCK,
        ADDED=added,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    choices, size = model.choices + model.shared_expert, model.hidden_size
    total = torch.empty(64, size, dtype=dtype, device="meta")
    outputs = torch.empty(64 * choices, size, dtype=dtype, device="meta")
    weights = torch.empty(64, choices, device="meta")
    return [partial(_add_choices, total, outputs, weights, added=added) for added in (False, True)]
