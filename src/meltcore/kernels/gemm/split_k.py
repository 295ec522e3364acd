"""Split-K GEMM in Triton for up to 128 tokens. Output tiles that are too few for all SMs are split along K.

At these sizes a GEMM takes about as long as reading its weight, and a library's tiles leave most SMs idle. A program
takes BLOCK_N rows of the weight and one split of their columns. The last program of a tile to finish sums the partial
results, in the order of the splits. It prefetches its weights before the previous kernel has ended (see launch.py).
Sums are float32, and results do not depend on which program is last.

The device functions here serve the FP8 kernel of quant/fp8_split_k.py as well.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.gemm.gemv import output_tensor
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, prefetch

# Up to which tiles were measured to be faster than cuBLAS, whose programs share their reads of the tokens; and for
# weights of 2**23 numbers or more, of which GEMMs of 100 tokens and 2,048 columns took 28 to 52 us, cuBLAS 20 to 27.
MAX_TOKENS = 128
_LARGE_WEIGHT_ELEMENTS, _MAX_TOKENS_LARGE_WEIGHT = 2**23, 64
# From this many columns on, cuBLAS is faster for larger weights whatever the number of tokens: 16 tokens and 5,376 rows
# of 21,504 columns took 87 us, cuBLAS 60 (H200, docs/decisions/small-batch-gemm.md).
_LONG_ROWS, _MAX_ELEMENTS_LONG_ROWS = 4096, 2**24
# Divides K, so that no load needs a mask on columns.
K_MULTIPLE = 64
# Of a weight: the library's tiles of a larger one, such as an output head, use all SMs.
MAX_ROWS = 2**14
_MAX_SPLIT_TILES = 1024


def supports(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel supports a few tokens of a 16-bit type, in rows that allow 16-byte reads."""
    max_tokens = _MAX_TOKENS_LARGE_WEIGHT if weight.numel() >= _LARGE_WEIGHT_ELEMENTS else MAX_TOKENS
    return (
        1 <= hidden.shape[0] <= max_tokens
        and (weight.shape[1] < _LONG_ROWS or weight.numel() <= _MAX_ELEMENTS_LONG_ROWS)
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[0] <= MAX_ROWS
        and weight.shape[1] % K_MULTIPLE == 0
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )


@triton.jit
def weight_row(row, N: tl.constexpr, GATED: tl.constexpr):
    """Return the weight's row for a row of the GEMM. If GATED, gate and up rows alternate.

    Wraps around past the end.
    """
    if GATED:
        source_row = row // 2 % N + row % 2 * N
    else:
        source_row = row % N
    return source_row


