"""FP8 GEMV for one token, as in gemm/gemv.py, and FP8 skinny GEMM for up to 16 tokens.

One token is quantized inside the kernel, to the same values as by `quantize`, whose launch would take as long as the
GEMV. Several tokens must be quantized before the launch, since otherwise every program would quantize all of them.
Products of e4m3 numbers are exact in float16, and sums are float32, at no cost, since the kernel is memory-bound.
Scales are applied to the sums.
"""

from __future__ import annotations

import torch

from meltcore.kernels.fp8.fp8 import FP8_CAPABILITY, FP8_MAX, MIN_AMAX, Fp8Tensor
from meltcore.kernels.gemm.gemv import K_MULTIPLE, GemvConfig, load_columns, output_tensor, silu
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync
from meltcore.kernels.norm import Norm

MIN_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
# One side of a tensor core's tile: more tokens would need a second pass.
MAX_TOKENS = 16
# A program holds all columns of its rows, and of every token, in registers.
MAX_K = 3072


def supports(hidden: torch.Tensor, weight: Fp8Tensor) -> bool:
    """Return whether the kernels support these tensors.

    They need up to MAX_TOKENS tokens of a 16-bit type, rows that fit into registers, and 16-byte reads.
    """
    return (
        1 <= hidden.shape[0] <= MAX_TOKENS
        and hidden.shape[1] <= MAX_K
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.values.shape[1] % K_MULTIPLE == 0
        and hidden.is_contiguous()
    )


