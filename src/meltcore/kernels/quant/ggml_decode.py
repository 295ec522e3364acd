"""Decodes block-quantized tiles in registers, and dequantizes whole rows: the decoders of every ggml kernel.

A word of a 4-bit format holds 8 columns. A tile is decoded into 8 planes. Plane p holds the p-th column of each of 32
words, and these columns are 32 neighbors in one block. A matmul sums over columns in any order. So planes are
multiplied one after the other by the same columns of the tokens, and no value moves between threads. Q8_0 has one
plane.

All decoders compute in float32, exactly as the references do, and round once, to the type of the tokens. One
instruction isolates the bits of 4 values in a word, and one more per value converts a byte to float32. Signed values
are stored such that their bits, shifted to the top of a byte, are an int8 that is a multiple of the value.
"""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.quant.ggml import GgmlTensor, dequantize_reference
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.int4 import CHUNK

# Masks of each byte of a word, as int32: constants of kernels.
LOW_NIBBLES = tl.constexpr(0x0F0F0F0F) if tl else None
HIGH_NIBBLES = tl.constexpr(0xF0F0F0F0 - 2**32) if tl else None
HIGH_PAIRS = tl.constexpr(0xC0C0C0C0 - 2**32) if tl else None
HIGH_HALF = tl.constexpr(0xFFFF0000 - 2**32) if tl else None
_MAX_Q8_0_BLOCK_K = 128  # 128 bytes of a row are one request to memory
_ROWS, _WARPS = 16, 4  # of a program that dequantizes


def block_k(weight: GgmlTensor) -> int:
    """Return the columns of a tile: a chunk, or for Q8_0 a power of two that divides the columns of `weight`."""
    return min(_MAX_Q8_0_BLOCK_K, weight.columns & -weight.columns) if weight.type == GgmlType.Q8_0 else CHUNK


@triton.jit
def _repeat(scales, TIMES: tl.constexpr):
    """Repeat each scale of [rows, groups] for TIMES columns: [rows, groups * TIMES]."""
    ROWS: tl.constexpr = scales.shape[0]
    GROUPS: tl.constexpr = scales.shape[1]
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, GROUPS, TIMES)), (ROWS, GROUPS * TIMES))


@triton.jit
def _words(pointer):
    """Return a pointer to bytes as one to words of 4 bytes. Loads of words are prefetched, narrower ones are not."""
    return pointer.to(tl.pointer_type(tl.int32))


