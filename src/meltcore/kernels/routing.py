"""Which experts a token goes to, and the tokens of each expert (Shazeer et al. 2017, arXiv:1701.06538).

A token takes `choices` experts. A pair is one token with one of them; pair number token * choices + choice.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

_TAKEN = tl.constexpr(-(2**63)) if tl else None  # below every key of an expert that can be chosen


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


def route(
    logits: torch.Tensor,
    choices: int,
    *,
    renormalised: bool,
    shared: bool = False,
    drawn: int | None = None,
    dtype: torch.dtype | None = None,
) -> Routing:
    """The `choices` likeliest experts by softmax; among equals the lower number.

    logits: [tokens, experts] of any floating type, rows may be strided; or [shares, tokens, experts] float32, of which
    the sum over shares is meant, rounded to `dtype`. renormalised: the weights of a token's experts add up to one, else
    they are the experts' shares of the softmax over all. shared: the last column is of an expert that is not chosen;
    every token has it behind its choices, weighted by the sigmoid of its logit. drawn: a seed; experts are then drawn
    at random, all alike and anew in every call (for benchmarks on dummy weights, whose tokens are all alike).
    """
    body = _route_triton if use_triton(logits) else _route_torch
    return body(logits, choices, renormalised=renormalised, shared=shared, drawn=drawn, dtype=dtype)


def by_expert(experts: torch.Tensor, count: int) -> Segments:
    """experts: [tokens, choices] int32, below `count`. What kernels/expert_places.py does in Triton, without tiles."""
    ordered, pairs = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(count + 1, dtype=torch.int32, device=experts.device))
    return Segments(pairs.int(), bounds.int())


def _route_torch(
    logits: torch.Tensor,
    choices: int,
    *,
    renormalised: bool,
    shared: bool = False,
    drawn: int | None = None,
    dtype: torch.dtype | None = None,
) -> Routing:
    if logits.dim() == 3:
        logits = logits.sum(0).to(dtype)
    wide, gate = logits.float().tensor_split([logits.shape[1] - shared], dim=1)
    if drawn is not None:
        # In float32: 16 bits have so few numbers that equals, of which the lower expert is taken, would be common.
        wide = torch.rand_like(wide)
    experts = wide.argsort(dim=-1, descending=True, stable=True)[:, :choices]
    weights = wide.softmax(-1).gather(1, experts)
    if renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if shared:
        experts = torch.cat([experts, torch.full_like(experts[:, :1], wide.shape[1])], 1)
        weights = torch.cat([weights, gate.sigmoid()], 1)
    return Routing(experts.int(), weights)


@triton.jit
def _key(logits, expert, BLOCK: tl.constexpr):
    """int64, of all experts' different ones, in the order of their choice: the larger logit, then the lower number."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # minus zero is no less than zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (BLOCK - 1 - expert)


