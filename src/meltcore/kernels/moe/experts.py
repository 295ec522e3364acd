"""Computes the outputs of each token's top_k experts: the expert feed-forward.

In Triton it is three launches: a grouped GEMM with gate and up, one with down (moe/grouped_gemm.py), and the weighted
sum of a token's outputs (moe/combine.py). A single token takes two launches (moe/expert_gemv.py). Many pairs are
aligned first; their tokens are permuted (moe/grouped_gemm_tma.py), or read where they are (moe/grouped_gemm_wgmma.py).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from meltcore.kernels.activation import swiglu
from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.launch import use_triton
from meltcore.kernels.moe import expert_gemv, grouped_gemm_tma, grouped_gemm_wgmma
from meltcore.kernels.moe.combine import combine
from meltcore.kernels.moe.grouped_gemm import Dispatch, Mode, grouped_gemm, select_configs
from meltcore.kernels.moe.routing import Routing, sort_by_expert


def add_experts(
    residual: torch.Tensor | None,
    hidden: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    mode: Mode | None = None,
) -> torch.Tensor:
    """Add each token's float32 weighted sum of `expert_outputs` to `residual` in place and return `residual`.

    Without a residual the sum alone is returned. residual: [tokens, hidden_size], contiguous.
    """
    if mode is None and use_triton(hidden) and expert_gemv.supports(hidden, routing, gate_up, down):
        return expert_gemv.expert_gemv(residual, hidden, routing, gate_up, down)
    return combine(expert_outputs(hidden, routing, gate_up, down, mode=mode), routing.topk_weights, residual)


def expert_outputs(
    hidden: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    config: GemmConfig | None = None,
    mode: Mode | None = None,
) -> torch.Tensor:
    """Compute the unweighted outputs of each token's experts: down (silu(gate x) * up x) of each pair.

    The activation is stored in the type of `hidden`.

    Args:
        hidden: [tokens, hidden_size], contiguous.
        routing: the experts of each token.
        gate_up: [experts, 2 * width, hidden_size], gate rows above up rows.
        down: [experts, hidden_size, width].
        config: the configuration of the grouped GEMM. None selects one by size.
        mode: the mode of the grouped GEMM. None selects one by size.

    Returns [tokens * top_k, hidden_size].
    """
    if not use_triton(hidden):
        return expert_outputs_reference(hidden, routing, gate_up, down)
    (tokens, size), width, (topk_ids, _) = hidden.shape, down.shape[2], routing
    if config is None and mode is None:
        is_faster = grouped_gemm_wgmma.is_faster(topk_ids.numel(), len(down), width)
        if is_faster and grouped_gemm_wgmma.supports(hidden, gate_up, down):
            return grouped_gemm_wgmma.expert_outputs_wgmma(hidden, topk_ids, gate_up, down)
        if grouped_gemm_tma.supports(hidden, topk_ids, gate_up, down):
            return grouped_gemm_tma.expert_outputs_tma(hidden, topk_ids, gate_up, down)
    outputs = hidden.new_empty(topk_ids.numel(), size)
    if tokens:
        up_config, down_config = (config, config) if config else select_configs(topk_ids.numel(), gate_up, down)
        dispatch = Dispatch.of(topk_ids, down, up_config.block_m, mode)
        activated = hidden.new_empty(topk_ids.numel(), width)
        grouped_gemm(hidden, gate_up, activated, dispatch, config=up_config, gated=True)
        grouped_gemm(activated, down, outputs, dispatch, config=down_config, gated=False)
    return outputs


def expert_outputs_reference(
    hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute `expert_outputs` in a loop over the experts that have tokens, as its specification.

    The host reads the offsets, so this function cannot be captured in a CUDA graph.
    """
    tokens, top_k = routing.topk_ids.shape
    pairs, offsets = sort_by_expert(routing.topk_ids, gate_up.shape[0])
    outputs = torch.empty(tokens * top_k, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            expert_pairs = pairs[start:end]
            activated = swiglu(hidden[expert_pairs // top_k] @ gate_up[expert].t())
            outputs[expert_pairs] = activated @ down[expert].t()
    return outputs
