"""Computes routed experts with block-quantized weights by a grouped GEMM that dequantizes in registers.

On CUDA, the kernels of ggml_expert_gemv.py serve few tokens, and ggml_expert_gemm.py serves few pairs per expert. With
many pairs per expert, the weights are dequantized first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch

from meltcore.kernels.activation import swiglu
from meltcore.kernels.capability import shared_memory_bytes
from meltcore.kernels.gemm.split_k import GemmConfig, silu_and_mul
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.moe.align import moe_align_block_size
from meltcore.kernels.moe.combine import combine
from meltcore.kernels.moe.grouped_gemm import Dispatch, default_config, pairs_of_program
from meltcore.kernels.moe.grouped_gemm_tma import WeightSlice, expert_outputs_of_slices, supports_shape
from meltcore.kernels.moe.routing import RouterLogits, Routing, sort_by_expert
from meltcore.kernels.quant import ggml_expert_gemm, ggml_expert_gemv
from meltcore.kernels.quant.ggml import GgmlTensor, dequantize_reference
from meltcore.kernels.quant.ggml_decode import block_k, dequantize
from meltcore.kernels.quant.ggml_gemm import ggml_tile_matmul
from meltcore.kernels.quant.ggml_linear import SLICE_VALUES

# Pairs per expert from which on dequantizing is faster: with Q8_0 and 128 experts of 768 x 2,048 from 280 on an H100,
# and by its numbers from 226 on an H200, whose memory is faster (docs/decisions/quantized-weights.md).
MIN_DEQUANTIZED_PAIRS = 256
# Of 16-bit tokens, up to which tiles of 32 pairs are faster than tiles of 64: 292 us against 332 at 28, 337 against 331
# at 32, with Q8_0 on an H100.
_MAX_PAIRS_IN_SMALL_TILES = 30
_Body = Literal["dequantized", "gemv", "cuda", "triton"]


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

    `block_m` is taken from `default_config`, but at most 64, or 32 for few pairs per expert. `block_k` follows from the
    format. Larger tiles have fewer stages, so that more programs run on an SM. On an H200, 64 pairs per expert took 563
    us with four stages and 468 us with two. On an H100, 16 pairs took 326 us in tiles of 64, and 257 us in tiles of 32
    with three stages.
    """
    shared_bytes = shared_memory_bytes(weight.values.device)
    block_m = min(64, default_config(pairs, len(weight.values), 2, shared_bytes).block_m)
    if block_m == 64 and pairs <= _MAX_PAIRS_IN_SMALL_TILES * len(weight.values):
        block_m = 32
    width = block_k(weight)
    stage_bytes = 2 * block_m * width + 64 * (weight.values.shape[-1] * width // weight.columns + 16)
    max_stages = {32: 3, 64: 2}.get(block_m, 4)
    stages = max(2, min(max_stages, shared_bytes // 2 // stage_bytes))
    return GemmConfig(block_m, 64, width, stages)


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

    With `from_tokens` inputs are tokens [tokens, K], otherwise pairs [pairs, K]. With `gated` the weight holds gate
    rows above up rows and the result is silu(gate) * up. Rows of `output` may be strided. The block_m of the config
    must be the alignment's.
    """
    rows = weight.values.shape[1]
    _ggml_grouped_gemm_kernel[(triton.cdiv(rows, config.block_n), dispatch.tiles)](
        inputs,
        *weight.arrays,
        output,
        *dispatch.arguments,
        output.stride(0),
        ROWS=rows,
        K=weight.columns,
        FORMAT=weight.type.name,
        FROM_TOKENS=from_tokens,
        GATED=gated,
        **dispatch.constants,
        **config.constants,
        **pdl_options(inputs.device),
    )


def _select_and_multiply(
    inputs: torch.Tensor,
    weight: GgmlTensor,
    output: torch.Tensor,
    *,
    dispatch: Dispatch,
    from_tokens: bool,
    gated: bool = False,
) -> None:
    config = select_config(len(output), weight)
    ggml_grouped_gemm(inputs, weight, output, dispatch, config, from_tokens=from_tokens, gated=gated)


def add_ggml_experts(
    residual: torch.Tensor | None,
    hidden: torch.Tensor,
    routing: Routing | RouterLogits,
    gate_up: Sequence[GgmlTensor],
    down: GgmlTensor,
) -> torch.Tensor:
    """Add each token's weighted sum of `ggml_expert_outputs` to `residual` in place and return `residual`.

    Without a residual the sum alone is returned. For one token, the kernel of down computes the sum. `routing` may be
    logits if `ggml_expert_gemv.can_select` allows them.
    """
    if ggml_expert_gemv.can_sum(hidden, routing.pairs, gate_up, down):
        multiply = partial(ggml_expert_gemv.ggml_expert_gemv, routing=routing)
        activated = _activate(hidden, routing.pairs, gate_up, multiply)
        return ggml_expert_gemv.ggml_expert_sum(residual, activated, down, routing)
    assert isinstance(routing, Routing), "the caller asks can_select"
    return combine(ggml_expert_outputs(hidden, routing, gate_up, down), routing.topk_weights, residual)


def ggml_expert_outputs(
    hidden: torch.Tensor, routing: Routing, gate_up: Sequence[GgmlTensor], down: GgmlTensor
) -> torch.Tensor:
    """Compute the unweighted outputs of each token's experts, as `expert_outputs` does.

    [tokens, hidden_size] -> [tokens * top_k, hidden_size]. `gate_up` is one tensor [experts, 2 * width, hidden_size],
    with gate rows above up rows, or two tensors [experts, width, hidden_size]. down: [experts, hidden_size, width].
    """
    if not use_triton(hidden):
        return ggml_expert_outputs_reference(hidden, routing, gate_up, down)
    topk_ids = routing.topk_ids
    pairs = topk_ids.numel()
    outputs = hidden.new_empty(pairs, hidden.shape[1])
    if pairs == 0:
        return outputs
    experts, body = len(down.values), select_body(hidden, pairs, gate_up, down)
    if body == "dequantized":
        return dequantized_expert_outputs(hidden, topk_ids, gate_up[0], down)
    multiply: Callable[..., None]
    if body == "gemv":
        multiply = partial(ggml_expert_gemv.ggml_expert_gemv, routing=routing)
    elif body == "cuda":
        config = ggml_expert_gemm.config_of(pairs, (*gate_up, down))
        alignment = moe_align_block_size(topk_ids, config.block_m, experts)
        multiply = partial(
            ggml_expert_gemm.ggml_expert_gemm, alignment=alignment, config=config, top_k=topk_ids.shape[1]
        )
    else:
        dispatch = Dispatch.of(topk_ids, down.values, select_config(pairs, down).block_m)
        multiply = partial(_select_and_multiply, dispatch=dispatch)
    multiply(_activate(hidden, pairs, gate_up, multiply), down, outputs, from_tokens=False)
    return outputs


def _activate(
    hidden: torch.Tensor, pairs: int, gate_up: Sequence[GgmlTensor], multiply: Callable[..., None]
) -> torch.Tensor:
    """Return silu(gate x) * up x of each pair, [pairs, width].

    `multiply` launches a GEMM: multiply(inputs, weight, output, from_tokens=, gated=).
    """
    if len(gate_up) == 1:
        rows = gate_up[0].values.shape[1]
        activated = hidden.new_empty(pairs, rows // 2)
        multiply(hidden, gate_up[0], activated, from_tokens=True, gated=True)
        return activated
    gate_and_up = hidden.new_empty(pairs, sum(weight.values.shape[1] for weight in gate_up))
    for weight, columns in zip(gate_up, gate_and_up.chunk(2, 1), strict=True):
        multiply(hidden, weight, columns, from_tokens=True)
    return swiglu(gate_and_up)


def select_body(hidden: torch.Tensor, pairs: int, gate_up: Sequence[GgmlTensor], down: GgmlTensor) -> _Body:
    """Return the fastest implementation that supports the tensors, by the number of pairs per expert."""
    if (
        pairs >= MIN_DEQUANTIZED_PAIRS * len(down.values)
        and len(gate_up) == 1
        and supports_shape(hidden, hidden.shape[1], down.columns)
    ):
        return "dequantized"
    if ggml_expert_gemv.supports(hidden, pairs, (*gate_up, down)):
        return "gemv"
    return "cuda" if ggml_expert_gemm.supports(hidden, pairs, (*gate_up, down)) else "triton"


def dequantized_expert_outputs(
    hidden: torch.Tensor, topk_ids: torch.Tensor, gate_up: GgmlTensor, down: GgmlTensor
) -> torch.Tensor:
    """Compute `ggml_expert_outputs` with dequantized weights, which are in memory for only some experts at a time."""
    scratch = hidden.new_empty(experts_scratch_values([gate_up], down))
    return expert_outputs_of_slices(
        *(hidden, topk_ids, _dequantized(gate_up, scratch), _dequantized(down, scratch)),
        (*down.values.shape[:2], down.columns),
    )


def experts_scratch_values(gate_up: Sequence[GgmlTensor], down: GgmlTensor) -> int:
    """Return how many values many tokens dequantize at a time, or 0. Tensors may be on the meta device."""
    if len(gate_up) > 1:
        return 0
    sizes = [(len(each.values), each.values.shape[1] * each.columns) for each in (*gate_up, down)]
    return max(experts_per_slice(experts, values) * values for experts, values in sizes)


def experts_per_slice(experts: int, values: int) -> int:
    """Return how many experts of `values` values are dequantized at a time, so that slices have about equal sizes."""
    slices = -(-experts // max(1, SLICE_VALUES // values))
    return -(-experts // slices)


def _dequantized(weight: GgmlTensor, scratch: torch.Tensor) -> Iterator[WeightSlice]:
    """Yield slices of dequantized experts. All slices use the same memory, since kernels on one stream run in order."""
    experts, rows = weight.values.shape[:2]
    count = experts_per_slice(experts, rows * weight.columns)
    for first in range(0, experts, count):
        part = weight.rows(slice(first, first + count))
        shape = (len(part.values) * rows, weight.columns)
        flat = GgmlTensor(part.type, part.columns, *(array.flatten(0, 1) for array in part.arrays))
        dense = dequantize(flat, scratch[: shape[0] * shape[1]].view(shape))
        yield WeightSlice(first, dense.view(-1, rows, weight.columns))


def ggml_expert_outputs_reference(
    hidden: torch.Tensor, routing: Routing, gate_up: Sequence[GgmlTensor], down: GgmlTensor
) -> torch.Tensor:
    """Reference of `ggml_expert_outputs`: a loop over the experts that have tokens.

    One expert is dequantized at a time. The host reads the offsets, so this function cannot be captured in a CUDA
    graph.
    """
    top_k = routing.topk_ids.shape[1]
    pairs, offsets = sort_by_expert(routing.topk_ids, len(down.values))
    outputs = torch.empty(len(pairs), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            expert_pairs = pairs[start:end]
            dense = torch.cat([dequantize_reference(weight.rows(expert)) for weight in gate_up]).to(hidden.dtype)
            activated = swiglu(hidden[expert_pairs // top_k] @ dense.t())
            outputs[expert_pairs] = activated @ dequantize_reference(down.rows(expert)).to(hidden.dtype).t()
    return outputs
