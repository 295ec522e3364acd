"""Grouped GEMM over (token, expert) pairs with block-quantized expert weights, in CUDA C++ (ggml_expert_gemm.cu).

It shares dequantization and the inner loop with the skinny GEMM (ggml_skinny_gemm.py). No value moves between threads
on its way from shared memory to the tensor cores. Scales multiply float32 sums of a block of columns. The sums of a
pair depend neither on the order in which blocks run nor on the other pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from meltcore.kernels.capability import capability, shared_memory_bytes, sm_count
from meltcore.kernels.launch import pdl_options
from meltcore.kernels.moe.align import Alignment, max_tiles
from meltcore.kernels.nvrtc import CudaKernel
from meltcore.kernels.quant.ggml import BlockType, GgmlTensor
from meltcore.kernels.quant.ggml_skinny_gemm import (
    MAX_WEIGHT_BYTES,
    MIN_CAPABILITY,
    THREADS,
    SkinnyConfig,
    is_decoded,
)

# Pairs per expert up to which it is faster than the body in Triton. Measured with Q8_0: at 16 pairs 245 us against 252
# on an H200 and 267 against 257 on an H100, at 24 pairs 303 against 270 on the latter.
MAX_PAIRS = 16
_MAX_TILES = 2048  # MAX_TILES of ggml_expert_gemm.cu
_STATIC_BYTES = 2 * _MAX_TILES + 32  # of shared memory beside the stages
_GATED = 1

_FILES = "ggml_bits", "ggml_tile", "ggml_expert_gemm"
KERNEL = CudaKernel([Path(__file__).with_name(f"{name}.cu") for name in _FILES], "ggml_expert_gemm")


class ExpertConfig(NamedTuple):
    """Says how pairs are divided among blocks.

    A tile of an expert's pairs has `token_tiles` times 8 pairs. Loads of the weight have `depth` stages.
    """

    token_tiles: int
    depth: int
    blocks_per_sm: int

    @property
    def block_m(self) -> int:
        """Pairs of a tile."""
        return 8 * self.token_tiles

    @property
    def tile(self) -> SkinnyConfig:
        """The skinny GEMM's configuration of the code that both kernels share."""
        return SkinnyConfig(self.token_tiles, 1, self.depth, self.blocks_per_sm, shared_tokens=True)

    def shared_bytes(self, block_type: BlockType) -> int:
        """Return the bytes of shared memory per block."""
        return self.tile.shared_bytes(block_type) + _STATIC_BYTES


def supports(hidden: torch.Tensor, pairs: int, weights: Sequence[GgmlTensor]) -> bool:
    """Return whether the kernel supports these tensors (16-bit tokens on CUDA) and is the fastest."""
    if not hidden.is_cuda or capability(hidden.device) < MIN_CAPABILITY:
        return False
    return (
        all(is_decoded(weight.type) for weight in weights)
        and pairs <= MAX_PAIRS * len(weights[0].values)
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.is_contiguous()
        and all(array.nbytes < MAX_WEIGHT_BYTES for weight in weights for array in weight.arrays)
        and max_tiles(pairs, len(weights[0].values), config_of(pairs, weights).block_m) <= _MAX_TILES
    )


def config_of(pairs: int, weights: Sequence[GgmlTensor]) -> ExpertConfig:
    """Select the configuration of the GEMMs with these weights [experts, rows, K], which share an alignment."""
    values = weights[0].values
    return select_config(pairs, len(values), [each.type for each in weights], shared_memory_bytes(values.device))


def select_config(pairs: int, experts: int, types: Sequence[BlockType], limit: int) -> ExpertConfig:
    """Select the configuration by the number of pairs of all experts together.

    An SM has `limit` bytes of shared memory.

    The tile size follows the mean number of pairs per expert, because a second tile of an expert decodes the weight
    again. It was measured with Q8_0 on an H200 (docs/decisions/quantized-weights.md). At 4 pairs per expert, tiles of 8
    are 2 % faster than tiles of 16. At 16 pairs, tiles of 32 are 14 % faster than tiles of 16. Three stages and two
    blocks per SM are best or within 3 % of the best.
    """
    mean = pairs / experts
    config = ExpertConfig(1 if mean <= 4 else 2 if mean <= 8 else 4, 3, 2)
    while max(config.shared_bytes(each) for each in types) * config.blocks_per_sm > limit:
        if config.depth > 2:
            config = config._replace(depth=2)
        elif config.blocks_per_sm > 1:
            config = config._replace(blocks_per_sm=1)
        else:
            config = config._replace(token_tiles=config.token_tiles // 2)
    return config


def ggml_expert_gemm(
    inputs: torch.Tensor,
    weight: GgmlTensor,
    output: torch.Tensor,
    *,
    alignment: Alignment,
    config: ExpertConfig,
    top_k: int,
    from_tokens: bool,
    gated: bool = False,
) -> None:
    """Multiply each pair by its expert's weight [experts, rows, K] and write the result to `output`, [pairs, N].

    The arguments are explained at `ggml_grouped_gemm`. `alignment` aligns the pairs to tiles of the config's block_m.
    Weights are not rounded.
    """
    rows, device = weight.values.shape[1], output.device
    tile, num_tiles = config.tile, len(alignment.expert_ids)
    groups = -(-rows // tile.block_rows)
    pdl = pdl_options(device)["PDL"]
    KERNEL.launch(
        (min(groups * num_tiles, sm_count(device) * config.blocks_per_sm),),
        THREADS,
        tile.macros(weight.type, weight.columns, inputs.dtype, pdl),
        [
            *(inputs, *weight.arrays, output, alignment.sorted_token_ids, alignment.expert_ids, alignment.num_valid),
            *(num_tiles, rows // 2 if gated else rows, weight.columns, output.stride(0), top_k if from_tokens else 1),
            _GATED * gated,
        ],
        device,
        shared_bytes=tile.shared_bytes(weight.type),
        pdl=pdl,
    )
