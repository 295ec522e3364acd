"""Skinny GEMM of up to 32 tokens with a block-quantized weight, in CUDA C++ (ggml_skinny_gemm.cu).

Triton loads a tile of the weight in an order of its own and moves values between threads on the way to the tensor
cores. Its kernel for the same work (ggml_gemm.py) reaches 19 to 31 % of an H200's bandwidth
(docs/decisions/quantized-weights.md). The Triton kernel serves more tokens, and devices below compute capability 8.0.
"""

from __future__ import annotations

from collections.abc import Iterator
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
_MAX_STAGED_COLUMNS = 8192  # if a block has one tile of rows
_BYTE_CHUNK = 128
_PADDING = 16  # columns between tokens in shared memory
_STAGED_PADDING = 32  # between staged ones
_FEW_TOKENS_PADDING = 64  # bytes
_RESERVED_BYTES = 1024  # of shared memory, by CUDA for each block: an SM has as many more than a block may use
_BLOCK_BYTES = _RESERVED_BYTES + 128  # what CUDA reserves, and the smaller arrays of the kernel
_INT4_FORMAT, _FP8_FORMAT = 4, 1
_FP8_CAPABILITY = 89  # conversions of e4m3
# Formats of GGUF files that ggml_tile.cu decodes. Triton's kernels decode the others.
WITH_MINIMA = (GgmlType.Q4_1, GgmlType.Q5_1, GgmlType.Q4_K, GgmlType.Q5_K)
DECODED_TYPES = (GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q6_K, *WITH_MINIMA)
_FEW_TOKENS_TYPES = GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.Q8_0  # of ggml_few_tokens.cu
_FEW_TOKENS = 4
MAX_WEIGHT_BYTES = 2**32  # of one array: offsets of kernels have 32 bits
GATED, RESIDUAL, FLOAT_OUTPUT, NORMALIZED = 1, 2, 4, 8  # flags of a launch

_FILES = "ggml_bits", "ggml_tile", "ggml_few_tokens", "ggml_skinny_gemm"
KERNEL = CudaKernel([Path(__file__).with_name(f"{name}.cu") for name in _FILES], "ggml_skinny_gemm")


