"""The state-independent part of Gated DeltaNet's prefill, computed for all chunks in parallel.

Within a chunk the updates u_i = beta_i (v_i - k_i S_i) that its tokens make to the state depend on each other: S_i
contains the updates of all tokens before. With G_i the sum of g up to token i and S the state before the chunk,

    u_i + sum over j < i of A_ij u_j = beta_i (v_i - exp(G_i) k_i S),    A_ij = beta_i exp(G_i - G_j) (k_i . k_j)

so u = T diag(beta) (v - exp(G) k S) with T = (I + A)^-1, and token i reads exp(G_i) q_i S + sum over j <= i of P_ij u_j
with P_ij = exp(G_i - G_j) (q_i . k_j). (Yang et al. 2024, arXiv:2406.06484 and arXiv:2412.06464.) T diag(beta) and P
are computed here for all chunks; gated_delta/state_scan.py carries the state through them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.capability import capability
from meltcore.kernels.gated_delta.common import (
    CHUNK,
    GatedDeltaParams,
    GatedDeltaShape,
    chunk_row,
    constants,
    decay_and_beta,
    fast_exp2,
)
from meltcore.kernels.jit import tl, triton

_LOG2_E = 1.4426950408889634
_BLOCK = 16  # the smallest that tl.dot takes


class PreparedChunks(NamedTuple):
    """The state-independent matrices of all chunks, with names as in the module's docstring.

    updates, reads: [chunk_rows, heads, CHUNK, CHUNK], T diag(beta) and P, in the type of the projection.

    scales: [chunk_rows, heads, 2, CHUNK] float32, exp(G) and exp(G_last - G) of each token of a chunk.
    """

    updates: torch.Tensor
    reads: torch.Tensor
    scales: torch.Tensor


def prepare_chunks(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    params: GatedDeltaParams,
    metadata: AttentionMetadata,
    shape: GatedDeltaShape,
) -> PreparedChunks:
    """Compute the state-independent matrices of all chunks. `convolved` is the result of `convolve_chunks`."""
    chunks, device = metadata.chunk_indices, projected.device
    updates, reads = (projected.new_empty(len(convolved), shape.heads, CHUNK, CHUNK) for _ in range(2))
    scales = torch.empty(len(convolved), shape.heads, 2, CHUNK, dtype=torch.float32, device=device)
    _chunk_kernel[(shape.heads, len(chunks))](
        *(projected, convolved, params.a_log, params.dt_bias, metadata.query_start_loc, chunks, metadata.first_prompt),
        *(updates, reads, scales, projected.stride(0)),
        **constants(shape),
        CHUNK=CHUNK,
        NATIVE=capability(device) > 0,
        LOG2_E=_LOG2_E,
        BLOCK=_BLOCK,
        num_warps=CHUNK // _BLOCK,
    )
    return PreparedChunks(updates, reads, scales)


@triton.jit
def _merge_inverses(inverse, lower, bit_distance, bit, dtype: tl.constexpr):
    """Return the inverses of the diagonal blocks of size 2^(bit + 1) of `lower`.

    inverse: the inverses of the diagonal blocks of size 2^bit.
    """
    left = inverse.to(dtype)
    cross = tl.dot(tl.where(bit_distance >> bit == 1, lower, 0.0).to(dtype), left, input_precision="ieee")
    return inverse - tl.dot(left, cross.to(dtype), input_precision="ieee")


@triton.jit
def _invert_lower(lower, SIZE: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Return (I + lower)^-1 of a lower triangular matrix [SIZE, SIZE] float32, whose diagonal counts as zeros.

    Diagonal blocks are inverted and joined in pairs, [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], all of
    one size in two dots. Unlike powers of `lower`, every block is a true inverse, with numbers of at most 1 here:
    16-bit floats with 11 bits, `dtype`, lose as little as tf32 does. Up to size BLOCK, each warp has its own block.
    """
    BLOCKS: tl.constexpr = SIZE // BLOCK
    part_idx, block_row, row = tl.arange(0, BLOCKS), tl.arange(0, BLOCK), tl.arange(0, SIZE)
    on_diagonal = (part_idx[:, None] == part_idx[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), 2)
    # The highest bit of `bit_distance` tells between the halves of which block size an element is.
    bit_distance = (block_row[:, None] ^ block_row[None, :])[None, :, :]
    block_inverses = tl.where(bit_distance == 0, 1.0, 0.0) - tl.where(bit_distance == 1, blocks, 0.0)
    for bit in tl.static_range(1, BLOCK.bit_length() - 1):
        block_inverses = _merge_inverses(block_inverses, blocks, bit_distance, bit, dtype)

    inverse = tl.reshape(tl.where(on_diagonal, block_inverses[:, :, None, :], 0.0), (SIZE, SIZE))
    bit_distance = row[:, None] ^ row[None, :]
    for bit in tl.static_range(BLOCK.bit_length() - 1, SIZE.bit_length() - 1):
        inverse = _merge_inverses(inverse, lower, bit_distance, bit, dtype)
    return inverse


