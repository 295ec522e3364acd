"""Multiplies few tokens by the block-quantized weights of their experts, in CUDA C++ (ggml_expert_gemv.cu).

It takes two launches: gate and up, then down, which for a single token also computes the weighted sum over its experts.
Both can normalize a single token and select its experts by the router's logits, which saves two launches. The grouped
GEMM (ggml_expert_gemm.py) needs an alignment first, and reads an expert's rows with too few blocks to keep the memory
busy. For one token of Qwen3-30B-A3B in Q8_0 on an H200 its two launches take 20 and 9 us. Reading the weights alone
takes 6 and 3 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from meltcore.kernels.capability import capability, shared_memory_bytes, sm_count
from meltcore.kernels.launch import pdl_options, use_triton
from meltcore.kernels.moe.routing import RouterLogits, Routing
from meltcore.kernels.norm import Norm
from meltcore.kernels.nvrtc import CudaKernel
from meltcore.kernels.quant.ggml import BlockType, Fp8Type, GgmlTensor
from meltcore.kernels.quant.ggml_skinny_gemm import (
    GATED,
    MAX_WEIGHT_BYTES,
    NORMALIZED,
    RESIDUAL,
    THREADS,
    SkinnyConfig,
    chunk_columns,
    has_small_decoder,
    is_decoded,
    min_capability,
)

MAX_TOKENS = 8  # 16 tokens take 125 us, and 122 in the grouped GEMM with its alignment (docs/decisions)
MAX_PAIRS = THREADS  # a thread of a block has a pair
_TILE_PAIRS, _SLOTS, _MAX_STAGED_TOKENS = 8, 8, 4
_WARP = 32  # threads; each has one selected expert, and the logits of up to 16 experts
_MAX_SELECTABLE = 16 * _WARP
_NORM_TOPK_PROB, _SHARED_EXPERT = 16, 32  # flags of a launch, beside those of the skinny GEMM

_FILES = "ggml_bits", "ggml_tile", "ggml_expert_gemv"
_PATHS = [Path(__file__).with_name(f"{name}.cu") for name in _FILES]
KERNEL, SUM_KERNEL = CudaKernel(_PATHS, "ggml_expert_gemv"), CudaKernel(_PATHS, "ggml_expert_sum")


def supports(hidden: torch.Tensor, pairs: int, weights: Sequence[GgmlTensor]) -> bool:
    """Return whether the kernels support these tensors: up to 16 tokens of a 16-bit type, on CUDA.

    hidden: [tokens, hidden_size]; weights: [experts, rows, K].
    """
    return (
        hidden.is_cuda
        and 1 <= hidden.shape[0] <= MAX_TOKENS
        and pairs <= MAX_PAIRS
        and all(capability(hidden.device) >= min_capability(weight.type) for weight in weights)
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.is_contiguous()
        and all(is_decoded(weight.type) for weight in weights)
        and all(array.nbytes < MAX_WEIGHT_BYTES for weight in weights for array in weight.arrays)
    )


def can_sum(hidden: torch.Tensor, pairs: int, gate_up: Sequence[GgmlTensor], down: GgmlTensor) -> bool:
    """Return whether `ggml_expert_gemv` for gate and up, and `ggml_expert_sum` for down, support a single token."""
    return (
        len(hidden) == 1
        and use_triton(hidden)
        and supports(hidden, pairs, (*gate_up, down))
        and sum_config(down.columns, down.type, shared_memory_bytes(hidden.device)) is not None
    )


def can_select(
    hidden: torch.Tensor, norm: Norm | None, pairs: int, gate_up: Sequence[GgmlTensor], down: GgmlTensor
) -> bool:
    """Return whether both kernels can normalize a single token and select its experts by `RouterLogits`."""
    limit = shared_memory_bytes(hidden.device)
    return (
        can_sum(hidden, pairs, gate_up, down)
        and (norm is None or norm.weight.dtype == hidden.dtype)
        and len(down.values) <= _MAX_SELECTABLE
        and pairs <= _WARP
        and all(select_config(1, each.columns, each.type, limit, from_tokens=True).staged_values for each in gate_up)
    )


def select_config(tokens: int, columns: int, block_type: BlockType, limit: int, *, from_tokens: bool) -> SkinnyConfig:
    """Select the configuration by the number of tokens and an expert's columns.

    An SM has `limit` bytes of shared memory.

    The largest of 4, 2 and 1 warps that divides a row's chunks evenly shares the row (measured with Q8_0 on an H200).
    """
    chunks = -(-columns // chunk_columns(block_type))
    column_warps = next(warps for warps in (4, 2, 1) if chunks % warps == 0)
    blocks_per_sm = 3 if has_small_decoder(block_type) else 2
    depth = 2 if from_tokens and tokens == 1 else 3
    config = SkinnyConfig(-(-tokens // _TILE_PAIRS), column_warps, depth, blocks_per_sm, shared_tokens=False)
    if from_tokens and tokens <= _MAX_STAGED_TOKENS:
        staging = config.staging(tokens, columns, block_type)
        if _fits(staging._replace(depth=2, blocks_per_sm=1), block_type, limit):
            config = staging
    while not _fits(config, block_type, limit):
        if config.depth > 2:
            config = config._replace(depth=config.depth - 1)
        else:
            config = config._replace(blocks_per_sm=config.blocks_per_sm - 1)
    return config


def sum_config(columns: int, block_type: BlockType, limit: int) -> SkinnyConfig | None:
    """Select the configuration of the weighted sum: a block per SM, of up to three warps per expert.

    Returns None if an SM's shared memory cannot hold the columns of the experts that a block processes together.
    """
    chunks = -(-columns // chunk_columns(block_type))
    configs = (
        SkinnyConfig(1, column_warps, 2, 1, shared_tokens=False, warps=_SLOTS * column_warps)
        for column_warps in (3, 2, 1)
        if chunks % column_warps == 0
    )
    staging = (config.staging(_SLOTS, columns, block_type) for config in configs)
    return next((config for config in staging if _fits(config, block_type, limit)), None)


def _fits(config: SkinnyConfig, block_type: BlockType, limit: int) -> bool:
    return config.blocks_per_sm * (config.shared_bytes(block_type) + static_bytes(config)) <= limit


def static_bytes(config: SkinnyConfig) -> int:
    """Return the bytes of a block's shared memory beside the stages."""
    sums = 2 * config.threads * 16 * config.token_tiles if config.column_warps > 1 else 32
    return sums + config.threads * (9 + _TILE_PAIRS * config.token_tiles) + 64


