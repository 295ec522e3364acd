"""What chunks of prompts tell of themselves, before any state is known: the parallel part of Gated DeltaNet's prefill.

Within a chunk the changes u_i = beta_i (v_i - k_i S_i) that its tokens make to the state depend on each other: S_i
holds those of all tokens before. With G_i the sum of g up to token i and S the state before the chunk,

    u_i + sum over j < i of A_ij u_j = beta_i (v_i - exp(G_i) k_i S),    A_ij = beta_i exp(G_i - G_j) (k_i . k_j)

so u = T diag(beta) (v - exp(G) k S) with T = (I + A)^-1, and token i reads exp(G_i) q_i S + sum over j <= i of
P_ij u_j with P_ij = exp(G_i - G_j) (q_i . k_j). (Yang et al. 2024, arXiv:2406.06484 and arXiv:2412.06464.) T diag(beta)
and P are made here for all chunks at once; the state goes through them in kernels/delta_scan.py.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from meltcore.kernels.delta import CHUNK, DeltaShape, DeltaWeights, gates
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton


def delta_chunks(sizes: Sequence[int], decodes: int) -> np.ndarray:
    """How segments of `sizes` tokens, the first `decodes` of which are single, are cut: [chunks, 2] int32.

    A row is a segment and which of its chunks of CHUNK tokens, counted from the segment's first token.
    """
    counts = -(-np.asarray(sizes[decodes:], dtype=np.int32) // CHUNK)
    segments = np.arange(decodes, len(sizes), dtype=np.int32).repeat(counts)
    within = np.arange(len(segments), dtype=np.int32) - (counts.cumsum() - counts).repeat(counts)
    return np.stack([segments, within.astype(np.int32)], 1)


class Prepared(NamedTuple):
    """decays: [tokens, heads] float32, G; changes, reads: [tokens, heads, CHUNK], rows of T diag(beta) and of P."""

    decays: torch.Tensor
    changes: torch.Tensor
    reads: torch.Tensor


def prepare_chunks(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    weights: DeltaWeights,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    shape: DeltaShape,
) -> Prepared:
    """For `delta_prefill`'s arguments and `convolve_chunks`' result, in Triton; in its type but for the decays."""
    tokens, heads = len(projected), shape.heads
    decays = torch.empty(tokens, heads, dtype=torch.float32, device=projected.device)
    changes, reads = (projected.new_empty(tokens, heads, CHUNK) for _ in range(2))
    _chunk_kernel[(shape.heads, len(chunks))](
        projected,
        convolved,
        weights.a_log,
        weights.dt_bias,
        first_tokens,
        chunks,
        decays,
        changes,
        reads,
        projected.stride(0),
        **shape.constants(),
        CHUNK=CHUNK,
        num_warps=4,
    )
    return Prepared(decays, changes, reads)


@triton.jit
def _inverse(lower, SIZE: tl.constexpr, dtype: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular matrix [SIZE, SIZE] float32.

    Diagonal blocks are inverted and joined two by two, [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], all of
    a size in two products. Unlike powers of `lower`, every block is a true inverse, and here its numbers are at most 1:
    16-bit floats with 11 bits, `dtype`, lose as little as tf32 does.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    apart = row ^ column  # its highest bit says between which halves of which block an element stands
    inverse = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, lower, 0.0)
    for bit in range(1, SIZE.bit_length() - 1):
        left = inverse.to(dtype)
        product = tl.dot(tl.where(apart >> bit == 1, lower, 0.0).to(dtype), left, input_precision="ieee")
        inverse -= tl.dot(left, product.to(dtype), input_precision="ieee")
    return inverse


# Indices may lie at any address of a longer tensor.
@triton.jit(do_not_specialize=["first_tokens", "chunks"])
def _chunk_kernel(
    projected,
    convolved,
    a_log,
    dt_bias,
    first_tokens,
    chunks,
    decays,
    changes,
    reads,
    projected_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one segment for one value head. Heads that share keys multiply them anew: cheaper than registers."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    dtype: tl.constexpr = convolved.dtype.element_ty
    accurate: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    head = tl.program_id(0)
    segment = tl.load(chunks + tl.program_id(1) * 2).to(tl.int64)
    first = tl.load(first_tokens + segment) + tl.load(chunks + tl.program_id(1) * 2 + 1) * CHUNK
    count = tl.load(first_tokens + segment + 1) - first
    row = tl.arange(0, CHUNK)
    token = first + row
    inside = row < count

    b = projected + token * projected_stride + CHANNELS + HEADS * VALUE_DIM + head
    g, beta = gates(
        tl.load(b + HEADS, inside, other=0.0).to(tl.float32),
        tl.load(b, inside, other=0.0).to(tl.float32),
        tl.load(a_log + head),
        tl.load(dt_bias + head),
    )
    # Rows past the end change nothing.
    decay, beta = tl.cumsum(tl.where(inside, g, 0.0), 0), tl.where(inside, beta, 0.0)
    of_head = token * HEADS + head
    tl.store(decays + of_head, decay, inside)
    before = row[:, None] >= row[None, :]
    stays = tl.exp(tl.where(before, decay[:, None] - decay[None, :], float("-inf")))

    key_columns = head // (HEADS // KEY_HEADS) * KEY_DIM + tl.arange(0, KEY_DIM)
    rows = convolved + token[:, None] * CHANNELS + key_columns[None, :]
    query = tl.load(rows, inside[:, None], other=0.0)
    key = tl.load(rows + KEYS, inside[:, None], other=0.0)
    pairs = of_head[:, None] * CHUNK + row[None, :]
    read = tl.dot(query, tl.trans(key), input_precision="ieee") * stays
    tl.store(reads + pairs, read.to(dtype), inside[:, None])
    lower = tl.dot(key, tl.trans(key), input_precision="ieee") * stays * beta[:, None]
    solved = _inverse(tl.where(row[:, None] == row[None, :], 0.0, lower), CHUNK, accurate)
    tl.store(changes + pairs, (solved * beta[None, :]).to(dtype), inside[:, None])


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    shape = DeltaShape(*model.delta)
    projected, weights, _ = shape.examples(512, dtype)
    convolved = torch.empty(512, shape.conv_channels, dtype=dtype, device="meta")
    index = torch.empty(4, dtype=torch.int64, device="meta")
    chunks = torch.empty(8, 2, dtype=torch.int32, device="meta")
    return [lambda: prepare_chunks(projected, convolved, weights, index, chunks, shape)]
