"""Which experts a token goes to, and the tokens of each expert (Shazeer et al. 2017, arXiv:1701.06538).

A token takes `choices` experts. A pair is one token with one of them; pair number token * choices + choice.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

# Tokens of a program that routes, a warp each; pairs that a program looks through at a time.
_ROWS, _PAIRS = 4, 1024


class Routing(NamedTuple):
    """experts: [tokens, choices] int32, likeliest first; weights: [tokens, choices] float32, of each one's output."""

    experts: torch.Tensor
    weights: torch.Tensor


class Segments(NamedTuple):
    """The pairs in order of their expert: expert e has those at places bounds[e] up to bounds[e + 1].

    pairs: [tokens * choices] int32, rising within an expert; bounds: [experts + 1] int32.
    """

    pairs: torch.Tensor
    bounds: torch.Tensor


def route(logits: torch.Tensor, choices: int, *, renormalised: bool, shared: bool = False) -> Routing:
    """The `choices` likeliest experts by softmax; among equals the lower number.

    logits: [tokens, experts] of any floating type, contiguous. renormalised: the weights of a token's experts add up to
    one, else they are the experts' shares of the softmax over all. shared: the last column is of an expert that is not
    chosen; every token has it behind its choices, weighted by the sigmoid of its logit.
    """
    body = _route_triton if use_triton(logits) else _route_torch
    return body(logits, choices, renormalised=renormalised, shared=shared)


def by_expert(experts: torch.Tensor, count: int) -> Segments:
    """experts: [tokens, choices] int32, contiguous, below `count`. Nothing is read back to the host."""
    return _by_expert_triton(experts, count) if use_triton(experts) else _by_expert_torch(experts, count)


def _route_torch(logits: torch.Tensor, choices: int, *, renormalised: bool, shared: bool = False) -> Routing:
    wide, gate = logits.float().tensor_split([logits.shape[1] - shared], dim=1)
    experts = wide.argsort(dim=-1, descending=True, stable=True)[:, :choices]
    weights = wide.softmax(-1).gather(1, experts)
    if renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if shared:
        experts = torch.cat([experts, torch.full_like(experts[:, :1], wide.shape[1])], 1)
        weights = torch.cat([weights, gate.sigmoid()], 1)
    return Routing(experts.int(), weights)


def _by_expert_torch(experts: torch.Tensor, count: int) -> Segments:
    ordered, pairs = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(count + 1, dtype=torch.int32, device=experts.device))
    return Segments(pairs.int(), bounds.int())


