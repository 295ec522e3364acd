"""FP8 tensors with a scale per block. A block has 128 columns of a token, or 128 columns of several rows of a weight.

Published checkpoints scale blocks of 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3). A weight whose rows were
reordered or sharded may have fewer rows per scale. The format also has weights with one scale per row: their only block
of columns has all columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.fp8.fp8 import FP8, FP8_CAPABILITY, FP8_MAX, MIN_AMAX, quantize
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.norm import Norm
from meltcore.kernels.quant.ggml import Fp8Type, GgmlTensor

MIN_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
BLOCK = 128


class BlockFp8Tensor(NamedTuple):
    """A quantized weight, or quantized tokens.

    Args:
        values: [..., rows, columns] e4m3.
        scales: [..., rows / row_group, blocks of columns] float32, the factors of the values. A block has 128 columns;
            the last block may have fewer. If a row has one scale, all columns are one block.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def row_group(self) -> int:
        """Number of rows that share a scale."""
        return self.values.shape[-2] // self.scales.shape[-2]

    @property
    def column_group(self) -> int:
        """Number of columns that share a scale."""
        columns = self.values.shape[-1]
        return columns if self.scales.shape[-1] == 1 else BLOCK

    def as_bytes(self) -> GgmlTensor | None:
        """Return the weight for the kernels of block-quantized weights, or None if its blocks are not 128 columns."""
        columns = self.values.shape[-1]
        if self.column_group != BLOCK or columns % BLOCK:
            return None
        values, scales = self.values.view(torch.uint8), self.scales.view(torch.uint8)
        return GgmlTensor(Fp8Type(self.row_group), columns, values, scales, values.new_empty(0))

    def dequantize(self) -> torch.Tensor:
        """Return the values of the quantized tensor, [..., rows, columns] float32."""
        columns = self.values.shape[-1]
        scales = self.scales.repeat_interleave(self.column_group, -1)[..., :columns]
        return self.values.float() * scales.repeat_interleave(self.row_group, -2)


def num_blocks(columns: int) -> int:
    """Return the number of blocks of columns."""
    return -(-columns // BLOCK)


def quantize_blocks_reference(hidden: torch.Tensor, norm: Norm | None = None) -> BlockFp8Tensor:
    """Compute `quantize_blocks` in PyTorch, as its specification."""
    rows, columns = hidden.shape
    hidden_f32 = hidden.float()
    factor = hidden_f32.new_ones(rows, 1)
    if norm:
        factor = torch.rsqrt(hidden_f32.pow(2).mean(-1, keepdim=True) + norm.eps)
        hidden_f32 = hidden_f32 * norm.weight.float()
    blocks = torch.nn.functional.pad(hidden_f32, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    amax = blocks.abs().amax(-1).clamp(min=MIN_AMAX)
    inverse_scale = torch.full_like(amax, FP8_MAX) / amax  # by a division that rounds once, as in fp8.py
    values = (blocks * inverse_scale[:, :, None]).to(FP8).view(rows, -1)[:, :columns]
    return BlockFp8Tensor(values.contiguous(), amax / FP8_MAX * factor)


@triton.jit
def quantize_tile(hidden, FP8_MAX: tl.constexpr, MIN_AMAX: tl.constexpr):
    """Quantize a block of columns of some tokens, [tokens, columns] float32. Returns values and scales [tokens]."""
    amax = tl.maximum(tl.max(tl.abs(hidden), axis=1), MIN_AMAX)
    return (hidden * tl.div_rn(FP8_MAX, amax)[:, None]).to(tl.float8e4nv), tl.div_rn(amax, FP8_MAX)


@triton.jit(do_not_specialize=["rows"])
def _quantize_blocks_kernel(
    hidden_ptr,
    norm_ptr,
    values_ptr,
    scales_ptr,
    eps,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program quantizes BLOCKS blocks of ROWS rows: with a norm, all blocks of a row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_block = tl.program_id(1) * BLOCKS
    column = tl.broadcast_to(first_block * BLOCK + tl.arange(0, BLOCKS * BLOCK)[None, :], (ROWS, BLOCKS * BLOCK))
    mask = (row < rows)[:, None] & (column < SIZE)
    offset = row.to(tl.int64)[:, None] * SIZE + column
    if HAS_NORM:
        weight = tl.load(norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    pdl_sync(PDL)
    hidden_f32 = tl.load(hidden_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(hidden_f32 * hidden_f32, axis=1)
    if HAS_NORM:
        hidden_f32 *= weight
    values, scales = quantize_tile(tl.reshape(hidden_f32, (ROWS * BLOCKS, BLOCK)), FP8_MAX, MIN_AMAX)
    scales = tl.reshape(scales, (ROWS, BLOCKS))
    if HAS_NORM:
        scales *= tl.rsqrt(squares / SIZE + eps)[:, None]
    tl.store(values_ptr + offset, tl.reshape(values, (ROWS, BLOCKS * BLOCK)), mask=mask)
    COLUMN_BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    block = first_block + tl.arange(0, BLOCKS)[None, :]
    scale_ptrs = scales_ptr + row.to(tl.int64)[:, None] * COLUMN_BLOCKS + block
    tl.store(scale_ptrs, scales, mask=(row < rows)[:, None] & (block < COLUMN_BLOCKS))


def quantize_blocks(hidden: torch.Tensor, norm: Norm | None = None) -> BlockFp8Tensor:
    """Quantize norm(hidden) per row and block of columns. hidden: [rows, columns] of any floating type, contiguous.

    The norm's factor of a row is multiplied into the row's scales. So values are quantized without waiting for the
    factor, and are rounded once.
    """
    if not use_triton(hidden):
        return quantize_blocks_reference(hidden, norm)
    rows, size = hidden.shape
    values = torch.empty(rows, size, dtype=FP8, device=hidden.device)
    scales = torch.empty(rows, num_blocks(size), dtype=torch.float32, device=hidden.device)
    if rows == 0:
        return BlockFp8Tensor(values, scales)
    if not hidden.is_contiguous():
        raise ValueError(f"hidden states of strides {hidden.stride()}: must be contiguous")
    blocks = triton.next_power_of_2(num_blocks(size)) if norm else min(8, triton.next_power_of_2(num_blocks(size)))
    rows_per_program = max(1, (8 if norm else 16) // blocks)
    norm_weight, eps = norm or (hidden, 0.0)
    _quantize_blocks_kernel[(triton.cdiv(rows, rows_per_program), triton.cdiv(num_blocks(size), blocks))](
        hidden,
        norm_weight,
        values,
        scales,
        eps,
        rows,
        SIZE=size,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        ROWS=rows_per_program,
        HAS_NORM=norm is not None,
        FP8_MAX=FP8_MAX,
        MIN_AMAX=MIN_AMAX,
        num_warps=min(16, max(4, blocks * rows_per_program // 4)),  # 16 columns per thread
        **pdl_options(hidden.device),
    )
    return BlockFp8Tensor(values, scales)


def quantize_tokens(hidden: torch.Tensor, weight: BlockFp8Tensor, norm: Norm | None = None) -> BlockFp8Tensor:
    """Quantize norm(hidden) for a matmul with a weight: per token, and per block if the weight has blocks."""
    if weight.column_group == BLOCK:
        return quantize_blocks(hidden, norm)
    values, scales = quantize(hidden, norm)
    return BlockFp8Tensor(values, scales[:, None])
