"""Persistent grouped GEMM with the tensor memory accelerator (TMA) of Hopper GPUs, for many pairs.

Where an expert has some dozens of pairs or more, reading its weight no longer takes the time; what counts is how fast
tiles reach the tensor cores. So tokens are copied to the rows of their pairs (moe/align.py), and one program per SM
loops over tiles: the first loads of the next tile are in flight while this one is stored.

On an H200, 8,064 tokens of Qwen3-30B-A3B: 610 and 350 us for the two GEMMs and 80 for the copy, against 780 and 430
with moe/grouped_gemm.py. Tiles run at 730 TFLOP/s, nine tenths of their rows valid.
"""

from __future__ import annotations

import math

import torch

from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.jit import TensorDescriptor, tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync
from meltcore.kernels.moe.align import max_tiles, moe_align_block_size

BLOCK_M = 128  # pairs
_HOPPER = 90  # the compute capability at which this is faster
# Pairs per expert from which on it is faster, by the least width: with fewer, tiles are less than half full, and narrow
# experts, such as a rank's shards, save less than the copy costs (H200, Qwen3.5's: even at 128 pairs of width 256 and
# 128, a quarter slower at 250 of width 64).
_MIN_PAIRS = {512: 64, 128: 128}
_BLOCK_K, _NUM_STAGES, _NUM_WARPS = 64, 3, 8  # measured on an H200


@triton.jit
def _moe_permute_tokens_kernel(
    hidden_ptr,
    permuted_ptr,
    src2dst_ptr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program copies one token to the row of each of its pairs."""
    pdl_sync(PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < SIZE
    hidden = tl.load(hidden_ptr + token * SIZE + column, mask=mask)
    for k in tl.static_range(TOP_K):
        row = tl.load(src2dst_ptr + token * TOP_K + k).to(tl.int64)
        tl.store(permuted_ptr + row * SIZE + column, hidden, mask=mask)


@triton.jit
def _moe_gate_up_tma_kernel(
    permuted,
    weight,
    activated,
    expert_ids_ptr,
    num_tiles_ptr,
    N_TILES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes tiles in a loop. A tile has BLOCK_M pairs, BLOCK_N gate rows and BLOCK_N up rows."""
    pdl_sync(PDL)
    tiles = tl.load(num_tiles_ptr) * N_TILES
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        m_tile, n_tile = tile // N_TILES, tile % N_TILES
        expert = tl.load(expert_ids_ptr + m_tile)
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            inputs = permuted.load([m_tile * BLOCK_M, start])
            rows = weight.load([expert, 0, n_tile * BLOCK_N, start]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(inputs, rows.T, acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        gated = gate / (1.0 + tl.exp(-gate)) * up
        activated.store([m_tile * BLOCK_M, n_tile * BLOCK_N], gated.to(activated.dtype))


@triton.jit
def _moe_down_tma_kernel(
    activated,
    weight,
    outputs_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    num_tiles_ptr,
    N_TILES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes tiles in a loop, each of BLOCK_M pairs and BLOCK_N rows of down_proj.

    Results are stored in the order of pairs.
    """
    pdl_sync(PDL)
    tiles = tl.load(num_tiles_ptr) * N_TILES
    slot, row = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)[None, :]
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        m_tile, n_tile = tile // N_TILES, tile % N_TILES
        expert = tl.load(expert_ids_ptr + m_tile)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            inputs = activated.load([m_tile * BLOCK_M, start])
            rows = weight.load([(expert * N_TILES + n_tile) * BLOCK_N, start])
            acc = tl.dot(inputs, rows.T, acc)
        pair = tl.load(sorted_token_ids_ptr + m_tile * BLOCK_M + slot).to(tl.int64)
        outputs = outputs_ptr + pair[:, None] * (N_TILES * BLOCK_N) + n_tile * BLOCK_N + row
        tl.store(outputs, acc, mask=(slot < tl.load(num_valid_ptr + m_tile))[:, None])


def supports(hidden: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Return whether `expert_outputs_tma` supports these tensors and is faster than the other kernels.

    hidden: [tokens, hidden_size]; gate_up: [experts, 2 * width, hidden_size]; down: [experts, hidden_size, width].
    """
    size, width = down.shape[1:]
    is_divisible = size % BLOCK_M == 0 and _gate_rows(width) >= _BLOCK_K
    min_pairs = next((pairs for min_width, pairs in _MIN_PAIRS.items() if width >= min_width), math.inf)
    return (
        topk_ids.numel() >= min_pairs * len(gate_up)
        and is_divisible
        and hidden.element_size() == 2
        and capability(hidden.device) == _HOPPER
    )


def _gate_rows(width: int) -> int:
    """Return the number of gate rows of a tile, the largest power of two up to BLOCK_M that divides the width."""
    return min(BLOCK_M, width & -width)


def expert_outputs_tma(
    hidden: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute the unweighted outputs of each token's experts by persistent grouped GEMMs.

    Returns [tokens * top_k, hidden_size]: down (silu(gate x) * up x) of each pair. Arguments as in `expert_outputs`.
    """
    (tokens, top_k), (num_experts, size, width) = topk_ids.shape, down.shape
    alignment = moe_align_block_size(topk_ids, BLOCK_M, num_experts)
    rows = max_tiles(topk_ids.numel(), num_experts, BLOCK_M) * BLOCK_M
    permuted, activated = hidden.new_empty(rows, size), hidden.new_empty(rows, width)
    pdl, programs = pdl_options(hidden.device), sm_count(hidden.device)
    block = triton.next_power_of_2(size)
    _moe_permute_tokens_kernel[(tokens,)](
        hidden, permuted, alignment.src2dst, SIZE=size, TOP_K=top_k, BLOCK=block, num_warps=8, **pdl
    )
    tiling = {"BLOCK_M": BLOCK_M, "BLOCK_K": _BLOCK_K, "NUM_STAGES": _NUM_STAGES, "num_warps": _NUM_WARPS}
    gate_rows = _gate_rows(width)
    _moe_gate_up_tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(permuted, [BLOCK_M, _BLOCK_K]),
        TensorDescriptor.from_tensor(gate_up.view(num_experts, 2, width, size), [1, 2, gate_rows, _BLOCK_K]),
        TensorDescriptor.from_tensor(activated, [BLOCK_M, gate_rows]),
        alignment.expert_ids,
        alignment.num_tiles,
        N_TILES=width // gate_rows,
        K=size,
        BLOCK_N=gate_rows,
        **tiling,
        **pdl,
    )
    del permuted  # its memory is reused by what follows: kernels on one stream run in order
    outputs, down_rows = hidden.new_empty(topk_ids.numel(), size), min(2 * BLOCK_M, size & -size)
    _moe_down_tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(activated, [BLOCK_M, _BLOCK_K]),
        TensorDescriptor.from_tensor(down.view(num_experts * size, width), [down_rows, _BLOCK_K]),
        outputs,
        *alignment[1:],
        N_TILES=size // down_rows,
        K=width,
        BLOCK_N=down_rows,
        **tiling,
        **pdl,
    )
    return outputs
