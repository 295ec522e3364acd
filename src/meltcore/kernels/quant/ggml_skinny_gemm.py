"""Skinny GEMM of up to 32 tokens with a block-quantized weight, in CUDA C++ (ggml_skinny_gemm.cu).

Triton loads a tile of the weight in an order of its own and moves values between threads on the way to the tensor
cores. Its kernel for the same work (ggml_gemm.py) reaches 19 to 31 % of an H200's bandwidth
(docs/decisions/quantized-weights.md). The Triton kernel serves more tokens, and devices below compute capability 8.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from meltcore.kernels.capability import capability, shared_memory_bytes, sm_count
from meltcore.kernels.gemm.gemv import output_tensor
from meltcore.kernels.gemm.split_k import split_counters
from meltcore.kernels.launch import pdl_options
from meltcore.kernels.norm import Norm
from meltcore.kernels.nvrtc import CudaKernel
from meltcore.kernels.quant.ggml import BlockType, Fp8Type, GgmlTensor
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.int4 import CHUNK, Int4Type

MAX_TOKENS = 32
MIN_CAPABILITY = 80  # cp.async and bfloat16 on tensor cores
_TILE_TOKENS, _TILE_ROWS, _WARPS = 8, 16, 8
THREADS = 32 * _WARPS  # of a block
_MAX_L1_TOKENS = 8  # more are copied to shared memory with each step, unless the weight has at most these values:
_MAX_L1_WEIGHT = 2**24
_BYTE_CHUNK = 128
_PADDING = 16  # columns between tokens in shared memory
_STAGED_PADDING = 32  # between staged ones
_INT4_FORMAT, _FP8_FORMAT = 4, 1
_FP8_CAPABILITY = 89  # conversions of e4m3
# Formats of GGUF files that ggml_tile.cu decodes. Triton's kernels decode the others.
WITH_MINIMA = (GgmlType.Q4_1, GgmlType.Q5_1, GgmlType.Q4_K, GgmlType.Q5_K)
DECODED_TYPES = (GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q6_K, *WITH_MINIMA)
MAX_WEIGHT_BYTES = 2**32  # of one array: offsets of kernels have 32 bits
GATED, RESIDUAL, FLOAT_OUTPUT, NORMALIZED = 1, 2, 4, 8  # flags of a launch

_FILES = "ggml_bits", "ggml_tile", "ggml_skinny_gemm"
KERNEL = CudaKernel([Path(__file__).with_name(f"{name}.cu") for name in _FILES], "ggml_skinny_gemm")


class SkinnyConfig(NamedTuple):
    """Says how a GEMM is divided among blocks: see the macros of ggml_skinny_gemm.cu. `splits` divides the columns.

    Before the first step, `staged_values` 16-bit numbers of tokens are copied to shared memory. With 0, no tokens are
    copied.
    """

    token_tiles: int
    column_warps: int
    depth: int
    blocks_per_sm: int
    shared_tokens: bool
    splits: int = 1
    staged_values: int = 0
    warps: int = _WARPS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def block_rows(self) -> int:
        """Rows of the weight that a block takes at a time."""
        return self.warps // self.column_warps * _TILE_ROWS

    def shared_bytes(self, block_type: BlockType) -> int:
        """Return the bytes of dynamic shared memory per block."""
        tokens = 2 * _TILE_TOKENS * self.token_tiles * (self.column_warps * chunk_columns(block_type) + _PADDING)
        stage_bytes = self.warps * _warp_bytes(block_type) + (tokens if self.shared_tokens else 0)
        return self.depth * stage_bytes + 2 * self.staged_values

    def staging(self, tokens: int, columns: int, block_type: BlockType) -> SkinnyConfig:
        """Return the configuration that copies all columns of some tokens before the first step."""
        scales = -(-columns // block_type.block_size // 4) * 8 if isinstance(block_type, Fp8Type) else 0
        return self._replace(staged_values=tokens * (columns + _STAGED_PADDING + scales))

    def macros(self, block_type: BlockType, columns: int, dtype: torch.dtype, pdl: bool) -> tuple[tuple[str, int], ...]:
        """Return the constants that the kernel is compiled with."""
        return (
            *format_macros(block_type, dtype),
            ("TOKEN_TILES", self.token_tiles),
            ("WARPS", self.warps),
            ("COLUMN_WARPS", self.column_warps),
            ("DEPTH", self.depth),
            ("SHARED_TOKENS", int(self.shared_tokens)),
            ("STAGED", int(self.staged_values > 0)),
            ("TAIL", int(columns % chunk_columns(block_type) != 0)),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("PDL", int(pdl)),
        )


def format_macros(block_type: BlockType, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return the macros of ggml_bits.cu for a weight and tokens of type `dtype`."""
    if isinstance(block_type, Int4Type):
        number, bf16_scales = _INT4_FORMAT, block_type.scale_dtype == torch.bfloat16
    elif isinstance(block_type, Fp8Type):
        number, bf16_scales = _FP8_FORMAT, False
    else:
        number, bf16_scales = int(block_type), False
    group = block_type.row_group if isinstance(block_type, Fp8Type) else min(block_type.block_size, 128)
    return (
        ("FORMAT", number),
        ("GROUP", group),  # the kernel has sizes of arrays for it, whatever the format
        ("BF16_SCALES", int(bf16_scales)),
        ("HALF", int(dtype == torch.float16)),
    )


