"""Split-K GEMM of tokens with a block-quantized weight, for so few tokens that reading the weight takes most time.

It uses the method of gemm/split_k.py. The weight streams from memory as blocks and is decoded in registers on its way
to the tensor cores. Every format has the same main loop and a decoder of its own (ggml_decode.py). Sums are float32, in
a fixed order: the order of the columns within a split, then the order of the splits.
"""

from __future__ import annotations

import torch

from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.gemm.gemv import output_tensor
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
from meltcore.kernels.quant.ggml import GgmlTensor
from meltcore.kernels.quant.ggml_decode import block_k, decode_tile, nibble_bytes, value_bytes
from meltcore.kernels.quant.ggml_types import GgmlType

# With more, a second tile of tokens would decode the weight again, which takes longer than dequantizing it for cuBLAS.
# So does the first tile of Q6_K. On an H200 (docs/decisions/quantized-weights.md). Other formats whose values are put
# together from two loads are taken for the same.
MAX_TOKENS, _MAX_TWO_LOAD_TOKENS = 64, 32
_TWO_LOAD_TYPES = (GgmlType.Q6_K, GgmlType.Q5_1, GgmlType.Q5_K)
_MAX_STAGES = 4
_PREFETCH_STEPS = 4


def is_faster(hidden: torch.Tensor, weight: GgmlTensor) -> bool:
    """Return whether the kernel supports these tokens, of a 16-bit type, and is faster than dequantizing the weight."""
    return (
        1 <= hidden.shape[0] <= (_MAX_TWO_LOAD_TOKENS if weight.type in _TWO_LOAD_TYPES else MAX_TOKENS)
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.is_contiguous()
    )


@triton.jit
def ggml_tile_matmul(
    values_ptr,
    scales_ptr,
    subscales_ptr,
    row,
    hidden_ptr,
    valid,
    first_step,
    end_step,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Multiply weight rows [BLOCK_N, 1] by tokens, pointers [BLOCK_M, 1], over some tiles of columns in float32.

    Returns [BLOCK_N, BLOCK_M], or [BLOCK_M, BLOCK_N] if that is the longer side. valid: [BLOCK_M, 1], tokens to read.
    """
    # Tensor cores need the longer side first: at least 64 rows on Hopper.
    acc = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_N >= BLOCK_M else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in tl.range(first_step, end_step, num_stages=NUM_STAGES):
        planes = decode_tile(values_ptr, scales_ptr, subscales_ptr, row, step, K, BLOCK_K, FORMAT)
        WIDTH: tl.constexpr = BLOCK_K // len(planes)
        for plane in tl.static_range(len(planes)):
            column = step * BLOCK_K + plane * WIDTH + tl.arange(0, WIDTH)[None, :]
            if K % BLOCK_K == 0:
                hidden = tl.load(hidden_ptr + column, mask=valid, other=0.0)
            else:
                hidden = tl.load(hidden_ptr + column, mask=valid & (column < K), other=0.0)
            weight = planes[plane].to(hidden.dtype)
            if BLOCK_N >= BLOCK_M:
                acc = tl.dot(weight, tl.trans(hidden), acc, input_precision="ieee")
            else:
                acc = tl.dot(hidden, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _ggml_gemm_kernel(
    hidden_ptr,
    values_ptr,
    scales_ptr,
    subscales_ptr,
    output_ptr,
    partial_ptr,
    counters_ptr,
    tokens,
    output_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr,
    FORMAT: tl.constexpr,
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
    source = weight_row(row, N, GATED).to(tl.int64)[:, None]
    first_step, end_step = split * STEPS // SPLIT_K, (split + 1) * STEPS // SPLIT_K
    if PDL:
        STEP_BYTES: tl.constexpr = nibble_bytes(FORMAT, BLOCK_K)
        ROW_BYTES: tl.constexpr = STEPS * value_bytes(FORMAT, BLOCK_K)
        for step in tl.static_range(PREFETCH_STEPS):
            prefetch(values_ptr + source * ROW_BYTES + (first_step + step) * STEP_BYTES)
        pdl_sync(PDL)
    valid = (token < tokens)[:, None]
    output_ptrs, mask, residual = output_tile(output_ptr, token, tokens, output_stride, N, BLOCK_N, GATED, HAS_RESIDUAL)
    acc = ggml_tile_matmul(
        *(values_ptr, scales_ptr, subscales_ptr, source, hidden_ptr + token.to(tl.int64)[:, None] * K, valid),
        *(first_step, end_step, K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, FORMAT),
    )
    if SPLIT_K > 1:
        is_last, acc = reduce_splits(acc, partial_ptr, counters_ptr, SPLIT_K)
        if not is_last:
            return
    if BLOCK_N >= BLOCK_M:
        acc = tl.trans(acc)
    store_tile(output_ptrs, mask, residual, acc, GATED, HAS_RESIDUAL)


def select_config(tokens: int, weight: GgmlTensor, processors: int, shared_bytes: int) -> GemmConfig:
    """Select the configuration for a number of tokens and a weight [rows, K].

    Programs have 4 warps and keep at least two tiles in flight. Splits fill the SMs: two programs per SM for up to 16
    tokens, so that one loads while the other decodes. On GPUs that run the skinny GEMM (ggml_skinny_gemm.py), this
    kernel gets only more tokens than its MAX_TOKENS. With 64 tokens it reads at 11 to 20 % of an H200's bandwidth.
    """
    (rows, row_bytes), width = weight.values.shape, block_k(weight)
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block_n = 128 if block_m == 16 and rows >= 128 * 16 else 64  # more rows: fewer instructions per value
    num_tiles = -(-tokens // block_m) * -(-rows // block_n)
    programs = processors * (2 if block_m == 16 else 1)
    # Fewer columns are not worth the reduction.
    split_k = max(1, min(programs // num_tiles, weight.columns // 512))
    stage_bytes = 2 * block_m * width + block_n * (row_bytes * width // weight.columns + 16)
    stages = max(2, min(_MAX_STAGES, shared_bytes // 2 // stage_bytes))
    return GemmConfig(block_m, block_n, width, stages, split_k=split_k)


def ggml_gemm(
    hidden: torch.Tensor,
    weight: GgmlTensor,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Compute hidden W^T: hidden [tokens, K], weight [N, K] -> [tokens, N] in the type of `hidden`.

    With `gated` the weight holds gate rows above up rows and the result is silu(gate) * up, half as wide. The result is
    added to `residual`, [tokens, N], in place, and `residual` is returned. Or it is written to `out`, [tokens, N], of
    the type of `hidden` or float32. Rows of both may be strided. The weight is read before the previous kernel has
    ended, so that kernel must not write it.
    """
    (tokens, k), rows = hidden.shape, len(weight.values)
    output = output_tensor(hidden, weight.values, gated, residual, out)
    config = config or select_config(tokens, weight, sm_count(hidden.device), shared_memory_bytes(hidden.device))
    grid, partial, counters = split_workspace(config, rows, tokens, output)
    _ggml_gemm_kernel[grid](
        hidden,
        *weight.arrays,
        output,
        partial,
        counters,
        tokens,
        output.stride(0),
        N=output.shape[1],
        K=k,
        SPLIT_K=config.split_k,
        PREFETCH_STEPS=min(_PREFETCH_STEPS, -(-k // config.block_k) // config.split_k),
        FORMAT=weight.type.name,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        **config.constants,
        **pdl_options(hidden.device),
    )
    return output
