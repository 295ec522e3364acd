"""Mixed-input GEMM with a block-quantized weight on Hopper GPUs, in CUDA C++ (ggml_wgmma_gemm.cu).

For tens to hundreds of tokens, reading and decoding the weight takes about as long as multiplying, and the other
kernels do not overlap these. Triton waits for each matmul before it decodes the next weights. The library needs a
weight in 16 bits, which takes a pass through memory. Here decoded weights are the first operand of wgmma, which may be
in registers.
"""

from __future__ import annotations

from functools import cache
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch

from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.gemm.gemv import output_tensor
from meltcore.kernels.gemm.split_k import split_counters
from meltcore.kernels.nvrtc import INSTRUCTIONS, WGMMA, CudaKernel
from meltcore.kernels.quant.ggml import BlockType, Fp8Type, GgmlTensor
from meltcore.kernels.quant.ggml_skinny_gemm import WITH_MINIMA, chunk_columns, format_macros, is_decoded, launch_flags
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.int4 import Int4Type
from meltcore.kernels.tensor_map import row_group_map, tensor_map

KERNEL = CudaKernel(
    [INSTRUCTIONS, WGMMA, *(Path(__file__).with_name(f"{name}.cu") for name in ("ggml_bits", "ggml_wgmma_gemm"))],
    "ggml_wgmma_gemm",
    suffix="a",
)
SHARED_BYTES = 227 * 1024
TOKEN_TILES = (16, 32, 64, 96, 128, 192, 256)
# Tokens from which it is faster than the skinny GEMM, also for larger weights of formats with minima, and
# by the values of a weight, at least, the tokens up to which it is faster than dequantizing the weight for the library.
# A launch takes about 8 us beside what grows with its work (docs/decisions/quantized-weights.md).
_MIN_TOKENS, _MIN_TOKENS_WITH_MINIMA, _MANY_K_QUANT_VALUES = 17, 9, 2**26
MAX_TOKENS = 512
_MOST_TOKENS = {2**25: MAX_TOKENS, 3 * 2**23: 256, 2**24: 192, 2**23: 64}
# Values of a weight in a tile of three warp groups, at least, and tokens of such a tile, at most: its threads have
# fewer registers for sums.
_MIN_WIDE_VALUES, _MAX_WIDE_TOKENS = 2**27, 128
_MIN_HALVED_TOKENS = 256  # of a tile
_CAPABILITY = 90
_GROUP_THREADS = 128
_ALIGNMENT_BYTES, _BARRIER_BYTES = 1024, 512  # at most, of shared memory
_BOX_COLUMNS = 64  # of a copy of tokens
_GROUP_ROWS = 64  # of wgmma's first operand, for a warp group
_COPY_BYTES = 128  # of a row's values
_HIGH_BYTES = {GgmlType.Q6_K: 64, GgmlType.Q5_1: 32, GgmlType.Q5_K: 32}  # of a row and a chunk, after all values
_RECORD_BYTES = {GgmlType.Q8_0: 8, GgmlType.Q6_K: 32, GgmlType.Q4_1: 32, GgmlType.Q5_1: 32}  # of scales; others have 16
_MAX_WEIGHT_STAGES, _MAX_TOKEN_STAGES = 6, 12