@triton.jit
def _logit_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scattered(bits):
    """The last steps of MurmurHash3 (Appleby): equal changes for every change of a uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _drawn_logits(draws_ptr, seed, token, expert, BLOCK: tl.constexpr):
    """Of one token: uniform in [0, 1), from a counter that goes on by one with every call."""
    draw = tl.load(draws_ptr + token)
    tl.store(draws_ptr + token, draw + 1)
    call = _scattered(_scattered(seed.to(tl.uint32)) + draw.to(tl.uint32))
    bits = _scattered(call ^ _scattered((token * BLOCK + expert).to(tl.uint32)))
    return (bits >> 9).to(tl.int32).to(tl.float32) * (1.0 / (1 << 23))


@triton.jit(do_not_specialize=["row_stride", "share_stride", "seed"])
def _route_kernel(
    logits_ptr,
    draws_ptr,
    experts_ptr,
    weights_ptr,
    row_stride,
    share_stride,
    seed,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    CHOICES: tl.constexpr,
    SHARES: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    RENORMALISED: tl.constexpr,
    DRAWN: tl.constexpr,
    TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program, of one warp, so that nothing is exchanged but within it: one token. EXPERTS are those to choose
    from, SHARED is 0 or 1 more."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERT_BLOCK)
    row_ptr = logits_ptr + token.to(tl.int64) * row_stride
    logits = tl.load(row_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    gate = tl.load(row_ptr + EXPERTS * SHARED).to(tl.float32)
    for _ in tl.static_range(1, SHARES):
        row_ptr += share_stride
        logits += tl.load(row_ptr + expert, mask=expert < EXPERTS, other=0.0)
        gate += tl.load(row_ptr + EXPERTS * SHARED)
    logits, gate = logits.to(TYPE).to(tl.float32), gate.to(TYPE).to(tl.float32)
    if DRAWN:
        logits = _drawn_logits(draws_ptr, seed, token, expert, EXPERT_BLOCK)
    keys = tl.where(expert < EXPERTS, _key(logits, expert, EXPERT_BLOCK), _TAKEN)
    largest = _logit_of(tl.max(keys, axis=0))
    place = tl.arange(0, CHOICE_BLOCK)
    experts = tl.zeros((CHOICE_BLOCK,), dtype=tl.int32)
    weights = tl.zeros((CHOICE_BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.max(keys, axis=0)
        experts = tl.where(place == choice, EXPERT_BLOCK - 1 - (best & (EXPERT_BLOCK - 1)).to(tl.int32), experts)
        weights = tl.where(place == choice, tl.exp(_logit_of(best) - largest), weights)
        keys = tl.where(keys == best, _TAKEN, keys)
    if RENORMALISED:
        total = tl.sum(weights, axis=0)
    else:
        total = tl.sum(tl.where(expert < EXPERTS, tl.exp(logits - largest), 0.0), axis=0)
    weights = weights / total
    if SHARED:
        experts = tl.where(place == CHOICES, EXPERTS, experts)
        weights = tl.where(place == CHOICES, 1.0 / (1.0 + tl.exp(-gate)), weights)
    output = token.to(tl.int64) * (CHOICES + SHARED) + place
    tl.store(experts_ptr + output, experts, mask=place < CHOICES + SHARED)
    tl.store(weights_ptr + output, weights, mask=place < CHOICES + SHARED)


@triton.jit
def pairs_of(expert, experts_ptr, tokens, TOKENS: tl.constexpr, CHOICES: tl.constexpr):
    """Of up to TOKENS tokens: whether each has the expert (0 or 1), and the number of the pair that it then is."""
    token = tl.arange(0, TOKENS)[:, None]
    choice = tl.arange(0, triton.next_power_of_2(CHOICES))[None, :]
    pair = token * CHOICES + choice
    own = tl.load(experts_ptr + pair, mask=(token < tokens) & (choice < CHOICES), other=-1) == expert
    return tl.max(own.to(tl.int32), axis=1), tl.sum(tl.where(own, pair, 0), axis=1)


def _route_triton(
    logits: torch.Tensor,
    choices: int,
    *,
    renormalised: bool,
    shared: bool = False,
    drawn: int | None = None,
    dtype: torch.dtype | None = None,
) -> Routing:
    (tokens, columns), device = logits.shape[-2:], logits.device
    count = columns - shared
    experts = torch.empty(tokens, choices + shared, dtype=torch.int32, device=device)
    weights = torch.empty(experts.shape, dtype=torch.float32, device=device)
    if tokens:
        overlap = overlaps(device)
        _route_kernel[(tokens,)](
            logits,
            experts if drawn is None else _draws(device, triton.next_power_of_2(tokens)),
            experts,
            weights,
            logits.stride(-2),
            logits.stride(0) if logits.dim() == 3 else 0,
            drawn or 0,
            EXPERTS=count,
            SHARED=int(shared),
            CHOICES=choices,
            SHARES=logits.shape[0] if logits.dim() == 3 else 1,
            EXPERT_BLOCK=triton.next_power_of_2(count),
            CHOICE_BLOCK=triton.next_power_of_2(choices + shared),
            RENORMALISED=renormalised,
            DRAWN=drawn is not None,
            TYPE=getattr(tl, str(dtype or logits.dtype).removeprefix("torch.")),
            OVERLAP=overlap,
            num_warps=1,
            **({"launch_pdl": True} if overlap else {}),
        )
    return Routing(experts, weights)


@cache
def _draws(device: torch.device, places: int) -> torch.Tensor:
    """How often experts were drawn for each token of a step. Captured graphs keep its address."""
    return torch.zeros(places, dtype=torch.int32, device=device)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    shared, columns = model.shared_expert, model.experts + model.shared_expert
    logits = torch.empty(64, columns, dtype=dtype, device="meta")
    parts = torch.empty(4, 64, columns, device="meta")
    return [
        lambda: _route_triton(logits, model.choices, renormalised=True, shared=shared),
        lambda: _route_triton(parts, model.choices, renormalised=True, shared=shared, drawn=1, dtype=dtype),
    ]
