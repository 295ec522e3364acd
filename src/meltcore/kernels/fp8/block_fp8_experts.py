"""Routed experts with FP8 weights that have a scale per block or per row: a grouped GEMM, as in moe/grouped_gemm.py."""

from __future__ import annotations

from itertools import pairwise

import torch

from meltcore.kernels.activation import swiglu
from meltcore.kernels.fp8 import block_fp8_wgmma
from meltcore.kernels.fp8.block_fp8 import BLOCK, BlockFp8Tensor, quantize_tokens
from meltcore.kernels.fp8.block_fp8_gemm import scaled_tile_matmul
from meltcore.kernels.fp8.fp8 import FP8_CAPABILITY
from meltcore.kernels.gemm.split_k import GemmConfig, silu_and_mul
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.moe.combine import combine
from meltcore.kernels.moe.grouped_gemm import Dispatch, pairs_of_program
from meltcore.kernels.moe.routing import RouterLogits, Routing, sort_by_expert
from meltcore.kernels.quant import ggml_expert_gemv
from meltcore.kernels.quant.ggml_experts import add_ggml_experts

MIN_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
_FEW_PAIRS = 0.5  # per expert: so few programs leave shared memory for another stage


@triton.jit(do_not_specialize=["tokens"])
def _block_fp8_grouped_gemm_kernel(
    input_ptr,
    input_scales_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    topk_ids_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    tokens,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MODE: tl.constexpr,
    FROM_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program multiplies BLOCK_N of the ROWS rows of an expert's weight by up to BLOCK_M of the expert's pairs.

    FROM_TOKENS: inputs are tokens, gate and up rows alternate, and the result is silu(gate) * up. Otherwise inputs are
    pairs.
    """
    N: tl.constexpr = ROWS // 2 if FROM_TOKENS else ROWS
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if FROM_TOKENS else BLOCK_N
    pdl_sync(PDL)
    # Pairs past the end are neither read nor written.
    expert, pair, valid, has_pairs = pairs_of_program(
        *(topk_ids_ptr, sorted_token_ids_ptr, expert_ids_ptr, num_valid_ptr, tokens, TOP_K, MAX_TOKENS, BLOCK_M, MODE)
    )
    if not has_pairs:
        return
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if FROM_TOKENS:
        weight_rows = tl.minimum(row // 2, N - 1) + row % 2 * N
    else:
        weight_rows = tl.minimum(row, N - 1)
    pair = tl.where(valid, pair, 0)
    source = (pair // TOP_K if FROM_TOKENS else pair).to(tl.int64)
    expert_scales_ptr = scales_ptr + expert.to(tl.int64) * (ROWS // ROW_GROUP * COLUMN_BLOCKS)
    # Rows of a tile share their scales if it lies in one group; of gate and up that alternate, each does.
    IN_GROUP: tl.constexpr = ROW_GROUP % OUTPUTS == 0 and N % OUTPUTS == 0 and N % ROW_GROUP == 0
    if IN_GROUP:
        row_scales_ptr = expert_scales_ptr + tl.program_id(0) * OUTPUTS // ROW_GROUP * COLUMN_BLOCKS
    else:
        row_scales_ptr = expert_scales_ptr + weight_rows // ROW_GROUP * COLUMN_BLOCKS
    acc = scaled_tile_matmul(
        *(weight_ptr + (expert.to(tl.int64) * ROWS + weight_rows)[:, None] * K, row_scales_ptr),
        *(input_ptr + source[:, None] * K, input_scales_ptr + source * COLUMN_BLOCKS, valid[:, None]),
        *(0, (K + BLOCK_K - 1) // BLOCK_K, K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES),
        *(COLUMN_BLOCKS > 1, N // ROW_GROUP * COLUMN_BLOCKS if FROM_TOKENS and IN_GROUP else 0, True),
    )
    if BLOCK_N >= BLOCK_M:
        acc = tl.trans(acc)
    if FROM_TOKENS:
        acc = silu_and_mul(acc)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    tl.store(output_ptr + pair.to(tl.int64)[:, None] * N + column, acc, mask=valid[:, None] & (column < N))


def select_config(pairs: int, weight: BlockFp8Tensor, *, from_tokens: bool) -> GemmConfig:
    """Select the configuration for `pairs` pairs of all experts together and a weight [experts, rows, K].

    Smaller tiles leave shared memory for several programs of an SM: one multiplies while another applies scales. The
    sizes won sweeps at 4 to 256 tokens of Qwen3-30B-A3B on an H200 (docs/decisions/quantized-weights.md). `block_m`
    does not depend on `from_tokens`, which is explained at `block_fp8_grouped_gemm`.
    """
    mean = pairs / len(weight.values)
    stages = 4 if from_tokens and mean <= _FEW_PAIRS else 3
    return GemmConfig(16 if mean <= 8 else 32 if mean <= 16 else 64, 128, BLOCK, stages)


def block_fp8_grouped_gemm(
    inputs: BlockFp8Tensor,
    weight: BlockFp8Tensor,
    output: torch.Tensor,
    dispatch: Dispatch,
    config: GemmConfig,
    *,
    from_tokens: bool,
) -> None:
    """Multiply each pair by its expert's weight, [experts, rows, K], and write the result to `output`.

    Args:
        inputs: tokens [tokens, K] if `from_tokens`, otherwise pairs [pairs, K].
        weight: [experts, rows, K].
        output: [pairs, rows], or [pairs, rows / 2] if `from_tokens`.
        dispatch: the pairs of the step, aligned to tiles of `config.block_m` pairs.
        config: the tile configuration.
        from_tokens: whether the weight holds gate rows above up rows, and the result is silu(gate) * up. In the tile
            that a program loads, gate and up rows alternate.
    """
    rows, k = weight.values.shape[1:]
    _block_fp8_grouped_gemm_kernel[(triton.cdiv(rows, config.block_n), dispatch.tiles)](
        *inputs,
        *weight,
        output,
        *dispatch.arguments,
        ROWS=rows,
        K=k,
        ROW_GROUP=weight.row_group,
        COLUMN_BLOCKS=weight.scales.shape[2],
        FROM_TOKENS=from_tokens,
        **dispatch.constants,
        **config.constants,
        **pdl_options(output.device),
    )


def add_block_fp8_experts(
    residual: torch.Tensor | None,
    hidden: torch.Tensor,
    routing: Routing | RouterLogits,
    gate_up: BlockFp8Tensor,
    down: BlockFp8Tensor,
) -> torch.Tensor:
    """Add each token's weighted sum of `block_fp8_expert_outputs` to `residual` in place and return `residual`.

    Without a residual the weighted sum alone is returned. A single token is computed by the kernels of block-quantized
    weights, which quantize its inputs to the same values. `routing` may be logits if `ggml_expert_gemv.can_select`
    allows them.
    """
    up_bytes, down_bytes = gate_up.as_bytes(), down.as_bytes()
    if up_bytes and down_bytes and ggml_expert_gemv.can_sum(hidden, routing.pairs, [up_bytes], down_bytes):
        return add_ggml_experts(residual, hidden, routing, [up_bytes], down_bytes)
    assert isinstance(routing, Routing), "the caller asks can_select"
    return combine(block_fp8_expert_outputs(hidden, routing, gate_up, down), routing.topk_weights, residual)


def block_fp8_expert_outputs(
    hidden: torch.Tensor, routing: Routing, gate_up: BlockFp8Tensor, down: BlockFp8Tensor
) -> torch.Tensor:
    """Compute the unweighted outputs of each token's experts, as `expert_outputs` does.

    The inputs of a weight are quantized as the weight's columns are: in blocks, or per token.

    Args:
        hidden: [tokens, hidden_size].
        routing: the experts of each token.
        gate_up: [experts, 2 * width, hidden_size], gate rows above up rows.
        down: [experts, hidden_size, width].

    Returns [tokens * top_k, hidden_size].
    """
    if not use_triton(hidden):
        return block_fp8_expert_outputs_reference(hidden, routing, gate_up, down)
    topk_ids = routing.topk_ids
    pairs = topk_ids.numel()
    outputs = hidden.new_empty(pairs, hidden.shape[1])
    if pairs == 0:
        return outputs
    if (
        pairs >= block_fp8_wgmma.MIN_PAIRS * len(down.values)
        and block_fp8_wgmma.supports(hidden, gate_up, gated=True)
        and block_fp8_wgmma.supports(hidden, down, gated=False)
    ):
        return block_fp8_wgmma.expert_outputs(hidden, topk_ids, gate_up, down)
    dispatch = Dispatch.of(topk_ids, down.values, select_config(pairs, down, from_tokens=False).block_m)
    activated = hidden.new_empty(pairs, down.values.shape[2])
    for inputs, weight, target in ((hidden, gate_up, activated), (activated, down, outputs)):
        from_tokens = weight is gate_up
        config = select_config(pairs, weight, from_tokens=from_tokens)
        quantized = quantize_tokens(inputs, weight)
        block_fp8_grouped_gemm(quantized, weight, target, dispatch, config, from_tokens=from_tokens)
    return outputs


def block_fp8_expert_outputs_reference(
    hidden: torch.Tensor, routing: Routing, gate_up: BlockFp8Tensor, down: BlockFp8Tensor
) -> torch.Tensor:
    """Compute `block_fp8_expert_outputs` in a loop over the experts that have tokens, as its specification.

    One expert is dequantized at a time. The host reads the offsets, so this function cannot be captured in a CUDA
    graph.
    """
    top_k = routing.topk_ids.shape[1]
    pairs, offsets = sort_by_expert(routing.topk_ids, len(down.values))
    outputs = torch.empty(len(pairs), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    tokens = quantize_tokens(hidden, gate_up).dequantize()
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            expert_pairs = pairs[start:end]
            activated = swiglu(tokens[expert_pairs // top_k] @ _expert(gate_up, expert).t()).to(hidden.dtype)
            inputs = quantize_tokens(activated, down).dequantize()
            outputs[expert_pairs] = (inputs @ _expert(down, expert).t()).to(hidden.dtype)
    return outputs


def _expert(weight: BlockFp8Tensor, expert: int) -> torch.Tensor:
    return BlockFp8Tensor(weight.values[expert], weight.scales[expert]).dequantize()
