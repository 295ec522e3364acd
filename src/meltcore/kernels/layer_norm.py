"""Residual addition and layer normalization (Ba et al. 2016, arXiv:1607.06450) in one pass, computed in float32.

The first layer's input of BERT is the norm of a sum of three embeddings.

Diffusion transformers modulate both with vectors of each row: AdaLN-zero (Peebles and Xie 2023, arXiv:2212.09748)
multiplies the added term by a gate, and scales and shifts the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

_COLUMNS_PER_WARP = 256
_MANY_TOKENS, _TOKENS_PER_PROGRAM = 1024, 4


def embed_layer_norm(
    tables: Sequence[torch.Tensor], indices: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the layer norm of the sum of a token's embeddings: [tokens, size] of the dtype of `weight`.

    Args:
        tables: embeddings of words, positions and types, each [rows, size], contiguous.
        indices: [3, tokens], contiguous: each token's row in each table.
        weight: [size].
        bias: [size].
        eps: added to the variance.
    """
    if not use_triton(weight):
        words, positions, types = (functional.embedding(*each) for each in zip(indices, tables, strict=True))
        return functional.layer_norm((words + positions + types).to(weight.dtype), weight.shape, weight, bias, eps)
    output = torch.empty(indices.shape[1], len(weight), dtype=weight.dtype, device=weight.device)
    if len(output):
        constants = _token_constants(output)
        _embed_layer_norm_kernel[(triton.cdiv(len(output), constants["TOKENS"]),)](
            *(*tables, indices, weight, bias, output, eps, len(output)), **constants
        )
    return output


def add_layer_norm(
    residual: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    keeps_sum: bool = True,
) -> torch.Tensor:
    """Add `added` to `residual` in place and return the layer norm of the sum.

    Args:
        residual: [..., size], contiguous. The result has the same shape and dtype.
        added: [..., size], contiguous, of the same dtype or a shorter one.
        weight: [size].
        bias: [size].
        eps: added to the variance.
        keeps_sum: whether `residual` has the sum afterwards. If not, the result may be written over it.
    """
    if not use_triton(residual):
        return functional.layer_norm(residual.add_(added), weight.shape, weight, bias, eps)
    if not (residual.is_contiguous() and added.is_contiguous()):
        raise ValueError("the residual and what is added to it must be contiguous")
    output = torch.empty_like(residual) if keeps_sum else residual
    if output.numel():
        constants, tokens = _token_constants(residual), residual.numel() // residual.shape[-1]
        _add_layer_norm_kernel[(triton.cdiv(tokens, constants["TOKENS"]),)](
            *(residual, added, weight, bias, output, eps, tokens), KEEPS_SUM=keeps_sum, **constants
        )
    return output


