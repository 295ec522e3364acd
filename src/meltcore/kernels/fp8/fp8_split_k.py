"""Split-K GEMM of FP8 numbers with the method of gemm/split_k.py. Scales, activation and residual add are fused.

Sums are split if there are too few tiles for all SMs. Scales, activation and residual add are fused because torch's
scaled GEMM would need one more kernel, which reads and writes the result again.

On Hopper the tensor cores keep about 13 bits of a sum of e4m3 numbers. The error is far below the error of e4m3 itself.
"""

from __future__ import annotations

import torch

from meltcore.kernels.capability import shared_memory_bytes
from meltcore.kernels.fp8.fp8 import FP8_CAPABILITY, Fp8Tensor
from meltcore.kernels.gemm.gemv import output_tensor
from meltcore.kernels.gemm.split_k import (
    GemmConfig,
    output_tile,
    reduce_splits,
    split_workspace,
    store_tile,
    tile_matmul,
    weight_row,
)
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, prefetch

MIN_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
# Divides the columns of a split, so that no load needs a mask on columns.
K_MULTIPLE = 64
# With more, torch's scaled GEMM is as fast, the kernels around it included.
MAX_TOKENS = 2048
_MAX_ROWS_OF_SMALL_WEIGHT, _MAX_ROWS_OF_SPLIT_WEIGHT = 2**11, 2**13


def supports(hidden: torch.Tensor, weight: Fp8Tensor) -> bool:
    """Return whether the kernel supports these tensors: up to MAX_TOKENS tokens, in rows of whole tiles."""
    return 1 <= hidden.shape[0] <= MAX_TOKENS and weight.values.shape[1] % K_MULTIPLE == 0


@triton.jit(do_not_specialize=["tokens"])
def _fp8_split_k_gemm_kernel(
    values_ptr,
    token_scales_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    partial_ptr,
    counters_ptr,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program multiplies BLOCK_N rows of the weight by BLOCK_M tokens over one split of the columns."""
    WIDTH: tl.constexpr = K // SPLIT_K
    split = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    source_row = weight_row(row, N, GATED)
    rows_ptr = weight_ptr + source_row.to(tl.int64)[:, None] * K + split * WIDTH
    scales = tl.load(scales_ptr + source_row)
    if PDL:
        for start in tl.static_range(0, WIDTH, 128):
            prefetch(rows_ptr + start)
        pdl_sync(PDL)
    column = tl.arange(0, BLOCK_K)[None, :]
    source_token = token % tokens
    tokens_ptr = values_ptr + source_token.to(tl.int64)[:, None] * K + split * WIDTH
    token_scales = tl.load(token_scales_ptr + source_token)
    output_ptrs, mask, residual = output_tile(output_ptr, token, tokens, N, N, BLOCK_N, GATED, HAS_RESIDUAL)
    acc = tile_matmul(rows_ptr, tokens_ptr, column, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)
    if SPLIT_K > 1:
        is_last, acc = reduce_splits(acc, partial_ptr, counters_ptr, SPLIT_K)
        if not is_last:
            return
    if BLOCK_N >= BLOCK_M:
        acc = tl.trans(acc)
    acc = acc * token_scales[:, None] * scales[None, :]
    store_tile(output_ptrs, mask, residual, acc, GATED, HAS_RESIDUAL)


def select_config(tokens: int, rows: int, k: int, shared_bytes: int) -> GemmConfig:
    """Select the configuration for a weight [rows, k] and a program's `shared_bytes` of shared memory.

    It is the best of sweeps over the four GEMMs of a Qwen3-0.6B layer, up to 2,048 rows on an H200 and more rows on an
    H100 (docs/decisions/quantized-weights.md). Only configurations whose programs take over half of an SM's shared
    memory count, as in gemm/split_k.py.
    """
    split_k, min_stages = 1, 4
    if rows <= _MAX_ROWS_OF_SMALL_WEIGHT:
        if tokens <= 512:
            block_m, block_n = (32 if tokens <= 32 else 64), (32 if 32 < tokens <= 64 else 64)
        else:
            block_m, block_n = 128, 128
        if k > 2048 and tokens <= 128:
            # Tiles too few for all SMs, with much to sum.
            split_k = 4 if tokens <= 64 else 2
    elif tokens <= 256:
        block_m, block_n = (32, 128) if tokens <= 64 else (128, 64)
        min_stages = shared_bytes // 2 // ((block_m + block_n) * 128) + 1
        if tokens <= 32 and rows <= _MAX_ROWS_OF_SPLIT_WEIGHT:
            split_k = 2
    else:
        block_m, block_n = (128 if tokens <= 512 or shared_bytes < 2**17 else 256), 128
    block_k = 128 if k % (128 * split_k) == 0 else 64
    if k % (block_k * split_k):
        split_k = 1
    stages = min(max(4, min_stages), shared_bytes // ((block_m + block_n) * block_k))
    return GemmConfig(block_m, block_n, block_k, stages, 8 if block_m == 256 else 4, split_k)


def fp8_split_k_gemm(
    hidden: Fp8Tensor,
    weight: Fp8Tensor,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Multiply quantized tokens by an FP8 weight, with the options of `split_k_gemm`. The result has type `dtype`."""
    (num_tokens, k), (rows, _), device = hidden.values.shape, weight.values.shape, weight.values.device
    output = output_tensor(hidden.values, weight.values, gated, residual, dtype=dtype)
    config = config or select_config(num_tokens, rows, k, shared_memory_bytes(device))
    grid, partial, counters = split_workspace(config, rows, num_tokens, output)
    _fp8_split_k_gemm_kernel[grid](
        hidden.values,
        hidden.scales,
        weight.values,
        weight.scales,
        output,
        partial,
        counters,
        num_tokens,
        N=output.shape[1],
        K=k,
        SPLIT_K=config.split_k,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        **config.constants,
        **pdl_options(device),
    )
    return output