def ggml_expert_gemv(
    inputs: torch.Tensor,
    weight: GgmlTensor,
    output: torch.Tensor,
    *,
    routing: Routing | RouterLogits,
    from_tokens: bool,
    gated: bool = False,
    config: SkinnyConfig | None = None,
) -> None:
    """Multiply each pair by its expert's weight [experts, rows, K] and write the result to `output`, [pairs, N].

    `routing` holds logits only for a single token that `can_select` allows. The other arguments are explained at
    `ggml_grouped_gemm`. Weights are not rounded. If inputs are pairs, weights are read before the kernel that computed
    the inputs has ended. That kernel must be a launch of this function or a later launch, since the experts must be
    known.
    """
    tokens, rows, device = len(routing[0]), weight.values.shape[1], output.device
    pairs, norm = routing.pairs, routing.norm if isinstance(routing, RouterLogits) else None
    experts, flags = _selection(routing, weight)
    limit = shared_memory_bytes(device)
    config = config or select_config(tokens, weight.columns, weight.type, limit, from_tokens=from_tokens)
    assert config.staged_values or not isinstance(weight.type, Fp8Type), (
        "tokens in FP8 are quantized as they are staged"
    )
    outputs = rows // 2 if gated else rows
    items = min(pairs, tokens * len(weight.values)) * -(-rows // config.block_rows)
    pdl = pdl_options(device)["PDL"]
    KERNEL.launch(
        (min(items, sm_count(device) * config.blocks_per_sm),),
        config.threads,
        _macros(config, weight, inputs, pdl, experts, is_sum=False, is_early=not from_tokens),
        [
            *(inputs, *weight.arrays, output, routing[0], *(norm or (inputs, 0.0)), experts, pairs),
            *(outputs, weight.columns, output.stride(0), pairs // tokens if from_tokens else 1),
            GATED * gated | NORMALIZED * (norm is not None) | flags,
        ],
        device,
        shared_bytes=config.shared_bytes(weight.type),
        pdl=pdl,
    )


def ggml_expert_sum(
    residual: torch.Tensor | None,
    activated: torch.Tensor,
    weight: GgmlTensor,
    routing: Routing | RouterLogits,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """Return the weighted sum of one token's expert outputs, [1, rows]. Adds it to `residual` if that is given.

    activated: [top_k, K]; weight: [experts, rows, K]. Weights are read before the kernel that computed `activated` has
    ended. That kernel must be `ggml_expert_gemv` or a later launch, since the experts must be known.
    """
    (top_k, k), rows, device = activated.shape, weight.values.shape[1], activated.device
    output = activated.new_empty(1, rows) if residual is None else residual
    config = config or sum_config(k, weight.type, shared_memory_bytes(device))
    assert config is not None, "the caller asks can_sum"
    experts, flags = _selection(routing, weight)
    weights = routing.topk_weights if isinstance(routing, Routing) else activated  # unused
    pdl = pdl_options(device)["PDL"]
    SUM_KERNEL.launch(
        (min(-(-rows // 16), sm_count(device) * config.blocks_per_sm),),
        config.threads,
        _macros(config, weight, activated, pdl, experts, is_sum=True, is_early=True),
        [
            *(activated, *weight.arrays, output, routing[0], weights),
            *(experts, top_k, rows, k, RESIDUAL * (residual is not None) | flags),
        ],
        device,
        shared_bytes=config.shared_bytes(weight.type),
        pdl=pdl,
    )
    return output


def _selection(routing: Routing | RouterLogits, weight: GgmlTensor) -> tuple[int, int]:
    """Return the number of experts from which a kernel selects, and its flags. Both are 0 if experts are selected."""
    if isinstance(routing, Routing):
        return 0, 0
    flags = _NORM_TOPK_PROB * routing.norm_topk_prob | _SHARED_EXPERT * routing.shared_expert
    return len(weight.values) - routing.shared_expert, flags


def _macros(
    config: SkinnyConfig,
    weight: GgmlTensor,
    inputs: torch.Tensor,
    pdl: bool,
    experts: int,
    *,
    is_sum: bool,
    is_early: bool,
) -> tuple[tuple[str, int], ...]:
    macros = config.macros(weight.type, weight.columns, inputs.dtype, pdl)
    return (*macros, ("SUM", int(is_sum)), ("EARLY", int(is_early)), ("LOGITS", -(-experts // _WARP)))