@triton.jit(do_not_specialize=["output_size"])
def _fp8_gemv_kernel(
    hidden_ptr,
    norm_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    output_size,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK_N outputs of the token."""
    STEPS: tl.constexpr = K // BLOCK_K
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)[None, :]
    # Rows past the end repeat the last one: cheaper than a mask on every load.
    source_row = tl.minimum(row, output_size - 1)
    rows_ptr = weight_ptr + source_row.to(tl.int64)[:, None] * K + column
    weight_blocks = load_columns(rows_ptr, K, BLOCK_K)
    scales = tl.load(scales_ptr + source_row)
    if GATED:
        up_weight_blocks = load_columns(rows_ptr + output_size.to(tl.int64) * K, K, BLOCK_K)
        up_scales = tl.load(scales_ptr + output_size + source_row)
    if HAS_NORM:
        norm_blocks = load_columns(norm_ptr + column, K, BLOCK_K)
    pdl_sync(PDL)
    hidden_blocks = load_columns(hidden_ptr + column, K, BLOCK_K)
    if HAS_RESIDUAL:
        residual = tl.load(output_ptr + row, mask=row < output_size, other=0.0)
    squares = tl.zeros((1, BLOCK_K), dtype=tl.float32)
    abs_max = tl.zeros((1, BLOCK_K), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        hidden = hidden_blocks[step].to(tl.float32)
        squares += hidden * hidden
        if HAS_NORM:
            hidden *= norm_blocks[step].to(tl.float32)
        abs_max = tl.maximum(abs_max, tl.abs(hidden))
    amax = tl.maximum(tl.max(abs_max, axis=1), MIN_AMAX)
    token_scale = tl.div_rn(amax, FP8_MAX)
    if HAS_NORM:
        token_scale *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    inverse_scale = tl.div_rn(FP8_MAX, amax)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        hidden = hidden_blocks[step].to(tl.float32)
        if HAS_NORM:
            hidden *= norm_blocks[step].to(tl.float32)
        hidden = (hidden * inverse_scale).to(tl.float8e4nv).to(tl.float32)
        acc += weight_blocks[step].to(tl.float32) * hidden
        if GATED:
            up_acc += up_weight_blocks[step].to(tl.float32) * hidden
    result = tl.sum(acc, axis=1) * token_scale * scales
    if GATED:
        result = silu(result) * (tl.sum(up_acc, axis=1) * token_scale * up_scales)
    if HAS_RESIDUAL:
        result += residual.to(tl.float32)
    tl.store(output_ptr + row, result, mask=row < output_size)


@triton.jit
def _fp8_dot(
    hidden_blocks, weight_blocks, STEPS: tl.constexpr, WARPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Multiply e4m3 tokens by weight rows: [BLOCK_M, BLOCK_N] float32.

    Each warp sums its own columns, by batched dot products.
    """
    acc = tl.zeros((WARPS, BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        weight = tl.permute(weight_blocks[step].to(tl.float16), (0, 2, 1))
        acc = tl.dot(hidden_blocks[step].to(tl.float16), weight, acc)
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["tokens", "output_size"])
def _fp8_skinny_gemm_kernel(
    values_ptr,
    token_scales_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    tokens,
    output_size,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK_N outputs of every token.

    Tokens are the side of the dot product that the hardware pads to 16, so that BLOCK_N can be as small as 8.
    """
    STEP: tl.constexpr = WARPS * BLOCK_K
    STEPS: tl.constexpr = K // STEP
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    column = (tl.arange(0, WARPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :])[:, None, :]
    source_row = tl.minimum(row, output_size - 1)
    rows_ptr = weight_ptr + source_row.to(tl.int64)[None, :, None] * K + column
    weight_blocks = load_columns(rows_ptr, K, STEP)
    scales = tl.load(scales_ptr + source_row)[None, :]
    if GATED:
        up_weight_blocks = load_columns(rows_ptr + output_size.to(tl.int64) * K, K, STEP)
        up_scales = tl.load(scales_ptr + output_size + source_row)[None, :]
    pdl_sync(PDL)
    # Tokens past the end repeat the last one, as rows do, and are not stored.
    source_token = tl.minimum(token, tokens - 1)
    value_blocks = load_columns(values_ptr + source_token[None, :, None] * K + column, K, STEP)
    token_scales = tl.load(token_scales_ptr + source_token)[:, None]
    output_ptrs = output_ptr + token[:, None].to(tl.int64) * output_size + row[None, :]
    mask = (token < tokens)[:, None] & (row < output_size)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(output_ptrs, mask=mask, other=0.0)
    result = _fp8_dot(value_blocks, weight_blocks, STEPS, WARPS, BLOCK_M, BLOCK_N) * token_scales * scales
    if GATED:
        up_result = _fp8_dot(value_blocks, up_weight_blocks, STEPS, WARPS, BLOCK_M, BLOCK_N)
        result = silu(result) * (up_result * token_scales * up_scales)
    if HAS_RESIDUAL:
        result += residual.to(tl.float32)
    tl.store(output_ptrs, result, mask=mask)


def fp8_gemv(
    hidden: torch.Tensor,
    weight: Fp8Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """Compute norm(hidden) W^T for one token and an FP8 weight, with the options of `gemv`.

    The weight is read before the previous kernel has ended, so that kernel must not write it.

    The default configuration is the best of a sweep over a Qwen3-0.6B layer (H200, 2026-11-21), as in
    `fp8_skinny_gemm`.
    """
    k = hidden.shape[1]
    output = output_tensor(hidden, weight.values, gated, residual)
    block_k, warps = (512, 2) if k <= 2048 else (1024, 4)
    config = config or GemvConfig(4, min(block_k, k & -k), warps)
    norm_weight, eps = norm or (hidden, 0.0)
    _fp8_gemv_kernel[(triton.cdiv(output.shape[1], config.block_n),)](
        hidden,
        norm_weight,
        weight.values,
        weight.scales,
        output,
        output.shape[1],
        eps,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HAS_NORM=norm is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        FP8_MAX=FP8_MAX,
        MIN_AMAX=MIN_AMAX,
        num_warps=config.num_warps,
        **pdl_options(hidden.device),
    )
    return output


def fp8_skinny_gemm(
    hidden: Fp8Tensor,
    weight: Fp8Tensor,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """Multiply up to MAX_TOKENS quantized tokens by an FP8 weight. The result has type `dtype`.

    `gated` and `residual` are explained at `gemv`.
    """
    num_tokens, k = hidden.values.shape
    output = output_tensor(hidden.values, weight.values, gated, residual, dtype=dtype)
    block_n, block_k = (8, 1024) if len(weight.values) <= 2048 else (16, 512)
    config = config or GemvConfig(block_n, min(block_k, k & -k), 4)
    _fp8_skinny_gemm_kernel[(triton.cdiv(output.shape[1], config.block_n),)](
        hidden.values,
        hidden.scales,
        weight.values,
        weight.scales,
        output,
        num_tokens,
        output.shape[1],
        K=k,
        BLOCK_M=MAX_TOKENS,
        BLOCK_N=config.block_n,
        WARPS=config.num_warps,
        BLOCK_K=config.block_k // config.num_warps,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        num_warps=config.num_warps,
        **pdl_options(hidden.values.device),
    )
    return output
