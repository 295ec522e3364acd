"""Computes the experts of one token in two launches, which take as long as reading the experts' weights.

The first launch computes silu(gate) * up, a few rows of one expert per program, in registers as in gemm/gemv.py. The
second launch applies down_proj. A program has the same few rows of every expert of the token and sums their outputs, so
the sum needs no launch of its own. The second launch loads its weights while the first still runs, and must know the
experts for this. So the first launch lets the second start only once the router's kernel has ended (see launch.py).
"""

from __future__ import annotations

import torch

from meltcore.kernels.gemm.gemv import K_MULTIPLE, MAX_K, GemvConfig, load_columns, silu
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_launch_dependents, pdl_options, pdl_sync, pdl_wait
from meltcore.kernels.moe.routing import Routing

# Weight elements that a thread holds: for down_proj the compiler would spill registers with more; for gate and up a
# second wave of programs would wait for the first (H200, docs/decisions/mixture-of-experts.md).
_UP_ELEMENTS, _UP_BLOCK_K, _UP_WARPS = 64, 1024, 2
_MAX_DOWN_ELEMENTS, _DOWN_BLOCK_K, _DOWN_WARPS, _MIN_PROGRAMS = 288, 512, 2, 256


def down_config(hidden_size: int, intermediate_size: int, top_k: int) -> GemvConfig | None:
    """Return the tile sizes of down_proj, or None if a thread cannot hold 8 elements (one load) of every expert."""
    block_k = min(_DOWN_BLOCK_K, intermediate_size & -intermediate_size)
    loads = top_k * (intermediate_size // block_k)
    warp_columns = hidden_size * block_k // 32  # elements of a load of every row, per thread of one warp
    fitting = [num_elements for num_elements in (32, 16, 8) if num_elements * loads <= _MAX_DOWN_ELEMENTS]
    if not fitting:
        return None
    elements = next(
        (num_elements for num_elements in fitting if warp_columns >= _MIN_PROGRAMS * num_elements), fitting[-1]
    )
    warps = _DOWN_WARPS if warp_columns >= _MIN_PROGRAMS * elements * _DOWN_WARPS else 1
    return GemvConfig(max(1, elements * 32 * warps // block_k), block_k, warps)


def supports(hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Return whether the kernels support these tensors.

    They need one token of a 16-bit type, rows that fit into registers, and 16-byte reads.
    """
    (tokens, size), width = hidden.shape, down.shape[2]
    return (
        tokens == 1
        and hidden.dtype == gate_up.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and size <= MAX_K
        and size % K_MULTIPLE == 0
        and width % K_MULTIPLE == 0
        and all(tensor.is_contiguous() for tensor in (hidden, gate_up, down))
        and down_config(size, width, routing.topk_ids.shape[1]) is not None
    )


@triton.jit
def _moe_gate_up_gemv_kernel(
    hidden_ptr,
    weight_ptr,
    output_ptr,
    topk_ids_ptr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK_N columns of silu(gate x) * up x of one of the token's experts."""
    pdl_wait(PDL)
    # Not before the wait: the dependent kernel may then read the experts.
    pdl_launch_dependents(PDL)
    k = tl.program_id(1)
    expert = tl.load(topk_ids_ptr + k).to(tl.int64)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)[None, :]
    # Rows past the end repeat the last one: cheaper than a mask on every load.
    gate_ptrs = weight_ptr + (expert * 2 * WIDTH + tl.minimum(row, WIDTH - 1))[:, None] * K + column
    gate_blocks = load_columns(gate_ptrs, K, BLOCK_K)
    up_blocks = load_columns(gate_ptrs + WIDTH * K, K, BLOCK_K)
    hidden_blocks = load_columns(hidden_ptr + column, K, BLOCK_K)
    gate_acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        hidden = hidden_blocks[step].to(tl.float32)
        gate_acc += gate_blocks[step].to(tl.float32) * hidden
        up_acc += up_blocks[step].to(tl.float32) * hidden
    result = silu(tl.sum(gate_acc, axis=1)) * tl.sum(up_acc, axis=1)
    tl.store(output_ptr + k * WIDTH + row, result, mask=row < WIDTH)


@triton.jit
def _moe_down_gemv_kernel(
    activated_ptr,
    weight_ptr,
    output_ptr,
    topk_ids_ptr,
    topk_weights_ptr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK_N columns of the weighted sum of all the token's experts.

    HAS_RESIDUAL: the output holds the residual, to which the sum is added.
    """
    STEPS: tl.constexpr = WIDTH // BLOCK_K
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)[None, :]
    offsets = tl.minimum(row, SIZE - 1)[:, None] * WIDTH + column
    weight_blocks = ()
    for k in tl.static_range(TOP_K):
        # Bypass the L1 cache, which may hold the experts of an earlier layer.
        expert = tl.load(topk_ids_ptr + k, cache_modifier=".cg").to(tl.int64)
        weight_blocks += load_columns(weight_ptr + expert * (SIZE * WIDTH) + offsets, WIDTH, BLOCK_K)
    pdl_sync(PDL)
    if HAS_RESIDUAL:
        residual = tl.load(output_ptr + row, mask=row < SIZE, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        topk_weight = tl.load(topk_weights_ptr + k)
        for step in tl.static_range(STEPS):
            activated = tl.load(activated_ptr + k * WIDTH + step * BLOCK_K + column).to(tl.float32)
            acc += weight_blocks[k * STEPS + step].to(tl.float32) * (activated * topk_weight)
    result = tl.sum(acc, axis=1)
    if HAS_RESIDUAL:
        result += residual.to(tl.float32)
    tl.store(output_ptr + row, result, mask=row < SIZE)


def expert_gemv(
    residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the token's expert outputs [1, hidden_size]. Adds it to `residual` if that is given.

    The kernel that wrote `routing` must be the previous one, or have ended. hidden: [1, hidden_size]; gate_up:
    [experts, 2 * width, hidden_size]; down: [experts, hidden_size, width]. An expert's output is not rounded.
    """
    (_, size, width), top_k = down.shape, routing.topk_ids.shape[1]
    output = torch.empty_like(hidden) if residual is None else residual
    activated = torch.empty(top_k, width, dtype=hidden.dtype, device=hidden.device)
    rows = max(1, _UP_ELEMENTS * 32 * _UP_WARPS // (2 * triton.next_power_of_2(size)))
    _moe_gate_up_gemv_kernel[(triton.cdiv(width, rows), top_k)](
        hidden,
        gate_up,
        activated,
        routing.topk_ids,
        WIDTH=width,
        K=size,
        BLOCK_N=rows,
        BLOCK_K=min(_UP_BLOCK_K, size & -size),
        num_warps=_UP_WARPS,
        **pdl_options(hidden.device),
    )
    config = down_config(size, width, top_k)
    if config is None:
        raise ValueError(f"{top_k} experts of width {width} are more than a program can hold")
    _moe_down_gemv_kernel[(triton.cdiv(size, config.block_n),)](
        activated,
        down,
        output,
        routing.topk_ids,
        routing.topk_weights,
        SIZE=size,
        WIDTH=width,
        TOP_K=top_k,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HAS_RESIDUAL=residual is not None,
        num_warps=config.num_warps,
        **pdl_options(hidden.device),
    )
    return output
