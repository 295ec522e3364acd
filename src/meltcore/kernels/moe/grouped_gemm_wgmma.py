"""Grouped GEMM of experts on Hopper GPUs in CUDA C++ (grouped_gemm_wgmma.cu).

It computes the same as grouped_gemm_tma.py, with three optimizations that Triton cannot express. Threads that only load
copy each row of a tile from its pair's token, so tokens are not permuted first. One warp group multiplies while the
other stores. The second half of a tile is skipped if it has no pairs, which halves the work of experts with up to 64
pairs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.moe.align import max_tiles, moe_align_block_size
from meltcore.kernels.nvrtc import INSTRUCTIONS, WGMMA, CudaKernel
from meltcore.kernels.tensor_map import tensor_map

KERNEL = CudaKernel(
    [INSTRUCTIONS, WGMMA, Path(__file__).with_name("grouped_gemm_wgmma.cu")], "moe_grouped_gemm_wgmma", suffix="a"
)
SHARED_BYTES = 227 * 1024
BLOCK_M = 128  # pairs of a tile
CAPABILITY = 90
THREADS = 3 * 128
BLOCK_N, GATE_ROWS = 256, 128  # rows of a weight's tile; its gate rows
COPY_ROWS = 128  # of a weight, of one copy by TMA
_BLOCK_K, _COPY_PAIRS = 64, 64  # columns of a tile; rows of pairs of one copy
_NUM_STAGES = 4
_MAX_TOKEN_BYTES = 2**32  # offsets of tokens have 32 bits
# Per expert: with more pairs, grouped_gemm_tma.py is as fast or faster for experts wider than _MAX_NARROW (H200,
# docs/decisions/mixture-of-experts.md).
_MIN_PAIRS, _MAX_PAIRS_WIDE, _MAX_NARROW = 64, 128, 256


def supports(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Return whether the kernel supports these tensors: on Hopper, in bfloat16, of sizes that tiles divide.

    hidden: [tokens, hidden_size]; gate_up: [experts, 2 * width, hidden_size]; down: [experts, hidden_size, width].
    """
    size, width = down.shape[1:]
    return (
        hidden.is_cuda
        and capability(hidden.device) == CAPABILITY
        and all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in (hidden, gate_up, down))
        and size % BLOCK_N == 0
        and width % GATE_ROWS == 0
        and hidden.nbytes <= _MAX_TOKEN_BYTES
    )


def is_faster(num_pairs: int, num_experts: int, width: int) -> bool:
    """Return whether the kernel is the fastest for these experts and this number of pairs."""
    max_pairs = num_pairs + 1 if width <= _MAX_NARROW else _MAX_PAIRS_WIDE * num_experts
    return _MIN_PAIRS * num_experts <= num_pairs < max_pairs


@cache
def kernel_macros(
    columns: int,
    n_tiles: int,
    top_k: int,
    *,
    gated: bool,
    is_fp8: bool = False,
    is_dense: bool = False,
    has_residual: bool = False,
) -> tuple[tuple[str, int], ...]:
    """Return the constants that the kernel is compiled with."""
    return (
        ("K", columns),
        ("N_TILES", n_tiles),
        ("GATED", int(gated)),
        ("TOP_K", top_k),
        ("NUM_STAGES", _NUM_STAGES),
        ("SHARED_BYTES", SHARED_BYTES),
        ("FP8", int(is_fp8)),
        ("DENSE", int(is_dense)),
        ("RESIDUAL", int(has_residual)),
    )


def expert_outputs_wgmma(
    hidden: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute the unweighted outputs of each token's experts, for tensors that `supports` allows.

    Returns [tokens * top_k, hidden_size]: down (silu(gate x) * up x) of each pair. Arguments as in `expert_outputs`.
    """
    top_k, (num_experts, size, width), device = topk_ids.shape[1], down.shape, hidden.device
    alignment = moe_align_block_size(topk_ids, BLOCK_M, num_experts)
    activated = hidden.new_empty(max_tiles(topk_ids.numel(), num_experts, BLOCK_M) * BLOCK_M, width)
    outputs = hidden.new_empty(topk_ids.numel(), size)
    activated_map = tensor_map(activated, _BLOCK_K, _COPY_PAIRS, swizzled=True)
    for weight, target, macros in (
        (gate_up, activated, kernel_macros(size, width // GATE_ROWS, top_k, gated=True)),
        (down, outputs, kernel_macros(width, size // BLOCK_N, 1, gated=False)),
    ):
        weight_map = tensor_map(weight.flatten(0, 1), _BLOCK_K, COPY_ROWS, swizzled=True)
        tensors = [weight_map, activated_map, hidden, target, *alignment[1:]]
        KERNEL.launch((sm_count(device),), THREADS, macros, tensors, device, shared_bytes=SHARED_BYTES, pdl=True)
    return outputs
