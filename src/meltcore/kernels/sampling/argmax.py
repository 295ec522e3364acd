"""Computes the argmax over the vocabulary, for greedy decoding."""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton

# Logits of one program: enough programs for a single row, and few enough maxima for one program to load.
_CHUNK, _WARPS = 4096, 4


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of each row's largest logit, and of equal logits the lowest id. A NaN is above all numbers.

    logits: [rows, vocab] of any floating type, rows may be strided. Returns [rows] int64.
    """
    if not use_triton(logits):
        return logits.argmax(-1)
    (rows, vocab), device = logits.shape, logits.device
    output = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return output
    require_contiguous_rows(logits)
    chunks = triton.cdiv(vocab, _CHUNK)
    maxima = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    _chunk_maximum_kernel[(rows, chunks)](logits, maxima, vocab, logits.stride(0), CHUNK=_CHUNK, num_warps=_WARPS)
    _first_maximum_kernel[(rows,)](
        *(logits, maxima, output, vocab, logits.stride(0), chunks),
        CHUNKS=triton.next_power_of_2(chunks),
        CHUNK=_CHUNK,
        num_warps=_WARPS,
    )
    return output


def require_contiguous_rows(logits: torch.Tensor) -> None:
    """Raise ValueError if the logits of a row are not contiguous."""
    if logits.stride(1) != 1:
        raise ValueError(f"logits of strides {logits.stride()}: the last dimension must be contiguous")


@triton.jit
def first_largest(values, tokens, limit):
    """Return the largest of `values`, with NaN above all numbers, and the lowest of its `tokens`.

    limit: a number above all tokens.
    """
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    maximum = tl.max(values, axis=0)
    is_largest = tl.where(has_nan, values != values, values == maximum)
    return tl.where(has_nan, float("nan"), maximum), tl.min(tl.where(is_largest, tokens, limit), axis=0)


@triton.jit
def _chunk_maximum_kernel(logits_ptr, maxima_ptr, vocab, row_stride, CHUNK: tl.constexpr):
    """Each program finds the largest of CHUNK logits of one row, or NaN if there is one.

    The index is found by the next kernel, in one chunk per row, so that the pass over all logits takes two instructions
    for each.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    maximum = tl.where(has_nan, float("nan"), tl.max(values, axis=0))
    tl.store(maxima_ptr + row * tl.num_programs(1) + chunk, maximum)


@triton.jit
def _first_maximum_kernel(
    logits_ptr, maxima_ptr, output_ptr, vocab, row_stride, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """Each program handles one row: it finds the first chunk with the largest maximum, and there the token's index."""
    row = tl.program_id(0).to(tl.int64)
    chunk_index = tl.arange(0, CHUNKS)
    maxima = tl.load(maxima_ptr + row * chunks + chunk_index, mask=chunk_index < chunks, other=float("-inf"))
    _, chunk = first_largest(maxima, chunk_index, CHUNKS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    _, best = first_largest(values, token, vocab)
    tl.store(output_ptr + row, best.to(tl.int64))