def chunk_columns(block_type: BlockType) -> int:
    """Return the number of columns that a warp takes at a time. Their values have 128 bytes."""
    return _BYTE_CHUNK if block_type == GgmlType.Q8_0 or isinstance(block_type, Fp8Type) else CHUNK


def launch_flags(hidden: torch.Tensor, output: torch.Tensor, residual: torch.Tensor | None, *, gated: bool) -> int:
    """Return the flags of a launch that writes `output`, of the type of `hidden` or float32."""
    return GATED * gated | RESIDUAL * (residual is not None) | FLOAT_OUTPUT * (output.dtype != hidden.dtype)


def _warp_bytes(block_type: BlockType) -> int:
    """Return the bytes of a warp's stage: 16 rows and a chunk of columns, as `GgmlTensor` packs them."""
    if block_type == GgmlType.Q8_0:
        return _TILE_ROWS * (128 + 8)
    if isinstance(block_type, Fp8Type):
        return _TILE_ROWS * (128 + 4)
    # The scale of a Q6_K block is copied with its neighbor's.
    return _TILE_ROWS * (sum(block_type.array_bytes(CHUNK)))


def is_decoded(block_type: BlockType) -> bool:
    """Return whether kernels in CUDA C++ decode a format."""
    return isinstance(block_type, Int4Type | Fp8Type) or block_type in DECODED_TYPES


def has_small_decoder(block_type: BlockType) -> bool:
    """Return whether a decoder needs so few registers that an SM may have three blocks."""
    return block_type in (GgmlType.Q4_0, GgmlType.Q8_0) or isinstance(block_type, Fp8Type)


def min_capability(block_type: BlockType) -> int:
    """Return the compute capability that a format needs."""
    return _FP8_CAPABILITY if isinstance(block_type, Fp8Type) else MIN_CAPABILITY


def stages(hidden: torch.Tensor, weight: GgmlTensor, norm: Norm | None) -> bool:
    """Return whether the kernel stages a single token, as a norm of this type and an FP8 weight require."""
    if len(hidden) != 1 or (norm and norm.weight.dtype != hidden.dtype) or not supports(hidden, weight):
        return False
    device = hidden.device
    sizes = len(weight.values), weight.columns, weight.type
    return select_config(1, *sizes, sm_count(device), shared_memory_bytes(device)).staged_values > 0


def supports(hidden: torch.Tensor, weight: GgmlTensor) -> bool:
    """Return whether the kernel supports these tensors: up to MAX_TOKENS of a 16-bit type, on CUDA."""
    return (
        hidden.is_cuda
        and is_decoded(weight.type)
        and 1 <= hidden.shape[0] <= MAX_TOKENS
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.is_contiguous()
        and all(array.nbytes < MAX_WEIGHT_BYTES for array in weight.arrays)
        and capability(hidden.device) >= min_capability(weight.type)
    )


