"""Looks up tokens in an embedding that is sharded by vocabulary over tensor-parallel ranks."""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

# Columns of a program: 8 elements per thread, 16 bytes in 16-bit types.
_BLOCK, _WARPS = 1024, 4


def sharded_embedding(shard: torch.Tensor, token_ids: torch.Tensor, first_token: int) -> torch.Tensor:
    """Return the embeddings of tokens in this rank's shard, and zeros for all other tokens.

    The all-reduce over the ranks then gives the embedding of every token.

    Args:
        shard: [shard_size, hidden_size], the rows of the vocabulary from `first_token` on.
        token_ids: [tokens] int64.
        first_token: the first token of the shard.

    Returns [tokens, hidden_size].
    """
    if not use_triton(shard):
        row = token_ids - first_token
        out_of_shard = (row < 0) | (row >= shard.shape[0])
        return shard[row.clamp(0, shard.shape[0] - 1)].masked_fill_(out_of_shard[:, None], 0.0)
    (shard_size, size), tokens = shard.shape, token_ids.shape[0]
    output = torch.empty(tokens, size, dtype=shard.dtype, device=shard.device)
    if tokens:
        _sharded_embedding_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            *(shard, token_ids, output, first_token, shard_size),
            SIZE=size,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **pdl_options(shard.device),
        )
    return output


@triton.jit(do_not_specialize=["first_token", "shard_size"])
def _sharded_embedding_kernel(
    shard_ptr,
    token_ids_ptr,
    output_ptr,
    first_token,
    shard_size,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program copies BLOCK columns of one token."""
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids_ptr + token) - first_token
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    in_shard = mask & (row >= 0) & (row < shard_size)
    values = tl.load(shard_ptr + row * SIZE + column, mask=in_shard, other=0.0)
    tl.store(output_ptr + token * SIZE + column, values, mask=mask)