class SkinnyConfig(NamedTuple):
    """Says how a GEMM is divided among blocks: see the macros of ggml_skinny_gemm.cu. `splits` divides the columns.

    Before the first step, tokens are copied to `staged_values` 16-bit numbers of shared memory, as they are or as
    ggml_few_tokens.cu needs them. With 0, no tokens are copied.
    """

    token_tiles: int
    column_warps: int
    depth: int
    blocks_per_sm: int
    shared_tokens: bool
    splits: int = 1
    staged_values: int = 0
    warps: int = _WARPS
    slots: int = 1  # tokens for which the staged values have space

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

    def staging_few(self, tokens: int, columns: int, block_type: BlockType) -> SkinnyConfig:
        """Return the configuration that stages tokens for ggml_few_tokens.cu: one, or up to four of a format in words.

        A format that this decoder does not have is staged for ggml_tile.cu.
        """
        if not has_few_tokens_decoder(block_type):
            return self.staging(tokens, columns, block_type)
        chunk, slots = chunk_columns(block_type), 1 if tokens == 1 else _FEW_TOKENS
        chunks, in_bytes = -(-columns // chunk), chunk == _BYTE_CHUNK
        assert tokens <= (1 if in_bytes else slots), (tokens, block_type)
        token_bytes = chunks * chunk * (2 if in_bytes else 4) + _FEW_TOKENS_PADDING
        sums_bytes = 4 * slots * chunks * (4 if in_bytes else 16)
        zeros = 2 * _FEW_TOKENS_PADDING if slots == 1 and not in_bytes else 0
        return self._replace(staged_values=(tokens * token_bytes + sums_bytes + zeros) // 2, slots=slots)

    def fits(self, block_type: BlockType, limit: int) -> bool:
        """Return whether an SM whose blocks may use `limit` bytes has memory for its blocks at a time."""
        sums = 2 * 16 * self.threads * self.token_tiles if self.column_warps > 1 else 0  # of warps that share rows
        block_bytes = self.shared_bytes(block_type) + sums + _BLOCK_BYTES
        return self.blocks_per_sm * block_bytes <= limit + _RESERVED_BYTES

    def macros(self, block_type: BlockType, columns: int, dtype: torch.dtype, pdl: bool) -> tuple[tuple[str, int], ...]:
        """Return the constants that the kernel is compiled with."""
        return (
            *format_macros(block_type, dtype),
            ("TOKEN_TILES", self.token_tiles),
            ("WARPS", self.warps),
            ("COLUMN_WARPS", self.column_warps),
            ("DEPTH", self.depth),
            ("SHARED_TOKENS", int(self.shared_tokens)),
            ("STAGED", self.slots if self.staged_values else 0),
            ("SPLITS", int(self.splits > 1)),
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


def has_few_tokens_decoder(block_type: BlockType) -> bool:
    """Return whether ggml_few_tokens.cu decodes a format."""
    return isinstance(block_type, Int4Type) or block_type in _FEW_TOKENS_TYPES


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
        staged = _staged_configs(tokens, rows, columns, block_type, sms)
        config = next((each for each in staged if each.fits(block_type, limit)), None)
        if config is not None:
            return config
        config = _few_tokens_config(rows, columns, block_type, sms)
    elif token_tiles == 2 and rows * columns <= _MAX_L1_WEIGHT:
        blocks_per_sm = 3 if has_small_decoder(block_type) and -(-rows // _TILE_ROWS) > 2 * sms else 2
        config = SkinnyConfig(2, 8, 3, blocks_per_sm, shared_tokens=False)
    else:
        groups = -(-rows // (_WARPS * _TILE_ROWS))
        # Three blocks per SM spill registers of larger decoders, and are faster where two would need a second wave.
        many = groups >= sms if has_small_decoder(block_type) else groups > 2 * sms and _has_small_blocks(block_type)
        blocks_per_sm = 3 if many and token_tiles == 2 else 2
        steps = -(-columns // chunk_columns(block_type))
        splits = max(1, min(blocks_per_sm * sms // groups, steps // 2))
        config = SkinnyConfig(token_tiles, 1, 2, blocks_per_sm, shared_tokens=True, splits=splits)
    while config.blocks_per_sm > 1 and config.blocks_per_sm * config.shared_bytes(block_type) > limit:
        smaller = config._replace(depth=2)
        config = smaller if config.depth > 2 else config._replace(blocks_per_sm=config.blocks_per_sm - 1)
    return config


def _has_small_blocks(block_type: BlockType) -> bool:
    """Return whether a format may have smaller blocks: one that was measured with them (H200, 2026-11-30)."""
    return isinstance(block_type, Int4Type) or block_type in (GgmlType.Q4_0, GgmlType.Q4_K, GgmlType.Q6_K)


def _few_tokens_config(rows: int, columns: int, block_type: BlockType, sms: int) -> SkinnyConfig:
    """Return the configuration for up to eight tokens that are not staged.

    Where two blocks of 16 rows per SM would need a second wave, smaller blocks are one: three per SM, of six warps, or
    in Q8_0 two of 32 rows each.
    """
    tiles, chunks = -(-rows // _TILE_ROWS), -(-columns // chunk_columns(block_type))
    second_wave = 2 * sms < tiles <= 3 * sms
    if second_wave and chunks >= 2 * _WARPS and _has_small_blocks(block_type):
        return SkinnyConfig(1, 6, 2, 3, shared_tokens=False, warps=6)
    has_long_rows = block_type == GgmlType.Q8_0 and chunks >= 4 * _WARPS
    shares = second_wave if has_long_rows else -(-rows // 32) >= 1.5 * sms
    return SkinnyConfig(1, 4 if shares else 8, 3, 2, shared_tokens=False)


def _staged_configs(tokens: int, rows: int, columns: int, block_type: BlockType, sms: int) -> Iterator[SkinnyConfig]:
    """Yield configurations that stage up to eight tokens, the fastest that fits first.

    Staging costs a block about as much as it saves for one tile of long rows. Where an SM has 2 to 3 tiles, three
    blocks are one wave, and a block of 16 warps keeps an SM as busy with its third tile as with its first: 5,376 x
    21,504 in Q8_0 takes 38 instead of 46 us.
    """
    tiles, chunks = -(-rows // _TILE_ROWS), -(-columns // chunk_columns(block_type))
    few = has_few_tokens_decoder(block_type)

    def config(warps: int, depth: int, blocks_per_sm: int, column_warps: int | None = None) -> SkinnyConfig:
        each = SkinnyConfig(1, column_warps or warps, depth, blocks_per_sm, shared_tokens=False, warps=warps)
        return each.staging_few(tokens, columns, block_type)

    if tokens > 1:
        if tokens <= _FEW_TOKENS and block_type in (GgmlType.Q4_K, GgmlType.Q6_K) and tiles >= 8 * sms:
            yield config(2 * _WARPS, 2, 1, _WARPS)
        return
    if few and sms < tiles <= 2 * sms and columns > _MAX_STAGED_COLUMNS:
        return
    if tiles <= sms and chunks >= 2 * _WARPS:
        yield config(2 * _WARPS, 3, 1)
    depths = (2,) if block_type == GgmlType.Q6_K else (3, 2)
    wide = [config(2 * _WARPS, depth, 1) for depth in depths if few]
    if 2 * sms < tiles <= 3 * sms:
        if block_type in (GgmlType.Q8_0, GgmlType.Q6_K) and columns >= 4096:
            yield from wide
        if has_small_decoder(block_type) or (few and block_type != GgmlType.Q6_K):
            yield config(_WARPS, 2, 3)
        yield from wide
    yield config(_WARPS, 3, 2, 4 if -(-rows // 32) >= 1.5 * sms and not few else None)
    yield from wide


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
