"""Which experts a token goes to, and the tokens of each expert (Shazeer et al. 2017, arXiv:1701.06538).

A token takes `choices` experts. A pair is one token with one of them; pair number token * choices + choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


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


def route(logits: torch.Tensor, choices: int, *, renormalised: bool) -> Routing:
    """The `choices` likeliest experts by softmax; among equals the lower number.

    logits: [tokens, experts] of any floating type. renormalised: the weights of a token's experts add up to one, else
    they are the experts' shares of the softmax over all.
    """
    return _route_torch(logits, choices, renormalised=renormalised)


def by_expert(experts: torch.Tensor, count: int) -> Segments:
    """experts: [tokens, choices] int32, below `count`. Nothing is read back to the host."""
    return _by_expert_torch(experts, count)


def _route_torch(logits: torch.Tensor, choices: int, *, renormalised: bool) -> Routing:
    wide = logits.float()
    experts = wide.argsort(dim=-1, descending=True, stable=True)[:, :choices]
    weights = wide.softmax(-1).gather(1, experts)
    if renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts.int(), weights)


def _by_expert_torch(experts: torch.Tensor, count: int) -> Segments:
    ordered, pairs = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(count + 1, dtype=torch.int32, device=experts.device))
    return Segments(pairs.int(), bounds.int())