@triton.jit
def silu_and_mul(acc):
    """Return silu(gate) * up of alternating gate and up columns.

    [tokens, rows] -> [tokens, rows // 2].
    """
    gate, up = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def tile_matmul(
    weight_ptr,
    hidden_ptr,
    column,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Multiply weight rows [BLOCK_N, 1] by tokens [BLOCK_M, 1], both pointers, over WIDTH columns in float32.

    Returns [BLOCK_N, BLOCK_M], or [BLOCK_M, BLOCK_N] if that is the longer side. column: [1, BLOCK_K].
    """
    # Tensor cores need the longer side first: at least 64 rows on Hopper.
    acc = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_N >= BLOCK_M else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=NUM_STAGES):
        weight = tl.load(weight_ptr + start + column)
        hidden = tl.load(hidden_ptr + start + column)
        if BLOCK_N >= BLOCK_M:
            acc = tl.dot(weight, tl.trans(hidden), acc)
        else:
            acc = tl.dot(hidden, tl.trans(weight), acc)
    return acc


@triton.jit
def output_tile(
    output_ptr,
    token,
    tokens,
    row_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Return pointers to the program's tile of the output, [tokens, outputs], its mask, and the residual there or 0."""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    output_ptrs = output_ptr + token.to(tl.int64)[:, None] * row_stride + column[None, :]
    mask = (token < tokens)[:, None] & (column < N)[None, :]
    residual = tl.load(output_ptrs, mask=mask, other=0.0) if HAS_RESIDUAL else 0.0
    return output_ptrs, mask, residual


@triton.jit
def store_tile(output_ptrs, mask, residual, acc, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Store a tile [tokens, rows] of sums, after the activation and the residual add."""
    if GATED:
        acc = silu_and_mul(acc)
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    tl.store(output_ptrs, acc, mask=mask)


@triton.jit
def reduce_splits(acc, partial_ptr, counters_ptr, SPLIT_K: tl.constexpr):
    """Store the partial tile of this program, whose split is its first index.

    Returns whether the program is the last of its tile, and the tile's sum if so.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    split, tile = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    partial_ptrs = partial_ptr + tile.to(tl.int64) * (SPLIT_K * ROWS * COLUMNS)
    partial_ptrs += tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(partial_ptrs + split * (ROWS * COLUMNS), acc)
    tl.debug_barrier()  # all of this program's partial tile is written before it is counted
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        tl.store(counters_ptr + tile, 0)
        # Other SMs wrote these during this launch: bypass the L1 cache, which may hold older lines.
        acc = tl.load(partial_ptrs, cache_modifier=".cg")
        for other_split in tl.static_range(1, SPLIT_K):
            acc += tl.load(partial_ptrs + other_split * (ROWS * COLUMNS), cache_modifier=".cg")
    return is_last, acc


@lru_cache
def split_counters(device: torch.device) -> torch.Tensor:
    """Return the counters of finished splits per tile, which are zeros before and after every launch.

    A device has one tensor, since launches follow each other on one stream. Captured graphs keep its address.
    """
    return torch.zeros(_MAX_SPLIT_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["tokens"])
def _split_k_gemm_kernel(
    hidden_ptr,
    weight_ptr,
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
    """Each program multiplies BLOCK_N rows of the weight by BLOCK_M tokens over one split of the columns.

    Rows and tokens past the end wrap around and are not stored, which is cheaper than a mask on every load. (When they
    all repeated the last token, every program read its lines over and over: 80 tokens took twice as long as 128.)
    """
    WIDTH: tl.constexpr = K // SPLIT_K
    split = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    source_row = weight_row(row, N, GATED)
    rows_ptr = weight_ptr + source_row.to(tl.int64)[:, None] * K + split * WIDTH
    if PDL:
        for start in tl.static_range(0, WIDTH, BLOCK_K):
            prefetch(rows_ptr + (start + tl.arange(0, BLOCK_K // 64) * 64)[None, :])
        pdl_sync(PDL)
    column = tl.arange(0, BLOCK_K)[None, :]
    tokens_ptr = hidden_ptr + (token % tokens).to(tl.int64)[:, None] * K + split * WIDTH
    output_ptrs, mask, residual = output_tile(output_ptr, token, tokens, N, N, BLOCK_N, GATED, HAS_RESIDUAL)
    acc = tile_matmul(rows_ptr, tokens_ptr, column, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)
    if SPLIT_K > 1:
        is_last, acc = reduce_splits(acc, partial_ptr, counters_ptr, SPLIT_K)
        if not is_last:
            return
    if BLOCK_N >= BLOCK_M:
        acc = tl.trans(acc)
    store_tile(output_ptrs, mask, residual, acc, GATED, HAS_RESIDUAL)


class GemmConfig(NamedTuple):
    """Tile sizes of a GEMM: tokens, weight rows and columns per step; software pipeline stages; warps; splits of K."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    split_k: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """The constants of a launch, without the splits, which not every kernel has."""
        tile = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**tile, "NUM_STAGES": self.num_stages, "num_warps": self.num_warps}


def split_workspace(
    config: GemmConfig, rows: int, tokens: int, output: torch.Tensor
) -> tuple[tuple[int, int, int], torch.Tensor, torch.Tensor]:
    """Return a GEMM's grid (splits, tiles of rows, tiles of tokens), memory for partial tiles, and split counters.

    Raises ValueError for more tiles than there are counters.
    """
    grid = (config.split_k, triton.cdiv(rows, config.block_n), triton.cdiv(tokens, config.block_m))
    if config.split_k == 1:
        return grid, output, output  # unused without splits
    num_tiles = grid[1] * grid[2]
    if num_tiles > _MAX_SPLIT_TILES:
        raise ValueError(f"{num_tiles} tiles cannot be split; at most {_MAX_SPLIT_TILES} can")
    num_elements = config.split_k * num_tiles * config.block_n * config.block_m
    return grid, torch.empty(num_elements, dtype=torch.float32, device=output.device), split_counters(output.device)


def select_config(tokens: int, rows: int, k: int, num_sms: int, shared_bytes: int) -> GemmConfig:
    """Select the configuration for a weight [rows, k] and a program's `shared_bytes` of shared memory.

    A program takes over half of an SM's shared memory: if two programs fit, PDL puts two on one SM while other SMs stay
    empty. So there are no more programs than SMs, if possible. The configurations were measured in a chain of 28 layers
    of Qwen3-0.6B (H200, docs/decisions/small-batch-gemm.md).
    """
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    token_tiles = -(-tokens // block_m)
    # Tokens or rows: one side of a tile is at least 64, as Hopper's tensor cores need.
    block_n = 32 if block_m == 64 else 64
    while block_n < 128 and token_tiles * -(-rows // block_n) > num_sms:
        block_n *= 2
    num_tiles = token_tiles * -(-rows // block_n)
    block_k = 128 if k % 128 == 0 else 64
    # Fewer columns are not worth the reduction, which costs more the larger a tile is.
    min_width = 512 if 8 * num_tiles <= num_sms else 1024
    num_steps = k // block_k
    max_splits = max(1, min(num_sms // num_tiles, k // min_width))
    split_k = max(splits for splits in range(1, max_splits + 1) if num_steps % splits == 0)
    stage_bytes = 2 * (block_m + block_n) * block_k
    return GemmConfig(block_m, block_n, block_k, shared_bytes // 2 // stage_bytes + 1, split_k=split_k)


def split_k_gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Compute hidden W^T: hidden [tokens, K], weight [N, K] -> [tokens, N].

    The weight is read before the previous kernel has ended, so that kernel must not write it.

    Args:
        hidden: [tokens, K].
        weight: [N, K].
        gated: whether the weight holds gate rows above up rows, and the result is silu(gate) * up, [tokens, N / 2].
        residual: [tokens, N], contiguous. The result is added to `residual` in place, and `residual` is returned.
        out: [tokens, N], contiguous, of the type of `hidden` or float32. The result is written to `out`.
        config: None selects a configuration by size.
    """
    tokens, k = hidden.shape
    output = output_tensor(hidden, weight, gated, residual, out)
    sms, shared_bytes = sm_count(hidden.device), shared_memory_bytes(hidden.device)
    config = config or select_config(tokens, weight.shape[0], k, sms, shared_bytes)
    grid, partial, counters = split_workspace(config, weight.shape[0], tokens, output)
    _split_k_gemm_kernel[grid](
        hidden,
        weight,
        output,
        partial,
        counters,
        tokens,
        N=output.shape[1],
        K=k,
        SPLIT_K=config.split_k,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        **config.constants,
        **pdl_options(hidden.device),
    )
    return output