@triton.jit
def _half(word, INDEX: tl.constexpr):
    """Return one of the two float16 numbers of a word, as float32."""
    return (word >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word, PLANE: tl.constexpr):
    """Return the byte of a word that has the bits of a plane, of two planes per byte, as int8."""
    return (word >> (PLANE // 2 * 8)).to(tl.int8)


@triton.jit
def _decode_q8_0(values_ptr, scales_ptr, row, step, K: tl.constexpr, BLOCK_K: tl.constexpr):
    SCALES: tl.constexpr = (K // 32 + 1) // 2 * 2
    column = tl.arange(0, BLOCK_K)[None, :]
    block = tl.arange(0, BLOCK_K // 32)[None, :]
    values = tl.load(values_ptr + row * K + step * BLOCK_K + column).to(tl.int8, bitcast=True)
    scale_ptr = scales_ptr.to(tl.pointer_type(tl.float16)) + row * SCALES + step * (BLOCK_K // 32)
    return (values.to(tl.float32) * _repeat(tl.load(scale_ptr + block).to(tl.float32), 32),)


@triton.jit
def _decode_q4_0(values_ptr, scales_ptr, row, step, K: tl.constexpr):
    CHUNKS: tl.constexpr = (K + 255) // 256
    word = tl.load(_words(values_ptr) + (row * CHUNKS + step) * 32 + tl.arange(0, 32)[None, :])
    # Bytes of 16 * (q - 8), of the even planes and of the odd ones.
    even, odd = (word << 4) & HIGH_NIBBLES, word & HIGH_NIBBLES
    scale_ptr = _words(scales_ptr) + (row * CHUNKS + step) * 4
    planes = ()
    for plane in tl.static_range(8):
        scale = _half(tl.load(scale_ptr + plane // 2), plane % 2) * 0.0625
        planes += (_byte(even if plane % 2 == 0 else odd, plane).to(tl.float32) * scale,)  # type: ignore[assignment]
    return planes


@triton.constexpr_function
def nibble_bytes(name: str, columns: int) -> int:
    """Return the bytes of a tile's values before their further bits, of a format of that name."""
    return {"Q8_0": columns, "Q2_K": columns // 4}.get(name, columns // 2)


@triton.constexpr_function
def value_bytes(name: str, columns: int) -> int:
    """Return the bytes of a tile's values with their further bits."""
    further: int = {"Q6_K": columns // 4, "Q5_1": columns // 8, "Q5_K": columns // 8}.get(name, 0)
    return int(nibble_bytes(name, columns)) + further


@triton.jit
def _low_nibbles(values_ptr, row, step, CHUNKS: tl.constexpr, HAS_BIT: tl.constexpr):
    """Return the bytes of the unsigned values of the even planes and of the odd ones, of 4 bits or of 5."""
    STRIDE: tl.constexpr = 160 if HAS_BIT else 128
    row_ptr = values_ptr + row * (STRIDE * CHUNKS)
    column = tl.arange(0, 32)[None, :]
    word = tl.load(_words(row_ptr) + step * 32 + column)
    even, odd = word & LOW_NIBBLES, (word >> 4) & LOW_NIBBLES
    if HAS_BIT:
        # Bit p of a byte has the highest bit of plane p. Multiplying moves bits 0, 2, 4, 6 to bit 4 of the bytes.
        high = tl.load(row_ptr + 128 * CHUNKS + step * 32 + column).to(tl.int32)
        even |= ((high & 0x55) * 0x410410) & 0x10101010
        odd |= (((high >> 1) & 0x55) * 0x410410) & 0x10101010
    return even, odd


@triton.jit
def _decode_with_minima(values_ptr, scales_ptr, row, step, K: tl.constexpr, HAS_BIT: tl.constexpr):
    """Decode Q4_1 and Q5_1, whose blocks have a scale and a minimum each."""
    CHUNKS: tl.constexpr = (K + 255) // 256
    even, odd = _low_nibbles(values_ptr, row, step, CHUNKS, HAS_BIT)
    scale_ptr = _words(scales_ptr) + (row * CHUNKS + step) * 8
    planes = ()
    for plane in tl.static_range(8):
        both = tl.load(scale_ptr + plane)
        number = _byte(even if plane % 2 == 0 else odd, plane).to(tl.float32)
        planes += (number * _half(both, 0) + _half(both, 1),)  # type: ignore[assignment]
    return planes


@triton.jit
def _decode_q4_k(values_ptr, scales_ptr, subscales_ptr, row, step, K: tl.constexpr, HAS_BIT: tl.constexpr):
    """Decode Q4_K, and with a further bit Q5_K."""
    block = row * (K // 256) + step
    even, odd = _low_nibbles(values_ptr, row, step, K // 256, HAS_BIT)
    both = tl.load(_words(scales_ptr) + block)
    d, dmin = _half(both, 0), _half(both, 1)
    # Bytes of the scales, then of the minima, of sub-blocks 0 to 3 and 4 to 7.
    subscale_ptr = _words(subscales_ptr) + block * 3
    first, second, high = tl.load(subscale_ptr), tl.load(subscale_ptr + 1), tl.load(subscale_ptr + 2)
    scales = (first & LOW_NIBBLES) | ((high << 4) & 0x30303030), (second & LOW_NIBBLES) | (high & 0x30303030)
    minima = (
        ((first >> 4) & LOW_NIBBLES) | ((high << 2) & 0x30303030),
        ((second >> 4) & LOW_NIBBLES) | ((high >> 2) & 0x30303030),
    )
    planes = ()
    for plane in tl.static_range(8):
        scale = d * _byte(scales[plane // 4], plane % 4 * 2).to(tl.float32)
        minimum = dmin * _byte(minima[plane // 4], plane % 4 * 2).to(tl.float32)
        number = _byte(even if plane % 2 == 0 else odd, plane).to(tl.float32)
        planes += (number * scale - minimum,)  # type: ignore[assignment]
    return planes


@triton.jit
def _decode_q2_k(values_ptr, scales_ptr, subscales_ptr, row, step, K: tl.constexpr):
    block = row * (K // 256) + step
    half = tl.arange(0, 2)[None, :]
    word = tl.load(values_ptr.to(tl.pointer_type(tl.uint16)) + block * 32 + tl.arange(0, 32)[None, :]).to(tl.int32)
    # From 16 bits to the low bits of 4 bytes, of each the values of an even and of an odd plane.
    word = (word | (word << 8)) & 0x00FF00FF
    word = (word | (word << 4)) & LOW_NIBBLES
    even, odd = word & 0x03030303, (word >> 2) & 0x03030303
    both = tl.load(_words(scales_ptr) + block)
    d, dmin = _half(both, 0), _half(both, 1)
    planes = ()
    for plane in tl.static_range(8):
        subscales = tl.load(_words(subscales_ptr) + block * 4 + plane // 2) >> (plane % 2 * 16 + 8 * half)
        scale, minimum = d * (subscales & 15).to(tl.float32), dmin * ((subscales >> 4) & 15).to(tl.float32)
        number = _byte(even if plane % 2 == 0 else odd, plane).to(tl.float32)
        planes += (number * _repeat(scale, 16) - _repeat(minimum, 16),)  # type: ignore[assignment]
    return planes


@triton.jit
def _decode_q6_k(values_ptr, scales_ptr, subscales_ptr, row, step, K: tl.constexpr):
    BLOCKS: tl.constexpr = K // 256
    half = tl.arange(0, 2)[None, :]
    column = tl.arange(0, 32)[None, :]
    word = tl.load(_words(values_ptr) + row * (48 * BLOCKS) + step * 32 + column)
    high_ptr = values_ptr.to(tl.pointer_type(tl.uint16)) + row * (96 * BLOCKS) + 64 * BLOCKS + step * 32
    high = tl.load(high_ptr + column).to(tl.int32)
    # From 16 bits to the low bits of 4 bytes, of each the high bits of an even and of an odd plane.
    high = (high | (high << 8)) & 0x00FF00FF
    high = (high | (high << 4)) & LOW_NIBBLES
    # Bytes of 4 * (q - 32).
    even = ((word << 2) & 0x3C3C3C3C) | ((high << 6) & HIGH_PAIRS)
    odd = ((word >> 2) & 0x3C3C3C3C) | ((high << 4) & HIGH_PAIRS)
    d = _half(tl.load(_words(scales_ptr) + row * ((BLOCKS + 1) // 2) + step // 2) >> (step % 2 * 16), 0) * 0.25
    subscale_ptr = _words(subscales_ptr) + (row * BLOCKS + step) * 4
    planes = ()
    for plane in tl.static_range(8):
        subscales = (tl.load(subscale_ptr + plane // 2) >> (plane % 2 * 16 + 8 * half)).to(tl.int8)
        number = _byte(even if plane % 2 == 0 else odd, plane).to(tl.float32)
        planes += (number * _repeat(d * subscales.to(tl.float32), 16),)  # type: ignore[assignment]
    return planes


@triton.constexpr_function
def _int4_group(name: str) -> int:
    """Return the columns of a group of a format of that name (`Int4Type.name`)."""
    return int(name.split("_")[1][1:])


@triton.constexpr_function
def _int4_has_bf16(name: str) -> bool:
    """Return whether scales of a format of that name are bfloat16."""
    return name.endswith("BF16")


@triton.jit
def _decode_int4(
    values_ptr, scales_ptr, zeros_ptr, row, step, K: tl.constexpr, GROUP: tl.constexpr, BF16: tl.constexpr
):
    # Of a chunk: groups, words of scales and words of zero points.
    GROUPS: tl.constexpr = 256 // GROUP
    SCALES: tl.constexpr = GROUPS // 2
    ZEROS: tl.constexpr = (GROUPS + 3) // 4
    CHUNKS: tl.constexpr = (K + 255) // 256
    word = tl.load(_words(values_ptr) + step * 32 + (row * (CHUNKS * 32) + tl.arange(0, 32)[None, :]))
    # Bytes of 16 * (q - 8), of the even planes and of the odd ones.
    even, odd = (word << 4) & HIGH_NIBBLES, word & HIGH_NIBBLES
    scale_ptr = _words(scales_ptr) + step * SCALES + row * (CHUNKS * SCALES)
    zero_ptr = _words(zeros_ptr) + step * ZEROS + row * (CHUNKS * ZEROS)
    planes = ()
    for plane in tl.static_range(8):
        group = plane * GROUPS // 8
        both = tl.load(scale_ptr + group // 2)
        if BF16:
            scale = (both & HIGH_HALF if group % 2 else both << 16).to(tl.float32, bitcast=True)
        else:
            scale = _half(both, group % 2)
        zero = (tl.load(zero_ptr + group // 4) >> (group % 4 * 8)).to(tl.int8).to(tl.float32)
        number = _byte(even if plane % 2 == 0 else odd, plane).to(tl.float32)
        # Both terms are small multiples of the scale: their sum is exact.
        planes += (number * (scale * 0.0625) + zero * scale,)  # type: ignore[assignment]
    return planes


@triton.jit
def decode_tile(
    values_ptr,
    scales_ptr,
    subscales_ptr,
    row,
    step,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Decode the columns of tile `step` of some rows, [rows, 1] int64.

    Returns a tuple of planes [rows, BLOCK_K / planes] float32. Plane p holds the p-th equal part of the columns.
    """
    if FORMAT == "Q8_0":
        planes = _decode_q8_0(values_ptr, scales_ptr, row, step, K, BLOCK_K)
    elif FORMAT == "Q4_0":
        planes = _decode_q4_0(values_ptr, scales_ptr, row, step, K)
    elif FORMAT == "Q4_1" or FORMAT == "Q5_1":
        planes = _decode_with_minima(values_ptr, scales_ptr, row, step, K, FORMAT == "Q5_1")
    elif FORMAT == "Q2_K":
        planes = _decode_q2_k(values_ptr, scales_ptr, subscales_ptr, row, step, K)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        planes = _decode_q4_k(values_ptr, scales_ptr, subscales_ptr, row, step, K, FORMAT == "Q5_K")
    elif FORMAT == "Q6_K":
        planes = _decode_q6_k(values_ptr, scales_ptr, subscales_ptr, row, step, K)
    else:
        GROUP: tl.constexpr = _int4_group(FORMAT)
        BF16: tl.constexpr = _int4_has_bf16(FORMAT)
        planes = _decode_int4(values_ptr, scales_ptr, subscales_ptr, row, step, K, GROUP, BF16)
    return planes


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_outputs"])
def _dequantize_kernel(
    values_ptr,
    scales_ptr,
    subscales_ptr,
    row_ids_ptr,
    output_ptr,
    first_row,
    num_rows,
    num_outputs,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program dequantizes one tile of ROWS rows.

    GATHER: output i is row row_ids[i] - first_row, or zeros if there is no such row.
    """
    output_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    step = tl.program_id(1)
    stored = output_row < num_outputs
    row = tl.minimum(output_row, num_outputs - 1).to(tl.int64)
    pdl_sync(PDL)
    if GATHER:
        row = tl.load(row_ids_ptr + row) - first_row
        inside = (row >= 0) & (row < num_rows)
        row = tl.where(inside, row, 0)
    planes = decode_tile(values_ptr, scales_ptr, subscales_ptr, row, step, K, BLOCK_K, FORMAT)
    WIDTH: tl.constexpr = BLOCK_K // len(planes)
    for plane in tl.static_range(len(planes)):
        column = step * BLOCK_K + plane * WIDTH + tl.arange(0, WIDTH)[None, :]
        wide = planes[plane]
        if GATHER:
            wide = tl.where(inside, wide, 0.0)
        tl.store(output_ptr + output_row.to(tl.int64) * K + column, wide, mask=stored & (column < K))


def dequantize(weight: GgmlTensor, out: torch.Tensor) -> torch.Tensor:
    """Dequantize the rows of `weight` into `out`, [rows, K], contiguous, of any floating type, and return it."""
    if not use_triton(weight.values):
        return out.copy_(dequantize_reference(weight))
    return _launch(weight, None, 0, out)


def ggml_embedding(
    shard: GgmlTensor, token_ids: torch.Tensor, dtype: torch.dtype, first_token: int | None = None
) -> torch.Tensor:
    """Return the embeddings of tokens, [tokens, K] of type `dtype`.

    token_ids: [tokens] int64. shard: [shard_size, K], the rows of the vocabulary from `first_token` on. Tokens without
    a row there have zeros, so that the all-reduce over ranks gives the embedding of every token. If `first_token` is
    None, every token has a row.
    """
    row = token_ids - (first_token or 0)
    if not use_triton(shard.values):
        in_shard = (row >= 0) & (row < len(shard.values)) if first_token is not None else torch.ones_like(row).bool()
        rows = shard.rows(torch.where(in_shard, row, 0))
        return dequantize_reference(rows).to(dtype).masked_fill_(~in_shard[:, None], 0.0)
    out = torch.empty(len(token_ids), shard.columns, dtype=dtype, device=token_ids.device)
    return _launch(shard, token_ids, first_token or 0, out) if len(token_ids) else out


def _launch(weight: GgmlTensor, row_ids: torch.Tensor | None, first_row: int, out: torch.Tensor) -> torch.Tensor:
    (rows, columns), width = out.shape, block_k(weight)
    _dequantize_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, width))](
        *weight.arrays,
        weight.values if row_ids is None else row_ids,
        out,
        first_row,
        len(weight.values),
        rows,
        K=columns,
        ROWS=_ROWS,
        BLOCK_K=width,
        FORMAT=weight.type.name,
        GATHER=row_ids is not None,
        num_warps=_WARPS,
        **pdl_options(out.device),
    )
    return out
