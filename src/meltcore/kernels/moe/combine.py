"""Adds the weighted sum of each token's expert outputs to the residual stream and applies the next layer's norm.

A single launch does this. For few tokens a separate norm would take the time of its launch. For many tokens a separate
norm would read the sums again from memory.
"""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, prefetch, use_triton
from meltcore.kernels.norm import Norm, normalize_rows, rms_norm

# Columns of a program: 8 elements per thread, 16 bytes in 16-bit types. With a norm it takes all columns.
_BLOCK = 1024
_ELEMENTS_PER_THREAD = 8
# Up to which a launch takes long beside its bytes. 16,384 tokens took 168 us, and 181 with early loads (H200).
_EARLY_TOKENS = 512


def combine(outputs: torch.Tensor, topk_weights: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return the float32 weighted sum of each token's outputs. If `residual` is given, the sum is added to it in place.

    Args:
        outputs: [tokens * top_k, hidden_size].
        topk_weights: [tokens, top_k] float32.
        residual: [tokens, hidden_size], contiguous, as is the result.
    """
    if not use_triton(outputs):
        return combine_reference(outputs, topk_weights, residual)
    return _launch(outputs, topk_weights, residual)[0]


def combine_add_rms_norm(
    residual: torch.Tensor, outputs: torch.Tensor, topk_weights: torch.Tensor, norm: Norm
) -> torch.Tensor:
    """Add the weighted sum of each token's outputs to `residual` in place. Returns norm(residual).

    The norm's weight is read before the previous kernel has ended, so that kernel must not write it.
    """
    if not use_triton(outputs):
        return rms_norm(combine_reference(outputs, topk_weights, residual), *norm)
    return _launch(outputs, topk_weights, residual, norm)[1]


def combine_reference(
    outputs: torch.Tensor, topk_weights: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `combine` in PyTorch, as its specification."""
    weighted_sum = (outputs.view(*topk_weights.shape, outputs.shape[1]).float() * topk_weights[:, :, None]).sum(1)
    return weighted_sum.to(outputs.dtype) if residual is None else residual.add_(weighted_sum)


@triton.jit
def _moe_combine_kernel(
    total_ptr,
    outputs_ptr,
    topk_weights_ptr,
    norm_ptr,
    normalized_ptr,
    eps,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program sums BLOCK columns of one token, expert by expert. HAS_RESIDUAL: `total` holds the residual.

    EARLY: operands that are not in the L2 cache are loaded before the wait for the previous kernel.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = columns < SIZE
    if HAS_NORM and EARLY:
        norm_weight = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    if EARLY and PDL:
        # The experts' weights have displaced what earlier kernels wrote from the L2 cache.
        prefetch(topk_weights_ptr + token * TOP_K)
        if HAS_RESIDUAL:
            LINES: tl.constexpr = (BLOCK + 63) // 64  # of 128 bytes in 16-bit types
            line = tl.program_id(1) * BLOCK + tl.arange(0, LINES) * 64
            prefetch(total_ptr + token * SIZE + tl.minimum(line, SIZE - 1))
    pdl_sync(PDL)
    total = tl.zeros((1, BLOCK), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        output = tl.load(outputs_ptr + pair * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(topk_weights_ptr + pair) * output
    offset = token * SIZE + columns
    if HAS_RESIDUAL:
        total += tl.load(total_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    total_rounded = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + offset, total_rounded, mask=mask)
    if HAS_NORM:
        if not EARLY:
            norm_weight = tl.load(norm_ptr + columns, mask=mask, other=0.0)
        normalized = normalize_rows(total_rounded.to(tl.float32), norm_weight, eps, total_rounded.dtype, SIZE)
        tl.store(normalized_ptr + offset, normalized, mask=mask)


def _launch(
    outputs: torch.Tensor, topk_weights: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel.

    Returns the sum, which replaces `residual` if it is given, and its norm if there is a `norm`.
    """
    tokens, size = len(topk_weights), outputs.shape[1]
    total = outputs.new_empty(tokens, size) if residual is None else residual
    normalized = torch.empty_like(total) if norm else total
    if tokens == 0:
        return total, normalized
    block = triton.next_power_of_2(size) if norm else _BLOCK
    norm_weight, eps = norm or (topk_weights, 0.0)
    _moe_combine_kernel[(tokens, triton.cdiv(size, block))](
        total,
        outputs,
        topk_weights,
        norm_weight,
        normalized,
        eps,
        SIZE=size,
        TOP_K=topk_weights.shape[1],
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        EARLY=tokens <= _EARLY_TOKENS,
        num_warps=min(16, max(1, block // (32 * _ELEMENTS_PER_THREAD))),
        **pdl_options(total.device),
    )
    return total, normalized