# Indices are slices of a longer tensor, at any alignment.
@triton.jit(do_not_specialize=["query_start_loc", "chunks", "num_decodes"])
def _chunk_kernel(
    projected,
    convolved,
    a_log,
    dt_bias,
    query_start_loc,
    chunks,
    num_decodes,
    updates,
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
    """Each program prepares one chunk of one value head.

    Heads that share keys repeat the dots of these keys, which costs less than registers for several heads.
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    dtype: tl.constexpr = convolved.dtype.element_ty
    inverse_dtype: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    head = tl.program_id(0)
    sequence = tl.load(chunks + tl.program_id(1) * 2).to(tl.int64)
    chunk_number = tl.load(chunks + tl.program_id(1) * 2 + 1)
    first_token = tl.load(query_start_loc + sequence) + chunk_number * CHUNK
    num_remaining = (tl.load(query_start_loc + sequence + 1) - first_token).to(tl.int32)
    if num_remaining <= 0:
        return
    chunk_idx = chunk_row(query_start_loc, sequence, chunk_number, num_decodes, CHUNK)
    row = tl.arange(0, CHUNK)
    is_valid = row < num_remaining
    key_offset = head // (HEADS // KEY_HEADS) * (CHUNK * KEY_DIM)
    query_ptrs = (
        convolved
        + chunk_idx * (CHUNK * CHANNELS)
        + key_offset
        + row[:, None] * KEY_DIM
        + tl.arange(0, KEY_DIM)[None, :]
    )
    query, key = tl.load(query_ptrs), tl.load(query_ptrs + CHUNK * KEYS)

    # b and a of a token in one tile, one number per thread: vectors would be computed by every thread that uses them.
    part_idx = tl.arange(0, 2)[None, :]
    b_and_a_ptr = projected + (first_token + row)[:, None] * projected_stride + CHANNELS + HEADS * VALUE_DIM + head
    b_and_a = tl.load(b_and_a_ptr + part_idx * HEADS, is_valid[:, None], other=0.0).to(tl.float32)
    g, beta = decay_and_beta(b_and_a, b_and_a, tl.load(a_log + head), tl.load(dt_bias + head))
    # Rows past the end update nothing. Decays are powers of 2, which have an instruction.
    beta_and_g = tl.where(is_valid[:, None], tl.where(part_idx == 0, beta, g * LOG2_E), 0.0)
    beta, g = tl.sum(tl.where(part_idx == 0, beta_and_g, 0.0), 1), tl.sum(tl.where(part_idx == 1, beta_and_g, 0.0), 1)
    decay, total_decay = tl.cumsum(g, 0), tl.sum(g, 0)
    head_row = chunk_idx * HEADS + head
    scale_ptrs = scales + head_row * (2 * CHUNK) + row
    tl.store(scale_ptrs, fast_exp2(decay, NATIVE))
    tl.store(scale_ptrs + CHUNK, fast_exp2(total_decay - decay, NATIVE))
    is_causal = row[:, None] >= row[None, :]
    decays = fast_exp2(tl.where(is_causal, decay[:, None] - decay[None, :], float("-inf")), NATIVE)

    matrix_offsets = head_row * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    attn = tl.dot(query, tl.trans(key), input_precision="ieee") * decays
    tl.store(reads + matrix_offsets, attn.to(dtype))
    lower = tl.dot(key, tl.trans(key), input_precision="ieee") * decays * beta[:, None]
    block_inverses = _invert_lower(lower, CHUNK, BLOCK, inverse_dtype)
    tl.store(updates + matrix_offsets, (block_inverses * beta[None, :]).to(dtype))