@triton.jit
def choose(
    logits,
    gates,
    experts_ptr,
    weights_ptr,
    token,
    tokens,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    RENORMALISED: tl.constexpr,
):
    """Store the experts and weights of some tokens, one choice after the other.

    logits: [rows, a power of two] float32, -inf behind the EXPERTS to choose from; gates: [rows, 1] float32, logits of
    the shared expert where SHARED is 1; token: [rows]; those past the end are not stored.
    """
    expert = tl.arange(0, logits.shape[1])[None, :]
    place = tl.arange(0, CHOICE_BLOCK)[None, :]
    largest = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - largest[:, None]), axis=1)
    experts = tl.zeros((logits.shape[0], CHOICE_BLOCK), dtype=tl.int32)
    weights = tl.zeros((logits.shape[0], CHOICE_BLOCK), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        # No number past the last expert even where logits are no numbers: what it names is read from memory.
        best = tl.minimum(tl.argmax(logits, axis=1), EXPERTS - 1)
        weight = tl.exp(tl.max(logits, axis=1) - largest)
        experts = tl.where(place == choice, best[:, None], experts)
        weights = tl.where(place == choice, weight[:, None], weights)
        logits = tl.where(expert == best[:, None], float("-inf"), logits)
    if RENORMALISED:
        total = tl.sum(weights, axis=1)
    weights = weights / total[:, None]
    if SHARED:
        experts = tl.where(place == CHOICES, EXPERTS, experts)
        weights = tl.where(place == CHOICES, 1.0 / (1.0 + tl.exp(-gates)), weights)
    inside = (token < tokens)[:, None] & (place < CHOICES + SHARED)
    output = token.to(tl.int64)[:, None] * (CHOICES + SHARED) + place
    tl.store(experts_ptr + output, experts, mask=inside)
    tl.store(weights_ptr + output, weights, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    tokens,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    RENORMALISED: tl.constexpr,
    SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS tokens. EXPERTS are those to choose from, SHARED is 0 or 1 more."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERT_BLOCK)[None, :]
    # Tokens past the end repeat the last one and are not stored.
    start = tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * (EXPERTS + SHARED)
    logits = tl.load(logits_ptr + start + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    gates = tl.load(logits_ptr + start + EXPERTS * SHARED).to(tl.float32)
    choose(logits, gates, experts_ptr, weights_ptr, token, tokens, EXPERTS, SHARED, CHOICES, CHOICE_BLOCK, RENORMALISED)


@triton.jit(do_not_specialize=["pairs"])
def _by_expert_kernel(
    experts_ptr, pairs_ptr, bounds_ptr, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, OVERLAP: tl.constexpr
):
    """One program: one expert. It counts the pairs of those before it, then lists its own behind them."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    earlier = tl.zeros((PAIRS,), dtype=tl.int32)
    for start in tl.range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        earlier += (tl.load(experts_ptr + pair, mask=pair < pairs, other=EXPERTS) < expert).to(tl.int32)
    place = tl.sum(earlier, axis=0)
    tl.store(bounds_ptr + expert, place)
    for start in tl.range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        own = (tl.load(experts_ptr + pair, mask=pair < pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(own, axis=0) - 1, pair, mask=own > 0)
        place += tl.sum(own, axis=0)
    if expert == EXPERTS - 1:
        tl.store(bounds_ptr + EXPERTS, place)


@triton.jit
def pairs_of(expert, experts_ptr, tokens, TOKENS: tl.constexpr, CHOICES: tl.constexpr):
    """Of up to TOKENS tokens: whether each has the expert (0 or 1), and the number of the pair that it then is."""
    token = tl.arange(0, TOKENS)[:, None]
    choice = tl.arange(0, triton.next_power_of_2(CHOICES))[None, :]
    pair = token * CHOICES + choice
    own = tl.load(experts_ptr + pair, mask=(token < tokens) & (choice < CHOICES), other=-1) == expert
    return tl.max(own.to(tl.int32), axis=1), tl.sum(tl.where(own, pair, 0), axis=1)


def _route_triton(logits: torch.Tensor, choices: int, *, renormalised: bool, shared: bool = False) -> Routing:
    tokens, count = logits.shape[0], logits.shape[1] - shared
    experts = torch.empty(tokens, choices + shared, dtype=torch.int32, device=logits.device)
    weights = torch.empty(experts.shape, dtype=torch.float32, device=logits.device)
    if tokens:
        overlap = overlaps(logits.device)
        _route_kernel[(triton.cdiv(tokens, _ROWS),)](
            logits,
            experts,
            weights,
            tokens,
            EXPERTS=count,
            CHOICES=choices,
            ROWS=_ROWS,
            EXPERT_BLOCK=triton.next_power_of_2(count),
            CHOICE_BLOCK=triton.next_power_of_2(choices + shared),
            RENORMALISED=renormalised,
            SHARED=int(shared),
            OVERLAP=overlap,
            num_warps=_ROWS,
            **({"launch_pdl": True} if overlap else {}),
        )
    return Routing(experts, weights)


def _by_expert_triton(experts: torch.Tensor, count: int) -> Segments:
    pairs = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    bounds = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    overlap = overlaps(experts.device)
    _by_expert_kernel[(count,)](
        experts,
        pairs,
        bounds,
        pairs.numel(),
        EXPERTS=count,
        PAIRS=_PAIRS,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return Segments(pairs, bounds)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    shared = model.shared_expert
    logits = torch.empty(64, model.experts + shared, dtype=dtype, device="meta")
    chosen = torch.empty(64, model.choices + shared, dtype=torch.int32, device="meta")
    return [
        lambda: _route_triton(logits, model.choices, renormalised=True, shared=shared),
        lambda: _by_expert_triton(chosen, model.experts + shared),
    ]
