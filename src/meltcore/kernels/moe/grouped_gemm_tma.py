"""Persistent grouped GEMM with the tensor memory accelerator (TMA) of Hopper GPUs, for many pairs.

If an expert has dozens of pairs or more, the time no longer depends on reading its weight, but on how fast tiles reach
the tensor cores. So tokens are copied to the rows of their pairs (moe/align.py), and one program per SM loops over
tiles. The first loads of the next tile are in flight while the current tile is stored.

On an H200, 8,064 tokens of Qwen3-30B-A3B take 610 and 350 us for the two GEMMs and 80 us for the copy. The GEMMs of
moe/grouped_gemm.py take 780 and 430 us. Tiles run at 730 TFLOP/s, and nine tenths of their rows are valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
def _tiles_of_experts(expert_ids_ptr, num_tiles_ptr, first_expert, end_expert, SLICED: tl.constexpr):
    """Return the first tile of some experts and the end of their tiles, which are in the order of experts.

    Without SLICED they are those of all experts.
    """
    first, end = 0, tl.load(num_tiles_ptr)
    if SLICED:
        before, until = tl.zeros((1024,), dtype=tl.int32), tl.zeros((1024,), dtype=tl.int32)
        for start in tl.range(0, end, 1024):
            tile = start + tl.arange(0, 1024)
            expert = tl.load(expert_ids_ptr + tile, mask=tile < end, other=2**30)
            before += (expert < first_expert).to(tl.int32)
            until += (expert < end_expert).to(tl.int32)
        first, end = tl.sum(before, axis=0), tl.sum(until, axis=0)
    return first, end


@triton.jit(do_not_specialize=["first_expert", "end_expert"])
def _moe_gate_up_tma_kernel(
    permuted,
    weight,
    activated,
    expert_ids_ptr,
    num_tiles_ptr,
    first_expert,
    end_expert,
    N_TILES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SLICED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes tiles in a loop. A tile has BLOCK_M pairs, BLOCK_N gate rows and BLOCK_N up rows.

    SLICED: only those of experts from first_expert to end_expert, of which the weight is.
    """
    pdl_sync(PDL)
    first_tile, end_tile = _tiles_of_experts(expert_ids_ptr, num_tiles_ptr, first_expert, end_expert, SLICED)
    for tile in tl.range(first_tile * N_TILES + tl.program_id(0), end_tile * N_TILES, tl.num_programs(0), flatten=True):
        m_tile, n_tile = tile // N_TILES, tile % N_TILES
        expert = tl.load(expert_ids_ptr + m_tile) - first_expert
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            inputs = permuted.load([m_tile * BLOCK_M, start])
            rows = weight.load([expert, 0, n_tile * BLOCK_N, start]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(inputs, rows.T, acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        gated = gate / (1.0 + tl.exp(-gate)) * up
        activated.store([m_tile * BLOCK_M, n_tile * BLOCK_N], gated.to(activated.dtype))


@triton.jit(do_not_specialize=["first_expert", "end_expert"])
def _moe_down_tma_kernel(
    activated,
    weight,
    outputs_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    num_tiles_ptr,
    first_expert,
    end_expert,
    N_TILES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SLICED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes tiles in a loop, each of BLOCK_M pairs and BLOCK_N rows of down_proj.

    Results are stored in the order of pairs. SLICED as for gate and up.
    """
    pdl_sync(PDL)
    first_tile, end_tile = _tiles_of_experts(expert_ids_ptr, num_tiles_ptr, first_expert, end_expert, SLICED)
    slot, row = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)[None, :]
    for tile in tl.range(first_tile * N_TILES + tl.program_id(0), end_tile * N_TILES, tl.num_programs(0), flatten=True):
        m_tile, n_tile = tile // N_TILES, tile % N_TILES
        expert = tl.load(expert_ids_ptr + m_tile) - first_expert
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
    min_pairs = next((pairs for min_width, pairs in _MIN_PAIRS.items() if width >= min_width), math.inf)
    return topk_ids.numel() >= min_pairs * len(gate_up) and supports_shape(hidden, size, width)


def supports_shape(hidden: torch.Tensor, size: int, width: int) -> bool:
    """Return whether the kernels support tokens of this type and device, and experts of this hidden size and width."""
    is_divisible = size % BLOCK_M == 0 and _gate_rows(width) >= _BLOCK_K
    return is_divisible and hidden.element_size() == 2 and capability(hidden.device) == _HOPPER


def _gate_rows(width: int) -> int:
    """Return the number of gate rows of a tile, the largest power of two up to BLOCK_M that divides the width."""
    return min(BLOCK_M, width & -width)


class WeightSlice(NamedTuple):
    """The weights of some neighboring experts, [experts, rows, columns], from `first_expert` on."""

    first_expert: int
    weight: torch.Tensor


def expert_outputs_tma(
    hidden: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute the unweighted outputs of each token's experts by persistent grouped GEMMs.

    Returns [tokens * top_k, hidden_size]: down (silu(gate x) * up x) of each pair. Arguments as in `expert_outputs`.
    """
    return expert_outputs_of_slices(hidden, topk_ids, [WeightSlice(0, gate_up)], [WeightSlice(0, down)], down.shape)


def expert_outputs_of_slices(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: Iterable[WeightSlice],
    down: Iterable[WeightSlice],
    shape: Sequence[int],
) -> torch.Tensor:
    """Compute `expert_outputs_tma` with weights in slices. A slice is taken from its iterable right before it is used.

    `shape` is the shape of down_proj, [experts, hidden_size, width].
    """
    (tokens, top_k), (num_experts, size, width) = topk_ids.shape, shape
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
    for first, weight in gate_up:
        experts = len(weight)
        _moe_gate_up_tma_kernel[(programs,)](
            TensorDescriptor.from_tensor(permuted, [BLOCK_M, _BLOCK_K]),
            TensorDescriptor.from_tensor(weight.view(experts, 2, width, size), [1, 2, gate_rows, _BLOCK_K]),
            TensorDescriptor.from_tensor(activated, [BLOCK_M, gate_rows]),
            alignment.expert_ids,
            alignment.num_tiles,
            first,
            first + experts,
            N_TILES=width // gate_rows,
            K=size,
            BLOCK_N=gate_rows,
            SLICED=experts < num_experts,
            **tiling,
            **pdl,
        )
    del permuted  # its memory is reused by what follows: kernels on one stream run in order
    outputs, down_rows = hidden.new_empty(topk_ids.numel(), size), min(2 * BLOCK_M, size & -size)
    for first, weight in down:
        experts = len(weight)
        _moe_down_tma_kernel[(programs,)](
            TensorDescriptor.from_tensor(activated, [BLOCK_M, _BLOCK_K]),
            TensorDescriptor.from_tensor(weight.view(experts * size, width), [down_rows, _BLOCK_K]),
            outputs,
            *alignment[1:],
            first,
            first + experts,
            N_TILES=size // down_rows,
            K=width,
            BLOCK_N=down_rows,
            SLICED=experts < num_experts,
            **tiling,
            **pdl,
        )
    return outputs
