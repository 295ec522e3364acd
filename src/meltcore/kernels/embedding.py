"""Rows of an embedding of which a rank holds a part."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

# Columns of a program: 8 elements a thread, 16 bytes in 16-bit types.
_BLOCK, _WARPS = 1024, 4


def rows_or_zeros(embedding: torch.Tensor, token_ids: torch.Tensor, first_token: int) -> torch.Tensor:
    """The rows of the tokens that are held, zeros for all others: over all ranks they add up to every token's row.

    embedding: [held, hidden_size], of the tokens from `first_token` on; token_ids: [tokens] int64. Returns [tokens,
    hidden_size].
    """
    body = _rows_or_zeros_triton if use_triton(embedding) else _rows_or_zeros_torch
    return body(embedding, token_ids, first_token)


def _rows_or_zeros_torch(embedding: torch.Tensor, token_ids: torch.Tensor, first_token: int) -> torch.Tensor:
    own = token_ids - first_token
    elsewhere = (own < 0) | (own >= embedding.shape[0])
    return embedding[own.clamp(0, embedding.shape[0] - 1)].masked_fill_(elsewhere[:, None], 0.0)


@triton.jit(do_not_specialize=["first_token", "held"])
def _rows_or_zeros_kernel(
    embedding_ptr,
    token_ids_ptr,
    output_ptr,
    first_token,
    held,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of one token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    own = tl.load(token_ids_ptr + token) - first_token
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row = tl.load(embedding_ptr + own * SIZE + column, mask=inside & (own >= 0) & (own < held), other=0.0)
    tl.store(output_ptr + token * SIZE + column, row, mask=inside)


def _rows_or_zeros_triton(embedding: torch.Tensor, token_ids: torch.Tensor, first_token: int) -> torch.Tensor:
    (held, size), tokens = embedding.shape, token_ids.shape[0]
    output = torch.empty(tokens, size, dtype=embedding.dtype, device=embedding.device)
    if tokens:
        overlap = overlaps(embedding.device)
        _rows_or_zeros_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            embedding,
            token_ids,
            output,
            first_token,
            held,
            SIZE=size,
            BLOCK=_BLOCK,
            OVERLAP=overlap,
            num_warps=_WARPS,
            **({"launch_pdl": True} if overlap else {}),
        )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    embedding = torch.empty(1000, model.hidden_size, dtype=dtype, device="meta")
    token_ids = torch.empty(64, dtype=torch.int64, device="meta")
    return [lambda: _rows_or_zeros_triton(embedding, token_ids, 1000)]
