"""Persistent GEMM with the tensor memory accelerator (TMA) of Hopper GPUs, and a fused activation or residual add.

A library's GEMM leaves the activation, and with FP8 the addition to the residual, to separate kernels, which read and
write its output again. Here one program per SM loops over tiles, and the first loads of the next tile are in flight
while the current tile is stored.
"""

from __future__ import annotations

import torch

from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.gemm.gemv import output_tensor
from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.jit import TensorDescriptor, tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync

_HOPPER = 90  # the compute capability at which it is used
_LINE_BYTES = 16  # divides the bytes of rows that TMA reads and writes
_ROW_MULTIPLE = 16  # so it does those of gate and up in a 16-bit type
# Of 16-bit types the library's GEMM and the activation after it are as fast with fewer tokens or outputs.
_MIN_TOKENS, _MIN_OUTPUTS = 1024, 2**21
# Tiles of tokens that share their weights: concurrent tiles form a block, whose operands the L2 cache holds.
_GROUP_M = 8


@triton.jit
def _store_tile(output, acc, token, column, HAS_RESIDUAL: tl.constexpr):
    if HAS_RESIDUAL:
        acc += output.load([token, column]).to(tl.float32)
    output.store([token, column], acc.to(output.dtype))


@triton.jit(do_not_specialize=["tokens"])
def _tma_gemm_kernel(
    hidden,
    weight,
    output,
    token_scales_ptr,
    scales_ptr,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes tiles of BLOCK_M tokens and BLOCK_N rows of the weight in a loop.

    GATED: half of a tile's rows are gate rows, half up rows. HAS_SCALES: operands are e4m3 with a scale per row.
    HALVES: a tile is stored in two halves, of which one at a time takes shared memory.
    """
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    N_TILES: tl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    pdl_sync(PDL)
    m_tiles = tl.cdiv(tokens, BLOCK_M)
    for tile in tl.range(tl.program_id(0), m_tiles * N_TILES, tl.num_programs(0), flatten=True):
        first_m = tile // (GROUP_M * N_TILES) * GROUP_M
        group = tl.minimum(m_tiles - first_m, GROUP_M)
        within = tile - first_m * N_TILES
        token, column = (first_m + within % group) * BLOCK_M, within // group * OUTPUTS
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            inputs = hidden.load([token, start])
            if GATED:
                rows = weight.load([0, column, start]).reshape(BLOCK_N, BLOCK_K)
            else:
                rows = weight.load([column, start])
            acc = tl.dot(inputs, rows.T, acc)
        if HAS_SCALES:
            tile_token, row = token + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
            row_column = column + row % OUTPUTS
            acc *= tl.load(token_scales_ptr + tile_token, mask=tile_token < tokens, other=0.0)[:, None]
            acc *= tl.load(scales_ptr + row // OUTPUTS * N + row_column, mask=row_column < N, other=0.0)[None, :]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, OUTPUTS)), (0, 2, 1)))
            acc = gate / (1.0 + tl.exp(-gate)) * up
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, OUTPUTS // 2)), (0, 2, 1)))
            _store_tile(output, left, token, column, HAS_RESIDUAL)
            _store_tile(output, right, token, column + OUTPUTS // 2, HAS_RESIDUAL)
        else:
            _store_tile(output, acc, token, column, HAS_RESIDUAL)


def supports(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel supports tokens and a weight of one type of 16 or 8 bits, on a Hopper GPU."""
    return (
        len(hidden) >= 1
        and hidden.dtype == weight.dtype
        and hidden.element_size() <= 2
        and all(each.is_contiguous() and each.data_ptr() % _LINE_BYTES == 0 for each in (hidden, weight))
        and hidden.shape[1] * hidden.element_size() % _LINE_BYTES == 0
        and len(weight) % _ROW_MULTIPLE == 0
        and capability(hidden.device) == _HOPPER
    )


def is_faster(tokens: int, rows: int) -> bool:
    """Return whether this GEMM multiplies gate and up rows of a 16-bit weight faster than the library does.

    This was measured on an H100 with 2,048 to 28,672 rows (docs/decisions/small-batch-gemm.md).
    """
    return tokens >= _MIN_TOKENS and tokens * rows >= _MIN_OUTPUTS


def select_config(tokens: int, rows: int, *, gated: bool, is_fp8: bool) -> GemmConfig:
    """Select the tile configuration for `tokens` tokens and a weight of `rows` rows.

    Larger tiles are taken once there are enough of them for all SMs. The configurations won a sweep over weights of
    Qwen3-0.6B and wider ones on an H100. Each has a block_k of 128 bytes.
    """
    block_k, outputs = 128 if is_fp8 else 64, tokens * rows
    if outputs <= (3 * 2**20 if gated else 2**20):
        return GemmConfig(64, 128, block_k, 6, 4)
    if outputs < (12 * 2**20 if gated else 2**22):
        return GemmConfig(128, 128, block_k, 4, 4 if gated else 8)
    return GemmConfig(128, 256, block_k, 3, 8)


def tma_gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Compute hidden W^T: hidden [tokens, K], weight [N, K], of a 16-bit type or e4m3 -> [tokens, N] of type `dtype`.

    Args:
        hidden: [tokens, K].
        weight: [N, K] of the same dtype.
        dtype: the type of the result.
        scales: float32 scales of the tokens and of the weight's rows. None for 16-bit tensors.
        gated: whether the weight holds gate rows above up rows, and the result is silu(gate) * up, [tokens, N / 2].
        residual: [tokens, N], contiguous. The result is added to `residual` in place, and `residual` is returned.
        config: the tile configuration. None selects one by size.
    """
    (tokens, k), rows = hidden.shape, len(weight)
    output = output_tensor(hidden, weight, gated, residual, dtype=dtype)
    n = output.shape[1]
    config = config or select_config(tokens, rows, gated=gated, is_fp8=scales is not None)
    outputs = config.block_n // 2 if gated else config.block_n
    # Whole tiles of 256 outputs leave no shared memory for what is added to them.
    halves = outputs == 256
    block = [2, outputs, config.block_k] if gated else [config.block_n, config.block_k]
    num_tiles = triton.cdiv(tokens, config.block_m) * triton.cdiv(n, outputs)
    token_scales, row_scales = scales or (hidden, hidden)
    _tma_gemm_kernel[(min(num_tiles, sm_count(hidden.device)),)](
        TensorDescriptor.from_tensor(hidden, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight.view(2, n, k) if gated else weight, block),
        TensorDescriptor.from_tensor(output, [config.block_m, outputs // 2 if halves else outputs]),
        token_scales,
        row_scales,
        tokens,
        N=n,
        K=k,
        GROUP_M=_GROUP_M,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALES=scales is not None,
        HALVES=halves,
        **config.constants,
        **pdl_options(hidden.device),
    )
    return output