def select_config(tokens: int, rows: int, columns: int, block_type: BlockType, sms: int, limit: int) -> SkinnyConfig:
    """Select the configuration for a number of tokens and a weight [rows, columns].

    The device has `sms` SMs with `limit` bytes of shared memory. Configurations were measured on an H200
    (docs/decisions/quantized-weights.md). If warps share rows, a block needs fewer rows. If warps have separate rows,
    they share the tokens.
    """
    tiles = -(-tokens // _TILE_TOKENS)
    token_tiles = 1 << (tiles - 1).bit_length()
    if tokens <= _MAX_L1_TOKENS:
        column_warps = 4 if -(-rows // 32) >= 1.5 * sms else 8
        config = SkinnyConfig(1, column_warps, 3, 2, shared_tokens=False)
        faster = _one_token_configs(rows, columns, block_type, sms, config)
        # Of 151,936 x 2,048 in Q8_0 it costs 8 %: 95 and 103 us. In Q6_K it gains as much.
        is_staged = tokens == 1 and not (column_warps == 4 and block_type == GgmlType.Q8_0)
        for staging in (each.staging(1, columns, block_type) for each in (*faster, config) if is_staged):
            sums_bytes = 32 * staging.threads  # of warps that share rows
            if staging.blocks_per_sm * (staging.shared_bytes(block_type) + sums_bytes) <= limit:
                return staging
    elif token_tiles == 2 and rows * columns <= _MAX_L1_WEIGHT:
        blocks_per_sm = 3 if has_small_decoder(block_type) and -(-rows // _TILE_ROWS) > 2 * sms else 2
        config = SkinnyConfig(2, 8, 3, blocks_per_sm, shared_tokens=False)
    else:
        groups = -(-rows // (_WARPS * _TILE_ROWS))
        many = groups >= sms and token_tiles == 2 and has_small_decoder(block_type)
        blocks_per_sm = 3 if many else 2
        steps = -(-columns // chunk_columns(block_type))
        splits = max(1, min(blocks_per_sm * sms // groups, steps // 2))
        config = SkinnyConfig(token_tiles, 1, 2, blocks_per_sm, shared_tokens=True, splits=splits)
    while config.blocks_per_sm > 1 and config.blocks_per_sm * config.shared_bytes(block_type) > limit:
        smaller = config._replace(depth=2)
        config = smaller if config.depth > 2 else config._replace(blocks_per_sm=config.blocks_per_sm - 1)
    return config


def _one_token_configs(
    rows: int, columns: int, block_type: BlockType, sms: int, config: SkinnyConfig
) -> tuple[SkinnyConfig, ...]:
    """Return configurations for a single token, the fastest that fits first. SMs have more warps if there are few rows.

    On an H200, a weight of 2,048 x 4,096 in Q8_0 takes 5.3 instead of 5.9 us. A warp loads both of its chunks while the
    previous kernel runs, so within a step it takes 3.7 instead of 4.6 us. A weight of 5,120 x 2,048 takes 5.7 instead
    of 6.2 us, since it needs one wave of blocks instead of two. Where the token of a long row leaves no memory for a
    third block, one of 12 warps keeps an SM as busy with its third tile as with its first: 5,376 x 21,504 in Q4_0 takes
    27.9 instead of 32.2 us.
    """
    tiles, chunks = -(-rows // _TILE_ROWS), -(-columns // chunk_columns(block_type))
    if tiles <= sms and chunks >= 2 * _WARPS:
        return (config._replace(warps=2 * _WARPS, column_warps=2 * _WARPS, depth=3, blocks_per_sm=1),)
    if config.column_warps != _WARPS or not 2 * sms < tiles <= 3 * sms:
        return ()
    has_4_bits = block_type == GgmlType.Q4_0 or isinstance(block_type, Int4Type)
    three = (config._replace(depth=2, blocks_per_sm=3),) if has_4_bits or has_small_decoder(block_type) else ()
    return (*three, config._replace(warps=12, column_warps=12, blocks_per_sm=1)) if has_4_bits else three


def ggml_skinny_gemm(
    hidden: torch.Tensor,
    weight: GgmlTensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """Compute norm(hidden) W^T: hidden [tokens, K], weight [N, K] -> [tokens, N] in the type of `hidden`.

    The options are explained at `ggml_gemm`. A norm and a weight in FP8 are supported if `stages` returns True. Weights
    are not rounded: sums of quantized values are multiplied by scales in float32. The weight is read before the
    previous kernel has ended, so that kernel must not write it.
    """
    (tokens, k), rows, device = hidden.shape, len(weight.values), hidden.device
    output = output_tensor(hidden, weight.values, gated, residual, out)
    sms = sm_count(device)
    config = config or select_config(tokens, rows, k, weight.type, sms, shared_memory_bytes(device))
    groups = -(-rows // config.block_rows)
    partial, counters = output, output  # unused without splits
    if config.splits > 1:
        sums = groups * config.splits * config.block_rows * config.token_tiles * _TILE_TOKENS
        partial, counters = torch.empty(sums, dtype=torch.float32, device=device), split_counters(device)
    pdl = pdl_options(device)["PDL"]
    norm_weight, eps = norm or (hidden, 0.0)
    flags = launch_flags(hidden, output, residual, gated=gated) | NORMALIZED * (norm is not None)
    KERNEL.launch(
        (min(groups * config.splits, sms * config.blocks_per_sm),),
        config.threads,
        config.macros(weight.type, k, hidden.dtype, pdl),
        [
            *(hidden, *weight.arrays, output, partial, counters, norm_weight, eps),
            *(tokens, output.shape[1], k, output.stride(0), config.splits, flags),
        ],
        device,
        shared_bytes=config.shared_bytes(weight.type),
        pdl=pdl,
    )
    return output
