"""Routed experts with block-quantized weights: a grouped GEMM that decodes in registers, as in moe/grouped_gemm.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from meltcore.kernels.activation import swiglu
from meltcore.kernels.capability import shared_memory_bytes
from meltcore.kernels.gemm.split_k import GemmConfig, silu_and_mul
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.moe.grouped_gemm import INDIRECT_TOKENS, Dispatch, default_config, pairs_of_program
from meltcore.kernels.moe.routing import Routing, sort_by_expert
from meltcore.kernels.quant.ggml import GgmlTensor, dequantize_reference
from meltcore.kernels.quant.ggml_decode import block_k
from meltcore.kernels.quant.ggml_gemm import ggml_tile_matmul


@triton.jit(do_not_specialize=["tokens"])
def _ggml_grouped_gemm_kernel(
    input_ptr,
    values_ptr,
    scales_ptr,
    subscales_ptr,
    output_ptr,
    topk_ids_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    tokens,
    output_stride,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    FROM_TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program multiplies BLOCK_N of the ROWS rows of an expert's weight by up to BLOCK_M of the expert's pairs.

    FROM_TOKENS: inputs are tokens, otherwise pairs. GATED: gate and up rows alternate.
    """
    N: tl.constexpr = ROWS // 2 if GATED else ROWS
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    pdl_sync(PDL)
    # Pairs past the end are neither read nor written.
    expert, pair, valid, has_pairs = pairs_of_program(
        *(topk_ids_ptr, sorted_token_ids_ptr, expert_ids_ptr, num_valid_ptr, tokens, TOP_K, MAX_TOKENS, BLOCK_M, MODE)
    )
    if not has_pairs:
        return
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        rows = tl.minimum(row // 2, N - 1) + row % 2 * N
    else:
        rows = tl.minimum(row, N - 1)
    source = pair // TOP_K if FROM_TOKENS else pair
    acc = ggml_tile_matmul(
        values_ptr,
        scales_ptr,
        subscales_ptr,
        (expert.to(tl.int64) * ROWS + rows)[:, None],
        input_ptr + source.to(tl.int64)[:, None] * K,
        valid[:, None],
        0,
        (K + BLOCK_K - 1) // BLOCK_K,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        NUM_STAGES,
        FORMAT,
    )
    if BLOCK_N >= BLOCK_M:
        acc = tl.trans(acc)
    if GATED:
        acc = silu_and_mul(acc)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    output = output_ptr + pair.to(tl.int64)[:, None] * output_stride + column
    tl.store(output, acc, mask=valid[:, None] & (column < N))


def select_config(pairs: int, weight: GgmlTensor) -> GemmConfig:
    """Select the configuration for a number of pairs of all experts together and a weight [experts, rows, K].

    Tiles of pairs as for unquantized weights (`default_config`), tiles of columns as the format has them.
    """
    shared_bytes = shared_memory_bytes(weight.values.device)
    block_m = min(64, default_config(pairs, len(weight.values), 2, shared_bytes).block_m)
    width = block_k(weight)
    stage_bytes = 2 * block_m * width + 64 * (weight.values.shape[-1] * width // weight.columns + 16)
    return GemmConfig(block_m, 64, width, max(2, min(4, shared_bytes // 2 // stage_bytes)))


def ggml_grouped_gemm(
    inputs: torch.Tensor,
    weight: GgmlTensor,
    output: torch.Tensor,
    dispatch: Dispatch,
    config: GemmConfig,
    *,
    from_tokens: bool,
    gated: bool = False,
) -> None:
    """Multiply each pair by its expert's weight [experts, rows, K] and write the result to `output`, [pairs, N].

    from_tokens: inputs are tokens [tokens, K], otherwise pairs [pairs, K]. gated: the weight holds gate rows above up
    rows and the result is silu(gate) * up. Rows of `output` may be strided. The block_m of the config must be that of
    the alignment.
    """
    rows, (tokens, top_k) = weight.values.shape[1], dispatch.topk_ids.shape
    max_tokens = (
        triton.next_power_of_2(max(tokens, INDIRECT_TOKENS)) if dispatch.mode == "indirect" else INDIRECT_TOKENS
    )
    _ggml_grouped_gemm_kernel[(triton.cdiv(rows, config.block_n), dispatch.tiles)](
        inputs,
        *weight.arrays,
        output,
        dispatch.topk_ids,
        *(dispatch.alignment[1:4] if dispatch.alignment else (dispatch.topk_ids,) * 3),
        tokens,
        output.stride(0),
        ROWS=rows,
        K=weight.columns,
        TOP_K=top_k,
        MAX_TOKENS=max_tokens,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages,
        FORMAT=weight.type.name,
        MODE=dispatch.mode,
        FROM_TOKENS=from_tokens,
        GATED=gated,
        num_warps=config.num_warps,
        **pdl_options(inputs.device),
    )


def ggml_expert_outputs(
    hidden: torch.Tensor, routing: Routing, gate_up: Sequence[GgmlTensor], down: GgmlTensor
) -> torch.Tensor:
    """Compute the unweighted outputs of each token's experts, as `expert_outputs` does.

    [tokens, hidden_size] -> [tokens * top_k, hidden_size]. gate_up: one tensor [experts, 2 * width, hidden_size], gate
    rows above up rows, or those of gate and up, [experts, width, hidden_size]; down: [experts, hidden_size, width].
    """
    if not use_triton(hidden):
        return ggml_expert_outputs_reference(hidden, routing, gate_up, down)
    topk_ids = routing.topk_ids
    pairs, fused = topk_ids.numel(), len(gate_up) == 1
    outputs = hidden.new_empty(pairs, hidden.shape[1])
    if pairs == 0:
        return outputs
    configs = [select_config(pairs, weight) for weight in (*gate_up, down)]
    dispatch = Dispatch.of(topk_ids, down.values, configs[0].block_m)
    activated = hidden.new_empty(pairs, down.columns if fused else 2 * down.columns)
    for index, weight in enumerate(gate_up):
        columns = activated if fused else activated.chunk(2, 1)[index]
        ggml_grouped_gemm(hidden, weight, columns, dispatch, configs[index], from_tokens=True, gated=fused)
    activated = activated if fused else swiglu(activated)
    ggml_grouped_gemm(activated, down, outputs, dispatch, configs[-1], from_tokens=False)
    return outputs


def ggml_expert_outputs_reference(
    hidden: torch.Tensor, routing: Routing, gate_up: Sequence[GgmlTensor], down: GgmlTensor
) -> torch.Tensor:
    """Compute `ggml_expert_outputs` in a loop over the experts that have tokens, as its specification.

    One expert is dequantized at a time. The host reads the offsets, so it cannot be captured in a CUDA graph.
    """
    top_k = routing.topk_ids.shape[1]
    pairs, offsets = sort_by_expert(routing.topk_ids, len(down.values))
    outputs = torch.empty(len(pairs), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            own = pairs[start:end]
            dense = torch.cat([dequantize_reference(weight.rows(expert)) for weight in gate_up]).to(hidden.dtype)
            activated = swiglu(hidden[own // top_k] @ dense.t())
            outputs[own] = activated @ dequantize_reference(down.rows(expert)).to(hidden.dtype).t()
    return outputs
