"""GEMM of tokens with an FP8 weight that has a scale per block, for few tokens and for many.

It uses the method of gemm/split_k.py. A step of the main loop multiplies 128 columns on the tensor cores. Both
operands' scales of these columns are applied to the result before it is added to the sums in float32. Sums have a fixed
order: the order of the columns within a split, then the order of the splits.
"""

from __future__ import annotations

import torch

from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.fp8.block_fp8 import BLOCK, BlockFp8Tensor, num_blocks
from meltcore.kernels.fp8.fp8 import FP8_CAPABILITY
from meltcore.kernels.gemm.split_k import (
    GemmConfig,
    output_tile,
    reduce_splits,
    split_workspace,
    store_tile,
    weight_row,
)
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, prefetch

MIN_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
_L2_VALUES = 2**24  # of a weight that stays in the L2 cache
_PREFETCH_STEPS = 4
_SCALE_BYTES = 2**12  # of shared memory, for the scales of a tile's tokens and rows in every stage


@triton.jit
def scaled_tile_matmul(
    weight_ptr,
    weight_scales_ptr,
    hidden_ptr,
    token_scales_ptr,
    valid,
    first_step,
    end_step,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Multiply weight rows [BLOCK_N, 1] by tokens [BLOCK_M, 1], both pointers, over some steps of BLOCK_K columns.

    Returns [BLOCK_N, BLOCK_M], or [BLOCK_M, BLOCK_N] if that is the longer side, in float32. weight_scales_ptr,
    token_scales_ptr: pointers to the rows' and the tokens' first scales, [BLOCK_N] or one for all rows, and [BLOCK_M].
    BLOCK_SCALES: there is a scale per step; otherwise one for all columns. valid: [BLOCK_M, 1], tokens to read.
    UP_OFFSET: if gate and up rows alternate, the distance from the scale of gate rows to that of up rows, else 0.
    AHEAD: one scale of all rows is loaded a step ahead into a register, instead of by the pipeline of loads.
    """
    # Tensor cores need the longer side first: at least 64 rows on Hopper.
    acc = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_N >= BLOCK_M else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    IS_AHEAD: tl.constexpr = AHEAD and BLOCK_SCALES and len(weight_scales_ptr.shape) == 0
    if IS_AHEAD:
        next_scale = tl.load(weight_scales_ptr + first_step)
        next_up_scale = tl.load(weight_scales_ptr + UP_OFFSET + first_step) if UP_OFFSET else 0.0
    for step in tl.range(first_step, end_step, num_stages=NUM_STAGES):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            weight = tl.load(weight_ptr + column)
            hidden = tl.load(hidden_ptr + column, mask=valid, other=0.0)
        else:
            weight = tl.load(weight_ptr + column, mask=column < K, other=0.0)
            hidden = tl.load(hidden_ptr + column, mask=valid & (column < K), other=0.0)
        if BLOCK_N >= BLOCK_M:
            left, right = weight, tl.trans(hidden)
        else:
            left, right = hidden, tl.trans(weight)
        if BLOCK_SCALES:
            token_scales = tl.load(token_scales_ptr + step)
            if IS_AHEAD:
                weight_scales = _gate_and_up(next_scale, next_up_scale, BLOCK_N) if UP_OFFSET else next_scale
                next_step = tl.minimum(step + 1, end_step - 1)
                next_scale = tl.load(weight_scales_ptr + next_step)
                if UP_OFFSET:
                    next_up_scale = tl.load(weight_scales_ptr + UP_OFFSET + next_step)
            else:
                weight_scales = _load_scales(weight_scales_ptr + step, UP_OFFSET, BLOCK_N)
            acc += tl.dot(left, right) * _scales_of(weight_scales, token_scales, BLOCK_N >= BLOCK_M)
        else:
            acc = tl.dot(left, right, acc)
    if not BLOCK_SCALES:
        weight_scales = _load_scales(weight_scales_ptr, UP_OFFSET, BLOCK_N)
        acc *= _scales_of(weight_scales, tl.load(token_scales_ptr), BLOCK_N >= BLOCK_M)
    return acc


@triton.jit
def _gate_and_up(gate_scale, up_scale, BLOCK_N: tl.constexpr):
    """Return the scales [BLOCK_N] of alternating gate and up rows."""
    return tl.where(tl.arange(0, BLOCK_N) % 2 == 0, gate_scale, up_scale)


@triton.jit
def _load_scales(scales_ptr, UP_OFFSET: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the scales of a tile's rows, or one of all rows. UP_OFFSET is as in `scaled_tile_matmul`."""
    scales = tl.load(scales_ptr)
    if UP_OFFSET:
        scales = _gate_and_up(scales, tl.load(scales_ptr + UP_OFFSET), BLOCK_N)
    return scales


@triton.jit
def _scales_of(weight_scales, token_scales, ROWS_FIRST: tl.constexpr):
    """Return the factors of a tile: rows by tokens if ROWS_FIRST. One scale for all rows costs a multiplication."""
    if len(weight_scales.shape) == 0:
        if ROWS_FIRST:
            scales = (token_scales * weight_scales)[None, :]
        else:
            scales = (token_scales * weight_scales)[:, None]
    elif ROWS_FIRST:
        scales = weight_scales[:, None] * token_scales[None, :]
    else:
        scales = token_scales[:, None] * weight_scales[None, :]
    return scales


@triton.jit(do_not_specialize=["tokens"])
def _block_fp8_gemm_kernel(
    hidden_ptr,
    token_scales_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    partial_ptr,
    counters_ptr,
    tokens,
    output_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program multiplies BLOCK_N rows of the weight by BLOCK_M tokens over one split of the columns.

    Tokens past the end are not read: for few tokens they would take more bandwidth of the L2 cache than the weight.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    split = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    source_row = weight_row(row, N, GATED)
    rows_ptr = weight_ptr + source_row.to(tl.int64)[:, None] * K
    first_step, end_step = split * STEPS // SPLIT_K, (split + 1) * STEPS // SPLIT_K
    # Rows of a tile share their scales if it lies in one group.
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    IN_GROUP: tl.constexpr = ROW_GROUP % OUTPUTS == 0 and N % OUTPUTS == 0 and (not GATED or N % ROW_GROUP == 0)
    UP_OFFSET: tl.constexpr = N // ROW_GROUP * COLUMN_BLOCKS if GATED and IN_GROUP else 0
    if IN_GROUP:
        row_scales_ptr = scales_ptr + tl.program_id(1) * OUTPUTS // ROW_GROUP * COLUMN_BLOCKS
    else:
        row_scales_ptr = scales_ptr + source_row // ROW_GROUP * COLUMN_BLOCKS
    if PDL:
        prefetch(row_scales_ptr + first_step)
        if UP_OFFSET:
            prefetch(row_scales_ptr + UP_OFFSET + first_step)
        for step in tl.static_range(PREFETCH_STEPS):
            prefetch(rows_ptr + (first_step + step) * BLOCK_K)
        pdl_sync(PDL)
    valid = (token < tokens)[:, None]
    source_token = tl.minimum(token, tokens - 1).to(tl.int64)
    output_ptrs, mask, residual = output_tile(output_ptr, token, tokens, output_stride, N, BLOCK_N, GATED, HAS_RESIDUAL)
    acc = scaled_tile_matmul(
        *(rows_ptr, row_scales_ptr, hidden_ptr + source_token[:, None] * K),
        *(token_scales_ptr + source_token * COLUMN_BLOCKS, valid, first_step, end_step),
        *(K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, COLUMN_BLOCKS > 1),
        *(UP_OFFSET, SPLIT_K > 1 or GATED),
    )
    if SPLIT_K > 1:
        is_last, acc = reduce_splits(acc, partial_ptr, counters_ptr, SPLIT_K)
        if not is_last:
            return
    if BLOCK_N >= BLOCK_M:
        acc = tl.trans(acc)
    store_tile(output_ptrs, mask, residual, acc, GATED, HAS_RESIDUAL)


def select_config(tokens: int, rows: int, k: int, processors: int, shared_bytes: int) -> GemmConfig:
    """Select the configuration for a number of tokens and a weight [rows, k].

    For few tokens, reading the weight takes most of the time, and splits of k fill the SMs. Large weights have two or
    three programs per SM. Small ones have one or two with more bytes in flight, since adding up more splits takes
    longer, and a second tile of tokens reads them from the L2 cache. Measured on an H200
    (docs/decisions/quantized-weights.md).
    """
    is_small = rows * k <= _L2_VALUES
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block_n, stages, warps = (64, 4, 4) if block_m <= 32 else (128, 3, 4)
    programs = 2 * processors if tokens <= 128 else 0
    if is_small and tokens <= 16:
        stages, programs = 8, processors
    elif is_small and tokens <= 32:
        stages = 6
        if 4 * -(-rows // block_n) <= processors:
            block_m = 16
    elif is_small and tokens <= 64:
        # Tiles of 32 tokens that fill more than half of the SMs could not be split.
        if 2 * -(-rows // block_n) > processors // 2:
            stages, programs = 5, processors
        else:
            block_m, programs = 32, 3 * processors // 2
    elif is_small:
        block_m, block_n, warps, programs = 128, 64, 8, processors
        if tokens <= block_m and -(-rows // block_n) <= processors:
            stages = 5  # of one program per SM
    num_tiles = -(-tokens // block_m) * -(-rows // block_n)
    # Fewer columns are not worth the reduction.
    split_k = max(1, min(programs // num_tiles, num_blocks(k) // 4))
    stages = min(stages, (shared_bytes - _SCALE_BYTES) // ((block_m + block_n) * BLOCK))
    return GemmConfig(block_m, block_n, BLOCK, stages, warps, split_k)


def block_fp8_gemm(
    hidden: BlockFp8Tensor,
    weight: BlockFp8Tensor,
    output: torch.Tensor,
    *,
    gated: bool = False,
    has_residual: bool = False,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Write hidden W^T to `output`: hidden [tokens, K], weight [N, K] -> [tokens, N].

    The weight is read before the previous kernel has ended, so that kernel must not write it.

    Args:
        hidden: quantized tokens.
        weight: [N, K].
        output: [tokens, N]. Rows may be strided.
        gated: whether the weight holds gate rows above up rows, and the result is silu(gate) * up, [tokens, N / 2].
        has_residual: whether the result is added to `output`.
        config: the tile configuration. None selects one by size.
    """
    (tokens, k), rows, device = hidden.values.shape, len(weight.values), output.device
    config = config or select_config(tokens, rows, k, sm_count(device), shared_memory_bytes(device))
    grid, partial, counters = split_workspace(config, rows, tokens, output)
    _block_fp8_gemm_kernel[grid](
        *hidden,
        *weight,
        output,
        partial,
        counters,
        tokens,
        output.stride(0),
        N=rows // 2 if gated else rows,
        K=k,
        ROW_GROUP=weight.row_group,
        COLUMN_BLOCKS=weight.scales.shape[1],
        SPLIT_K=config.split_k,
        PREFETCH_STEPS=min(_PREFETCH_STEPS, num_blocks(k) // config.split_k),
        GATED=gated,
        HAS_RESIDUAL=has_residual,
        **config.constants,
        **pdl_options(device),
    )
    return output