class WgmmaConfig(NamedTuple):
    """Says how a GEMM is divided among blocks: see the macros of ggml_wgmma_gemm.cu."""

    tokens: int
    warp_groups: int
    weight_stages: int
    token_stages: int

    @classmethod
    def of(cls, tokens: int, warp_groups: int, block_type: BlockType) -> WgmmaConfig:
        """Return a configuration whose stages fill shared memory, with about as many columns of weight and tokens."""
        free = SHARED_BYTES - _ALIGNMENT_BYTES - _BARRIER_BYTES
        bytes_of_rows = _GROUP_ROWS * warp_groups * _row_bytes(block_type)
        weight, token = -(-bytes_of_rows // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, 2 * _BOX_COLUMNS * tokens
        of_chunk = weight + chunk_columns(block_type) // _BOX_COLUMNS * token
        weight_stages = max(3, min(_MAX_WEIGHT_STAGES, free // of_chunk + 1))
        return cls(tokens, warp_groups, weight_stages, min(_MAX_TOKEN_STAGES, (free - weight_stages * weight) // token))

    @property
    def rows(self) -> int:
        """Rows of a tile of the weight."""
        return _GROUP_ROWS * self.warp_groups

    def macros(self, block_type: BlockType, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
        """Return the constants that the kernel is compiled with."""
        return (
            *format_macros(block_type, dtype),
            ("TOKENS", self.tokens),
            ("WARP_GROUPS", self.warp_groups),
            ("WEIGHT_STAGES", self.weight_stages),
            ("TOKEN_STAGES", self.token_stages),
            ("SHARED_BYTES", SHARED_BYTES),
        )


def _row_bytes(block_type: BlockType) -> int:
    """Return the bytes of shared memory of a row and a chunk of columns."""
    if isinstance(block_type, Int4Type):
        return _COPY_BYTES + {128: 8, 64: 16, 32: 32}[block_type.group_size]
    assert not isinstance(block_type, Fp8Type)
    return _COPY_BYTES + _HIGH_BYTES.get(block_type, 0) + _RECORD_BYTES.get(block_type, 16)


def supports(hidden: torch.Tensor, weight: GgmlTensor) -> bool:
    """Return whether the kernel supports these tensors: 16-bit tokens on Hopper, with sizes that TMA can copy."""
    rows, row_bytes = weight.values.shape
    return (
        hidden.is_cuda
        and capability(hidden.device) == _CAPABILITY
        and is_decoded(weight.type)
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.is_contiguous()
        and rows % 16 == 0  # two times eight, of which a gated weight has one each of gate and up
        and row_bytes % 16 == 0
        and weight.columns % 8 == 0
    )


def is_faster(hidden: torch.Tensor, weight: GgmlTensor) -> bool:
    """Return whether the kernel supports these tensors and is the fastest."""
    num_values = len(weight.values) * weight.columns
    min_tokens = _MIN_TOKENS
    if _has_much_to_decode(num_values, weight.type) and weight.type != GgmlType.Q6_K:
        min_tokens = _MIN_TOKENS_WITH_MINIMA
    max_tokens = next((most for values, most in _MOST_TOKENS.items() if num_values >= values), 0)
    return min_tokens <= hidden.shape[0] <= max_tokens and supports(hidden, weight)


def _has_much_to_decode(num_values: int, block_type: BlockType) -> bool:
    return num_values >= _MANY_K_QUANT_VALUES and block_type in (GgmlType.Q6_K, *WITH_MINIMA)


@cache
def select_config(tokens: int, rows: int, columns: int, block_type: BlockType, sms: int) -> WgmmaConfig:
    """Select the configuration for a number of tokens and a weight [rows, columns], as measured on an H200."""
    token_tiles = -(-tokens // TOKEN_TILES[-1])
    tile = next(each for each in TOKEN_TILES if token_tiles * each >= tokens)
    # A third warp group pays where a block has long runs or much to decode, and where each SM then has a whole tile.
    num_values, wide_tiles = rows * columns, -(-rows // (3 * _GROUP_ROWS))
    has_third_group = (
        num_values >= _MIN_WIDE_VALUES or _has_much_to_decode(num_values, block_type) or 0.9 * sms <= wide_tiles <= sms
    )
    groups = 3 if has_third_group and tile <= _MAX_WIDE_TOKENS else 2
    # Of small weights, two tiles of half of the tokens each have half as many parts, and parts of half the size.
    for halved in (2, 3) if token_tiles == 1 and tile >= _MIN_HALVED_TOKENS else ():
        parts_of_rows = 4 * -(-rows // (halved * _GROUP_ROWS))
        if 0.9 * sms <= parts_of_rows <= sms:
            tile, groups = tile // 2, halved
            break
    return WgmmaConfig.of(tile, groups, block_type)


@cache
def grid_size(tiles: int, chunks: int, tokens: int, sms: int) -> int:
    """Return the number of blocks. Each block takes an equal run of the chunks of all tiles of `tokens` tokens.

    A tile is split into parts. More parts take longer to add up, but a part has fewer chunks to multiply. If there are
    few tiles, and few SMs then stay idle, no block works on two tiles.
    """
    parts = min(chunks, max(1, isqrt(chunks * TOKEN_TILES[-1] // tokens)))
    splits = min(sms // tiles, parts)
    if splits and (splits == parts or 10 * tiles * splits >= 9 * sms):
        return tiles * splits
    return min(sms, tiles * parts)


def ggml_wgmma_gemm(
    hidden: torch.Tensor,
    weight: GgmlTensor,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: WgmmaConfig | None = None,
) -> torch.Tensor:
    """Compute hidden W^T: hidden [tokens, K], weight [N, K] -> [tokens, N] in the type of `hidden`.

    It has the options of `ggml_gemm`. Decoded weights are rounded to the type of `hidden`. The weight is read before
    the previous kernel has ended, so that kernel must not write it.
    """
    (tokens, k), rows, device = hidden.shape, len(weight.values), hidden.device
    output = output_tensor(hidden, weight.values, gated, residual, out)
    config = config or select_config(tokens, rows, k, weight.type, sm_count(device))
    token_tiles, chunks = -(-tokens // config.tokens), -(-k // chunk_columns(weight.type))
    tiles = -(-rows // config.rows) * token_tiles
    grid = grid_size(tiles, chunks, config.tokens, sm_count(device))
    parts = 0 if grid == tiles else 2 * grid if grid % tiles else grid
    partial = torch.empty(parts * config.rows * config.tokens, dtype=torch.float32, device=device)
    high_bytes = 0 if isinstance(weight.type, Int4Type | Fp8Type) else _HIGH_BYTES.get(weight.type, 0)
    low_bytes = weight.values.shape[1] - high_bytes * chunks
    low, high = weight.values[:, :low_bytes], weight.values[:, low_bytes if high_bytes else 0 :]
    KERNEL.launch(
        (grid,),
        (1 + config.warp_groups) * _GROUP_THREADS,
        config.macros(weight.type, hidden.dtype),
        [
            row_group_map(low, _COPY_BYTES, config.rows // 16, gated=gated),
            row_group_map(high, high_bytes or _COPY_BYTES, config.rows // 16, gated=gated),
            tensor_map(hidden, _BOX_COLUMNS, config.tokens, swizzled=True),
            *(weight.scales, weight.subscales, output, partial, split_counters(device)),
            *(tokens, output.shape[1], k, output.stride(0), token_tiles, tiles * chunks),
            launch_flags(hidden, output, residual, gated=gated),
        ],
        device,
        shared_bytes=SHARED_BYTES,
        pdl=True,
    )
    return output
