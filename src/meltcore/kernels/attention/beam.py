"""Computes the decode attention of a beam search: over the prefixes of beams, and over the source that beams share.

Beams of a sentence share most of their prefixes. So keys and values are never copied. A table holds, for each beam and
position, the beam whose entry is read. One program reads every entry of a sentence and head once, for all beams.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

_BLOCK_BYTES, _WARPS, _STAGES = 128, 4, 2  # entries of a block, times the bytes of a number
_MIN_DOT = 16  # the smallest tile of tl.dot, in beams and in head_dim


def beam_self_attention(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    num_positions: int,
) -> torch.Tensor:
    """Write the keys and values of new tokens, and attend to the prefixes that end with these tokens.

    Args:
        qkv: [rows, beams, 3, heads, head_dim], contiguous.
        cache: [2, slots, heads, length, beams, head_dim], contiguous, written in place.
        writers: [slots, beams, length] int8, contiguous: the beam that wrote each position before the new token.
        slots: [rows] int64, the slots of the new tokens. A slot may occur twice only if its result is not used.
        positions: [rows] int64, the positions of the new tokens.
        num_positions: an upper bound of positions + 1, which only the reference reads.

    Returns [rows, beams, heads * head_dim].
    """
    if not use_triton(qkv):
        return beam_self_attention_reference(qkv, cache, writers, slots, positions, num_positions)
    return _launch(qkv, cache, writers, slots, positions, is_self=True)


def beam_cross_attention(
    query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, num_positions: int
) -> torch.Tensor:
    """Attend from the beams of each row to the source in the row's slot.

    Args:
        query: [rows, beams, heads, head_dim], contiguous.
        cache: [2, slots, heads, source positions, head_dim], contiguous.
        slots: [rows] int64.
        lengths: [rows] int64, the number of positions of each source, at least 1.
        num_positions: an upper bound of the lengths, which only the reference reads.

    Returns [rows, beams, heads * head_dim].
    """
    if not use_triton(query):
        return beam_cross_attention_reference(query, cache, slots, lengths, num_positions)
    return _launch(query, cache, lengths, slots, lengths, is_self=False)


def beam_self_attention_reference(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    num_positions: int,
) -> torch.Tensor:
    """Compute `beam_self_attention` in PyTorch, as its specification."""
    beams = torch.arange(qkv.shape[1], device=qkv.device)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [rows, heads, beams, head_dim]
    cache[0][slots, :, positions] = key
    cache[1][slots, :, positions] = value
    keys, values = cache[:, :, :, :num_positions][:, slots].flatten(3, 4)
    columns = torch.arange(num_positions, device=qkv.device)
    is_new = (columns == positions[:, None])[:, None]
    writing_beam = torch.where(is_new, beams[:, None], writers[:, :, :num_positions][slots])
    is_read = (writing_beam[..., None] == beams) & (columns <= positions[:, None])[:, None, :, None]
    attended = functional.scaled_dot_product_attention(query, keys, values, is_read.flatten(2)[:, None])
    return attended.transpose(1, 2).flatten(2)


def beam_cross_attention_reference(
    query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, num_positions: int
) -> torch.Tensor:
    """Compute `beam_cross_attention` in PyTorch, as its specification."""
    keys, values = cache[:, :, :, :num_positions][:, slots]
    mask = (torch.arange(num_positions, device=query.device) < lengths[:, None])[:, None, None]
    attended = functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, mask)
    return attended.transpose(1, 2).flatten(2)


def _launch(
    query: torch.Tensor,
    cache: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    is_self: bool,
) -> torch.Tensor:
    """Launch the kernel. It reads `lengths` positions of the cache, and `writers` only with is_self."""
    rows, beams, heads, head_dim = query.shape[0], query.shape[1], query.shape[-2], query.shape[-1]
    if not all(each.is_contiguous() for each in (query, cache, writers)):
        raise ValueError("queries, cache and writers of beams must be contiguous")
    output = torch.empty(rows, beams, heads * head_dim, dtype=query.dtype, device=query.device)
    if rows == 0:
        return output
    options: dict[str, Any] = {
        "BEAMS": beams,
        "HEAD_DIM": head_dim,
        "BEAM_TILE": max(_MIN_DOT, triton.next_power_of_2(beams)),
        "DIM_TILE": max(_MIN_DOT, triton.next_power_of_2(head_dim)),
        "BLOCK": _BLOCK_BYTES // query.dtype.itemsize,
        "SELF": is_self,
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    }
    _beam_attention_kernel[(rows, heads)](
        *(query, cache, writers, slots, lengths, output),
        *(1 / math.sqrt(head_dim), cache.stride(0), cache.stride(1), cache.stride(2), cache.shape[3]),
        **options,
        **pdl_options(query.device),
    )
    return output


@triton.jit(do_not_specialize=["length"])
def _beam_attention_kernel(
    query_ptr,
    cache_ptr,
    writers_ptr,
    slots_ptr,
    lengths_ptr,
    output_ptr,
    scale,
    value_stride,
    slot_stride,
    head_stride,
    length,
    BEAMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BEAM_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SELF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program attends with all beams of one row in one head: online softmax over blocks of cached entries.

    SELF: entries are [position, beam], of which a beam reads those of its writers; the new token's own key and value
    begin the softmax and are written to the cache. Otherwise an entry is a position, read by all beams.
    """
    pdl_sync(PDL)
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot, cached = tl.load(slots_ptr + row), tl.load(lengths_ptr + row).to(tl.int32)
    beam, dim = tl.arange(0, BEAM_TILE)[:, None], tl.arange(0, DIM_TILE)[None, :]
    is_beam = beam < BEAMS
    in_tile = is_beam & (dim < HEAD_DIM)
    size = heads * HEAD_DIM
    token_size = 3 * size if SELF else size
    offset = (row * BEAMS + beam) * token_size + head * HEAD_DIM + dim
    query = tl.load(query_ptr + offset, mask=in_tile, other=0.0)
    keys_ptr = cache_ptr + slot * slot_stride + head * head_stride
    values_ptr = keys_ptr + value_stride
    if SELF:
        key = tl.load(query_ptr + offset + size, mask=in_tile, other=0.0)
        value = tl.load(query_ptr + offset + 2 * size, mask=in_tile, other=0.0)
        new = (cached * BEAMS + beam) * HEAD_DIM + dim
        tl.store(keys_ptr + new, key, mask=in_tile)
        tl.store(values_ptr + new, value, mask=in_tile)
        maximum = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale
        total = tl.full((BEAM_TILE,), 1.0, tl.float32)
        attended = value.to(tl.float32)
        entries = cached * BEAMS
    else:
        maximum = tl.full((BEAM_TILE,), -float("inf"), tl.float32)
        total = tl.zeros((BEAM_TILE,), tl.float32)
        attended = tl.zeros((BEAM_TILE, DIM_TILE), tl.float32)
        entries = cached
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        is_entry = entry < entries
        tile = is_entry[:, None] & (dim < HEAD_DIM)
        keys = tl.load(keys_ptr + entry[:, None] * HEAD_DIM + dim, mask=tile, other=0.0)
        values = tl.load(values_ptr + entry[:, None] * HEAD_DIM + dim, mask=tile, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        is_read = tl.broadcast_to(is_entry[None, :], (BEAM_TILE, BLOCK))
        if SELF:
            column = slot * BEAMS * length + beam * length + (entry // BEAMS)[None, :]
            writer = tl.load(writers_ptr + column, mask=is_beam & is_read, other=-1)
            is_read = writer.to(tl.int32) == (entry % BEAMS)[None, :]
        scores = tl.where(is_read, scores, -float("inf"))
        # A block may hold no entry of a beam. Padding of the tile reads no entry at all in self-attention.
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        rescale = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum[:, None])
        total = total * rescale + tl.sum(weights, axis=1)
        attended = attended * rescale[:, None]
        attended += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = new_maximum
    out = (row * BEAMS + beam) * size + head * HEAD_DIM + dim
    tl.store(output_ptr + out, (attended / total[:, None]).to(output_ptr.dtype.element_ty), mask=in_tile)
