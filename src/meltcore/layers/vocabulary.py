"""Looking up tokens in an embedding, which the ranks of a group hold a share of the rows of."""

from __future__ import annotations

import torch

from meltcore.kernels.embedding import rows_or_zeros
from meltcore.layers.group import Group
from meltcore.layers.residual import Residual


def look_up(embedding: torch.Tensor, token_ids: torch.Tensor, group: Group | None) -> Residual:
    """embedding: [vocab_size, hidden_size], or this rank's rows of it; token_ids: [tokens] int64.

    Returns the beginning of the residual stream.
    """
    if group is None:
        return Residual(embedding[token_ids])
    # A token's row, and zeros from all other ranks: the sum is exact in any type.
    return Residual(rows_or_zeros(embedding, token_ids, group.rank * embedding.shape[0]), group)
