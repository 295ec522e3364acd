"""The best token of each rank's part of the vocabulary, as one number: the largest of all ranks' is the choice.

A candidate is an int64: the score's bits above, in an order of integers, and below them the token's id turned over, so
that among equal scores the lowest id is the largest candidate. A NaN is above all numbers, as it is for `greedy`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.sampling import draw_part, greedy

_LARGEST_ID = 2**32 - 1
_MAGNITUDE = 2**31 - 1  # all bits of an int32 but the sign


def candidates(logits: torch.Tensor, first_token: int) -> torch.Tensor:
    """Of the likeliest tokens. logits: [rows, tokens] of neighbouring tokens from `first_token` on. [rows] int64."""
    best = greedy(logits)
    if use_triton(logits):
        return _packed_triton(logits, logits.stride(0), best, best, first_token)
    return _packed_torch(logits.gather(1, best[:, None])[:, 0].float(), best + first_token)


def drawn_candidates(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_token: int
) -> torch.Tensor:
    """Of tokens drawn by temperature alone, see `draw`. [rows] int64."""
    best, scores = draw_part(logits, temperatures, seeds, positions, first_token)
    if use_triton(logits):
        return _packed_triton(scores, 1, torch.zeros_like(best), best, first_token)
    return _packed_torch(scores, best + first_token)


def tokens_of(candidates: torch.Tensor) -> torch.Tensor:
    """The ids [rows] int64 that candidates stand for."""
    return _LARGEST_ID - (candidates & _LARGEST_ID)


def _packed_torch(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    bits = (scores + 0.0).view(torch.int32)  # both zeros become the same one
    # The bits of negative numbers fall where the numbers rise.
    ordered = (bits ^ ((bits >> 31) & _MAGNITUDE)).masked_fill_(scores.isnan(), _MAGNITUDE)
    return (ordered.long() << 32) | (_LARGEST_ID - tokens)


@triton.jit(do_not_specialize=["first_token", "row_stride"])
def _pack_kernel(scores_ptr, columns_ptr, tokens_ptr, output_ptr, row_stride, first_token):
    """One program: one row, whose score stands in its column of a table."""
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores_ptr + row * row_stride + tl.load(columns_ptr + row)).to(tl.float32)
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    token = tl.load(tokens_ptr + row) + first_token
    tl.store(output_ptr + row, (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - token))


def _packed_triton(
    scores: torch.Tensor, row_stride: int, columns: torch.Tensor, tokens: torch.Tensor, first_token: int
) -> torch.Tensor:
    output = torch.empty_like(tokens)
    if len(tokens):
        _pack_kernel[(len(tokens),)](scores, columns, tokens, output, row_stride, first_token, num_warps=1)
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    logits = torch.empty(64, 1024, dtype=dtype, device="meta")
    best = torch.empty(64, dtype=torch.int64, device="meta")
    return [lambda: _packed_triton(logits, 1024, best, best, 1024)]
