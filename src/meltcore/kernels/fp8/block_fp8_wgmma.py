"""Multiplies by FP8 weights with scales of 128 x 128 blocks on Hopper GPUs, in CUDA C++ (moe/grouped_gemm_wgmma.cu).

A warp group multiplies 64 tokens by 128 rows and 128 columns in FP8, and adds the result to float32 sums with both
scales. The other one multiplies meanwhile. Of routed experts, gate and up quantize what they store for down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.fp8.block_fp8 import BLOCK, BlockFp8Tensor, quantize_blocks
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.moe.align import max_tiles, moe_align_block_size
from meltcore.kernels.moe.grouped_gemm_wgmma import (
    BLOCK_M,
    BLOCK_N,
    CAPABILITY,
    COPY_ROWS,
    GATE_ROWS,
    KERNEL,
    SHARED_BYTES,
    THREADS,
    kernel_macros,
)
from meltcore.kernels.tensor_map import tensor_map

if TYPE_CHECKING:
    from cuda.bindings.driver import CUtensorMap

# Measured on an H200 (docs/decisions/quantized-weights.md). With fewer pairs per expert, fewer tokens, or tiles for few
# SMs the kernels in Triton are as fast or faster.
MIN_PAIRS, _MIN_TOKENS, _MIN_TILES = 48, 65, 64
_COPY_TOKENS = 16  # rows of one copy by TMA
_MAX_TOKEN_BYTES = 2**32  # offsets of tokens have 32 bits


def supports(hidden: torch.Tensor, weight: BlockFp8Tensor, *, gated: bool) -> bool:
    """Return whether the kernel supports tokens [tokens, K] and a weight [..., rows, K], on a Hopper GPU.

    `gated` is as in `block_fp8_gemm`.
    """
    rows, columns = weight.values.shape[-2:]
    return (
        hidden.is_cuda
        and capability(hidden.device) == CAPABILITY
        and hidden.dtype == torch.bfloat16
        and len(hidden) * columns <= _MAX_TOKEN_BYTES
        and columns % BLOCK == 0
        and rows % (2 * GATE_ROWS if gated else BLOCK_N) == 0
        and (weight.row_group, weight.column_group) == (BLOCK, BLOCK)
    )


def is_faster(hidden: torch.Tensor, weight: BlockFp8Tensor, output: torch.Tensor, *, gated: bool) -> bool:
    """Return whether `block_fp8_wgmma` supports these tensors and is faster than `block_fp8_gemm`."""
    tokens, num_tiles = len(hidden), -(-len(hidden) // BLOCK_M) * (len(weight.values) // BLOCK_N)
    aligns = output.stride(0) % 8 == 0  # whole lines of 16 bytes
    return tokens >= _MIN_TOKENS and num_tiles >= _MIN_TILES and aligns and supports(hidden, weight, gated=gated)


def block_fp8_wgmma(
    tokens: BlockFp8Tensor, weight: BlockFp8Tensor, output: torch.Tensor, *, gated: bool, has_residual: bool
) -> torch.Tensor:
    """Compute `block_fp8_gemm` for what `is_faster` returns True for."""
    (count, columns), rows, device = tokens.values.shape, len(weight.values), output.device
    n_tiles = rows // BLOCK_N
    macros = kernel_macros(columns, n_tiles, 1, gated=gated, is_fp8=True, is_dense=True, has_residual=has_residual)
    maps = _map(weight, COPY_ROWS), _map(tokens, _COPY_TOKENS)
    KERNEL.launch(
        (min(-(-count // BLOCK_M) * n_tiles, sm_count(device)),),
        THREADS,
        macros,
        [*maps, tokens.values, output, count, output.stride(0), tokens.scales, weight.scales, tokens.scales],
        device,
        shared_bytes=SHARED_BYTES,
        pdl=True,
    )
    return output


def expert_outputs(
    hidden: torch.Tensor, topk_ids: torch.Tensor, gate_up: BlockFp8Tensor, down: BlockFp8Tensor
) -> torch.Tensor:
    """Compute `block_fp8_expert_outputs` of experts that `supports` returns True for, gate and up with `gated`."""
    top_k, (num_experts, size, width), device = topk_ids.shape[1], down.values.shape, hidden.device
    tokens, alignment = quantize_blocks(hidden), moe_align_block_size(topk_ids, BLOCK_M, num_experts)
    rows = max_tiles(topk_ids.numel(), num_experts, BLOCK_M) * BLOCK_M
    activated = BlockFp8Tensor(
        hidden.new_empty(rows, width, dtype=FP8), hidden.new_empty(rows, width // BLOCK, dtype=torch.float32)
    )
    outputs = hidden.new_empty(topk_ids.numel(), size)
    for weight, inputs, target, macros in (
        (gate_up, tokens, activated.values, kernel_macros(size, width // GATE_ROWS, top_k, gated=True, is_fp8=True)),
        (down, activated, outputs, kernel_macros(width, size // BLOCK_N, 1, gated=False, is_fp8=True)),
    ):
        KERNEL.launch(
            (sm_count(device),),
            THREADS,
            macros,
            [
                *(_map(weight, COPY_ROWS), _map(activated, _COPY_TOKENS), inputs.values, target, *alignment[1:]),
                *(inputs.scales, weight.scales, activated.scales),
            ],
            device,
            shared_bytes=SHARED_BYTES,
            pdl=True,
        )
    return outputs


def _map(tensor: BlockFp8Tensor, rows: int) -> CUtensorMap:
    return tensor_map(tensor.values.flatten(0, -2).view(torch.uint8), BLOCK, rows, swizzled=True)