def modulated_layer_norm(hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """Return norm * (1 + scale) + shift, where norm is the layer norm of `hidden` without weights.

    The result is rounded once, to the dtype of `hidden`.

    Args:
        hidden: [rows, tokens, size], contiguous.
        scale: [rows or 1, size], rows of one contiguous table.
        shift: [rows or 1, size], rows of the same table.
        eps: added to the variance.
    """
    if not use_triton(hidden):
        return _modulated(hidden, scale, shift, eps)
    return _launch_modulated(hidden, hidden, None, scale, shift, eps)


def add_modulated_layer_norm(
    hidden: torch.Tensor,
    added: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Add gate * added to `hidden` in place and return `modulated_layer_norm` of the sum.

    The norm is computed from the sum after it was rounded to the dtype of `hidden`.

    Args:
        hidden: [rows, tokens, size], contiguous.
        added: [rows, tokens, size], contiguous, of the same dtype.
        gate: [rows or 1, size], rows of one contiguous table.
        scale: [rows or 1, size], rows of the same table.
        shift: [rows or 1, size], rows of the same table.
        eps: added to the variance.
    """
    if not use_triton(hidden):
        return _modulated(hidden.addcmul_(gate[:, None], added), scale, shift, eps)
    return _launch_modulated(hidden, added, gate, scale, shift, eps)


def _modulated(hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    normed = functional.layer_norm(hidden.float(), hidden.shape[-1:], eps=eps)
    return (normed * (1 + scale[:, None].float()) + shift[:, None].float()).to(hidden.dtype)


def _launch_modulated(
    hidden: torch.Tensor,
    added: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    if not (hidden.is_contiguous() and added.is_contiguous()):
        raise ValueError("the residual and what is added to it must be contiguous")
    rows, tokens, size = hidden.shape
    vectors = scale if gate is None else gate, scale, shift
    strides = {(vector.stride(0) if len(vector) > 1 else 0, vector.stride(1)) for vector in vectors}
    if len(strides) > 1 or {len(vector) for vector in vectors} - {1, rows}:
        raise ValueError(f"gate, scale and shift must be alike, of 1 or {rows} rows")
    [(row_stride, column_stride)] = strides
    if column_stride != 1 or row_stride % size:
        raise ValueError("gate, scale and shift must be rows of a contiguous table")
    output = torch.empty_like(hidden)
    if output.numel():
        _modulated_layer_norm_kernel[(tokens, rows)](
            *(hidden, added, *vectors, output, eps, row_stride // size), ADDS=gate is not None, **_constants(hidden)
        )
    return output


def _constants(hidden: torch.Tensor) -> dict[str, Any]:
    """Return the constants of a launch with one program per token."""
    block = triton.next_power_of_2(hidden.shape[-1])
    warps = max(1, min(16, block // _COLUMNS_PER_WARP))
    return {"SIZE": hidden.shape[-1], "BLOCK": block, "num_warps": warps, **pdl_options(hidden.device)}


def _token_constants(hidden: torch.Tensor) -> dict[str, Any]:
    """Return the constants of a launch with one token per program, or several of many tokens."""
    is_many = hidden.numel() // hidden.shape[-1] >= _MANY_TOKENS
    return _constants(hidden) | {"TOKENS": _TOKENS_PER_PROGRAM if is_many else 1}


@triton.jit
def _normalized(values, mask, eps, SIZE: tl.constexpr):
    """Return the layer norms of tokens [tokens, size] or of one token, float32, without weights."""
    centered = tl.where(mask, values - tl.sum(values, axis=-1, keep_dims=True) / SIZE, 0.0)
    return centered * tl.rsqrt(tl.sum(centered * centered, axis=-1, keep_dims=True) / SIZE + eps)


# Rows of modulations are whole vectors apart, so that each is aligned as the first is; one row for all is none apart.
@triton.jit(do_not_specialize=["vectors_per_row"])
def _modulated_layer_norm_kernel(
    hidden_ptr,
    added_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    output_ptr,
    eps,
    vectors_per_row,
    ADDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program normalizes one token, after rounding the sum as the residual stores it."""
    pdl_sync(PDL)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    row = tl.program_id(1).to(tl.int64)
    vector = row * vectors_per_row * SIZE + columns
    offset = (row * tl.num_programs(0) + tl.program_id(0)) * SIZE + columns
    hidden = tl.load(hidden_ptr + offset, mask=mask, other=0.0)
    if ADDS:
        gate = tl.load(gate_ptr + vector, mask=mask, other=0.0).to(tl.float32)
        total = hidden.to(tl.float32) + gate * tl.load(added_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        hidden = total.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + offset, hidden, mask=mask)
    scale = tl.load(scale_ptr + vector, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + vector, mask=mask, other=0.0).to(tl.float32)
    result = _normalized(hidden.to(tl.float32), mask, eps, SIZE) * (1.0 + scale) + shift
    tl.store(output_ptr + offset, result.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_layer_norm(values, weight_ptr, bias_ptr, output_ptr, eps, columns, offset, mask, SIZE: tl.constexpr):
    """Store the weighted layer norms of tokens [tokens, size] float32."""
    in_row = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    result = _normalized(values, in_row, eps, SIZE) * weight + bias
    tl.store(output_ptr + offset, result.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_layer_norm_kernel(
    residual_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    eps,
    num_tokens,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program normalizes TOKENS tokens, after rounding the sum as the residual stores it."""
    pdl_sync(PDL)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (tokens < num_tokens) & (columns < SIZE)
    offset = tokens * SIZE + columns
    total = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(added_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(residual_ptr.dtype.element_ty)
    if KEEPS_SUM:
        tl.store(residual_ptr + offset, rounded, mask=mask)
    _store_layer_norm(rounded.to(tl.float32), weight_ptr, bias_ptr, output_ptr, eps, columns, offset, mask, SIZE)


@triton.jit(do_not_specialize=["num_tokens"])
def _embed_layer_norm_kernel(
    words_ptr,
    positions_ptr,
    types_ptr,
    indices_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    eps,
    num_tokens,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program embeds TOKENS tokens."""
    pdl_sync(PDL)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    exists = tokens < num_tokens
    mask = exists & (columns < SIZE)
    word = tl.load(indices_ptr + tokens, mask=exists, other=0).to(tl.int64)
    position = tl.load(indices_ptr + num_tokens + tokens, mask=exists, other=0).to(tl.int64)
    kind = tl.load(indices_ptr + 2 * num_tokens + tokens, mask=exists, other=0).to(tl.int64)
    total = tl.load(words_ptr + word * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(positions_ptr + position * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(types_ptr + kind * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    offset = tokens * SIZE + columns
    _store_layer_norm(total, weight_ptr, bias_ptr, output_ptr, eps, columns, offset, mask, SIZE)
