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

from typing import NamedTuple

import torch

from meltcore.kernels.capability import capability
from meltcore.kernels.delta import CHUNK, DeltaShape, DeltaWeights, gates, quick_exp2
from meltcore.kernels.delta_places import chunk_place, chunk_places
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

_LOG2_E = 1.4426950408889634
_BLOCK = 16  # the smallest that tl.dot takes


class Prepared(NamedTuple):
    """changes, reads: [places, heads, CHUNK, CHUNK], T diag(beta) and P, in the type of the product.

    scales: [places, heads, 2, CHUNK] float32, of the tokens of a chunk exp(G) and exp(G_last - G).
    """

    changes: torch.Tensor
    reads: torch.Tensor
    scales: torch.Tensor


def prepare_chunks(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    weights: DeltaWeights,
    first_tokens: torch.Tensor,
    chunks: torch.Tensor,
    decodes: int,
    shape: DeltaShape,
) -> Prepared:
    """For `delta_prefill`'s arguments and `convolve_chunks`' result, in Triton."""
    changes, reads = (projected.new_empty(len(convolved), shape.heads, CHUNK, CHUNK) for _ in range(2))
    scales = torch.empty(len(convolved), shape.heads, 2, CHUNK, dtype=torch.float32, device=projected.device)
    _chunk_kernel[(shape.heads, len(chunks))](
        projected,
        convolved,
        weights.a_log,
        weights.dt_bias,
        first_tokens,
        chunks,
        decodes,
        changes,
        reads,
        scales,
        projected.stride(0),
        **shape.constants(),
        CHUNK=CHUNK,
        NATIVE=capability(projected.device) > 0,
        LOG2_E=_LOG2_E,
        BLOCK=_BLOCK,
        num_warps=CHUNK // _BLOCK,
    )
    return Prepared(changes, reads, scales)


@triton.jit
def _join(inverse, lower, apart, bit, dtype: tl.constexpr):
    """`inverse`, that of the diagonal blocks of 2^bit of `lower`, for blocks of twice the size."""
    left = inverse.to(dtype)
    product = tl.dot(tl.where(apart >> bit == 1, lower, 0.0).to(dtype), left, input_precision="ieee")
    return inverse - tl.dot(left, product.to(dtype), input_precision="ieee")


@triton.jit
def _inverse(lower, SIZE: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """(I + lower)^-1 of a lower triangular matrix [SIZE, SIZE] float32, whose diagonal counts as zeros.

    Diagonal blocks are inverted and joined two by two, [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], all of
    a size in two products. Unlike powers of `lower`, every block is a true inverse, and here its numbers are at most 1:
    16-bit floats with 11 bits, `dtype`, lose as little as tf32 does. Up to BLOCK, each warp has a block for itself.
    """
    BLOCKS: tl.constexpr = SIZE // BLOCK
    which, within, row = tl.arange(0, BLOCKS), tl.arange(0, BLOCK), tl.arange(0, SIZE)
    on_diagonal = (which[:, None] == which[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), 2)
    # The highest bit of `apart` says between which halves of which block an element stands.
    apart = (within[:, None] ^ within[None, :])[None, :, :]
    solved = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, blocks, 0.0)
    for bit in tl.static_range(1, BLOCK.bit_length() - 1):
        solved = _join(solved, blocks, apart, bit, dtype)

    inverse = tl.reshape(tl.where(on_diagonal, solved[:, :, None, :], 0.0), (SIZE, SIZE))
    apart = row[:, None] ^ row[None, :]
    for bit in tl.static_range(BLOCK.bit_length() - 1, SIZE.bit_length() - 1):
        inverse = _join(inverse, lower, apart, bit, dtype)
    return inverse


# Indices may lie at any address of a longer tensor.
@triton.jit(do_not_specialize=["first_tokens", "chunks", "decodes"])
def _chunk_kernel(
    projected,
    convolved,
    a_log,
    dt_bias,
    first_tokens,
    chunks,
    decodes,
    changes,
    reads,
    scales,
    projected_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one segment for one value head. Heads that share keys multiply them anew: cheaper than registers."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    dtype: tl.constexpr = convolved.dtype.element_ty
    accurate: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    head = tl.program_id(0)
    segment = tl.load(chunks + tl.program_id(1) * 2).to(tl.int64)
    number = tl.load(chunks + tl.program_id(1) * 2 + 1)
    first = tl.load(first_tokens + segment) + number * CHUNK
    count = (tl.load(first_tokens + segment + 1) - first).to(tl.int32)
    place = chunk_place(first_tokens, segment, number, decodes, CHUNK)
    row = tl.arange(0, CHUNK)
    inside = row < count
    key_at = head // (HEADS // KEY_HEADS) * (CHUNK * KEY_DIM)
    rows = convolved + place * (CHUNK * CHANNELS) + key_at + row[:, None] * KEY_DIM + tl.arange(0, KEY_DIM)[None, :]
    query, key = tl.load(rows), tl.load(rows + CHUNK * KEYS)

    # Both of a token in one tile, a number a thread: vectors would be worked out by every thread that needs them.
    which = tl.arange(0, 2)[None, :]
    ba = projected + (first + row)[:, None] * projected_stride + CHANNELS + HEADS * VALUE_DIM + head
    given = tl.load(ba + which * HEADS, inside[:, None], other=0.0).to(tl.float32)
    g, beta = gates(given, given, tl.load(a_log + head), tl.load(dt_bias + head))
    # Rows past the end change nothing. Decays are powers of 2, which processors know.
    made = tl.where(inside[:, None], tl.where(which == 0, beta, g * LOG2_E), 0.0)
    beta, g = tl.sum(tl.where(which == 0, made, 0.0), 1), tl.sum(tl.where(which == 1, made, 0.0), 1)
    decay, total = tl.cumsum(g, 0), tl.sum(g, 0)
    of_head = place * HEADS + head
    scale = scales + of_head * (2 * CHUNK) + row
    tl.store(scale, quick_exp2(decay, NATIVE))
    tl.store(scale + CHUNK, quick_exp2(total - decay, NATIVE))
    before = row[:, None] >= row[None, :]
    stays = quick_exp2(tl.where(before, decay[:, None] - decay[None, :], float("-inf")), NATIVE)

    pairs = of_head * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    read = tl.dot(query, tl.trans(key), input_precision="ieee") * stays
    tl.store(reads + pairs, read.to(dtype))
    lower = tl.dot(key, tl.trans(key), input_precision="ieee") * stays * beta[:, None]
    solved = _inverse(lower, CHUNK, BLOCK, accurate)
    tl.store(changes + pairs, (solved * beta[None, :]).to(dtype))


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    shape = DeltaShape(*model.delta)
    projected, weights, _ = shape.examples(512, dtype)
    convolved = torch.empty(chunk_places(512, 3), shape.conv_channels * CHUNK, dtype=dtype, device="meta")
    index = torch.empty(4, dtype=torch.int64, device="meta")
    chunks = torch.empty(8, 2, dtype=torch.int32, device="meta")
    return [lambda: prepare_chunks(projected, convolved, weights, index, chunks, 0, shape)]
