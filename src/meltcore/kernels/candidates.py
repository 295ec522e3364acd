"""The best token of each rank's part of the vocabulary, as one number: the largest of all ranks' is the choice.

A candidate is an int64: the score's bits above, in an order of integers, and below them the token's id turned over, so
that among equal scores the lowest id is the largest candidate. A NaN is above all numbers, as it is for `greedy`.
"""

from __future__ import annotations

import torch

from meltcore.kernels.sampling import draw_part, greedy

_LARGEST_ID = 2**32 - 1
_MAGNITUDE = 2**31 - 1  # all bits of an int32 but the sign


def candidates(logits: torch.Tensor, first_token: int) -> torch.Tensor:
    """Of the likeliest tokens. logits: [rows, tokens] of neighbouring tokens from `first_token` on. [rows] int64."""
    best = greedy(logits)
    return _packed(logits.gather(1, best[:, None])[:, 0].float(), best + first_token)


def drawn_candidates(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_token: int
) -> torch.Tensor:
    """Of tokens drawn by temperature alone, see `draw`. [rows] int64."""
    best, scores = draw_part(logits, temperatures, seeds, positions, first_token)
    return _packed(scores, best + first_token)


def tokens_of(candidates: torch.Tensor) -> torch.Tensor:
    """The ids [rows] int64 that candidates stand for."""
    return _LARGEST_ID - (candidates & _LARGEST_ID)


def _packed(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    bits = (scores + 0.0).view(torch.int32)  # both zeros become the same one
    # The bits of negative numbers fall where the numbers rise.
    ordered = (bits ^ ((bits >> 31) & _MAGNITUDE)).masked_fill_(scores.isnan(), _MAGNITUDE)
    return (ordered.long() << 32) | (_LARGEST_ID - tokens)
