"""Looking up tokens in an embedding, which the ranks of a group hold a share of the rows of."""

from __future__ import annotations

import torch

from meltcore.layers.group import Group


def look_up(embedding: torch.Tensor, token_ids: torch.Tensor, group: Group | None) -> torch.Tensor:
    """embedding: [vocab_size, hidden_size], or this rank's rows of it; token_ids: [tokens] int64.

    Returns [tokens, hidden_size], the same on every rank.
    """
    if group is None:
        return embedding[token_ids]
    rows = embedding.shape[0]
    own = token_ids - group.rank * rows
    elsewhere = (own < 0) | (own >= rows)
    # A token's row and zeros from all other ranks: the sum is exact in any type.
    return group.sum(embedding[own.clamp(0, rows - 1)].masked_fill_(elsewhere[:, None], 0.0))
