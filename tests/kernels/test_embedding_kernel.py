"""Lookup in a sharded embedding: rows of the shard as they are, zeros for all others."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.embedding import sharded_embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("size", [64, 1030])
def test_shards_add_up_to_the_whole_embedding(size: int, dtype: torch.dtype, device: torch.device) -> None:
    whole = torch.randn(60, size).to(dtype)
    token_ids = torch.tensor([0, 59, 20, 19, 40, 39, 7, 7])
    for lookup, where_device in ((sharded_embedding, "cpu"), (in_triton(sharded_embedding), device)):
        parts = [
            lookup(whole[first : first + 20].contiguous().to(where_device), token_ids.to(where_device), first).cpu()
            for first in (0, 20, 40)
        ]
        assert torch.equal(sum(parts), whole[token_ids])
        assert all(int((part != 0).any(1).sum()) < len(token_ids) for part in parts)


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert in_triton(sharded_embedding)(torch.ones(4, 8, device=device), nothing, 0).shape == (0, 8)
