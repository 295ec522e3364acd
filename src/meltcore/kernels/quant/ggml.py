"""Block-quantized tensors: formats of GGUF files that kernels decode (ggml_types.py), and INT4 (int4.py).

A row is a sequence of blocks, each with its quantized values and its scales. `pack` arranges rows for a GPU: values,
scales and sub-scales in separate arrays, and the bits of each value in the order in which kernels decode them. A packed
row takes as many bytes as in the file, up to padding. Blocks of other formats are converted to one of these formats
first (ggml_restore.py).

    INT4   32, 64 or 128 values: scale * (q - zero), q of 4 bits (int4.py, of AWQ and GPTQ checkpoints)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.int4 import CHUNK, Int4Type, dequantize_int4, pack_nibbles, unpack_nibbles

# The standard deviation of the values of random blocks with scales from 0.5 to 1.5.
_STANDARD_DEVIATIONS = {
    GgmlType.Q4_0: 4.83,
    GgmlType.Q4_1: 4.8,
    GgmlType.Q5_1: 9.6,
    GgmlType.Q8_0: 77.0,
    GgmlType.Q2_K: 10.25,
    GgmlType.Q4_K: 175.5,
    GgmlType.Q5_K: 351.0,
    GgmlType.Q6_K: 1420.0,
}
# With m or dmin of these times d, the values of a block have a mean of about zero.
_CENTERS = {GgmlType.Q4_1: -7.5, GgmlType.Q5_1: -15.5, GgmlType.Q2_K: 1.5, GgmlType.Q4_K: 7.5, GgmlType.Q5_K: 15.5}
# The first byte of a block's scales, where it is not 0.
_SCALES_OFFSET = {GgmlType.Q2_K: 80, GgmlType.Q6_K: 208}


@dataclass(frozen=True)
class Fp8Type:
    """FP8 (e4m3) with a float32 scale per 128 columns of `row_group` rows, only for the GEMMs of few tokens.

    A tensor has the arrays of `BlockFp8Tensor`, seen as bytes: scales has a row per group of rows.
    """

    row_group: int

    @property
    def name(self) -> str:
        """The name of the format."""
        return f"FP8_R{self.row_group}"

    @property
    def block_size(self) -> int:
        """Columns that share a scale."""
        return 128

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row's values. Raises ValueError if the row is not a whole number of blocks."""
        if columns % self.block_size:
            raise ValueError(f"{columns} columns are no multiple of {self.block_size}")
        return columns

    def array_bytes(self, columns: int) -> tuple[int, int, int]:
        """Return the bytes of a row's values and of a row group's scales. There are no sub-scales."""
        return columns, columns // self.block_size * 4, 0


BlockType = GgmlType | Int4Type | Fp8Type


class GgmlTensor(NamedTuple):
    """Packed block-quantized rows of `columns` values, of any leading dimensions. Arrays are contiguous uint8.

    Values of Q8_0 are 8 bits in their order. Other values are chunks of 4 bits each (see CHUNK). Values of Q6_K are the
    low 4 bits of all chunks, followed by the high 2 bits of all chunks. These are 32 half words per chunk, and half
    word j has the bits of values j, 32 + j, ..., 224 + j. Q2_K has only such half words. After the low 4 bits of all
    chunks, Q5_1 and Q5_K have the highest bits of all chunks. These are 32 bytes per chunk, and byte j has the bits of
    values j, 32 + j, ..., 224 + j. Values that ggml subtracts 8 or 32 from have their highest bit inverted, which makes
    them two's complements.

    Each block has a 16-bit scale. Formats with a minimum have two: d and m, or d and dmin. Sub-scales of Q4_K and Q5_K
    have 3 words per block (see `_pack_q4_k_subscales`). Sub-scales of Q2_K and Q6_K are bytes in their order.
    Sub-scales of INT4 are 8 - zero of each block, int8. Rows of INT4 and of blocks of 32 values are padded to whole
    chunks with blocks of zeros. Scales and sub-scales are padded to words of 4 bytes.
    """

    type: BlockType
    columns: int
    values: torch.Tensor
    scales: torch.Tensor
    subscales: torch.Tensor

    @property
    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three arrays."""
        return self.values, self.scales, self.subscales

    def rows(self, index: slice | int | torch.Tensor) -> GgmlTensor:
        """Return the rows that `index` selects in the first dimension."""
        return GgmlTensor(self.type, self.columns, *(array[index] for array in self.arrays))


def empty(ggml_type: BlockType, shape: Sequence[int], device: torch.device | None = None) -> GgmlTensor:
    """Allocate a packed tensor of `shape` [..., columns].

    Raises ValueError if a row is not a whole number of blocks.
    """
    *rows, columns = shape
    ggml_type.row_bytes(columns)
    sizes = ggml_type.array_bytes(columns)
    arrays = (torch.empty(*rows, size, dtype=torch.uint8, device=device) for size in sizes)
    return GgmlTensor(ggml_type, columns, *arrays)


def pack(blocks: torch.Tensor, ggml_type: GgmlType) -> GgmlTensor:
    """Arrange rows of blocks as a file stores them, uint8 [..., bytes of a row], as a packed tensor."""
    block = blocks.unflatten(-1, (-1, ggml_type.block_bytes))
    columns = block.shape[-2] * ggml_type.block_size
    subscales = blocks.new_empty(*blocks.shape[:-1], 0)
    if ggml_type == GgmlType.Q8_0:
        scales, values = block[..., :2], block[..., 2:].flatten(-2)
    elif ggml_type == GgmlType.Q4_0:
        scales, values = block[..., :2], pack_nibbles(nibbles_of(block[..., 2:], 16) ^ 8)
    elif ggml_type == GgmlType.Q4_1:
        scales, values = block[..., :4], pack_nibbles(nibbles_of(block[..., 4:], 16))
    elif ggml_type == GgmlType.Q5_1:
        scales, low, high = block[..., :4], nibbles_of(block[..., 8:], 16), bits_of(block[..., 4:8])
        values = torch.cat([pack_nibbles(low), _pack_bits(high)], -1)
    elif ggml_type == GgmlType.Q2_K:
        scales, subscales = block[..., 80:], block[..., :16].flatten(-2)
        values = _pack_pairs(pairs_of(block[..., 16:80]))
    elif ggml_type == GgmlType.Q4_K:
        scales, values = block[..., :4], pack_nibbles(nibbles_of(block[..., 16:], 32))
        subscales = _pack_q4_k_subscales(block[..., 4:16])
    elif ggml_type == GgmlType.Q5_K:
        scales, subscales = block[..., :4], _pack_q4_k_subscales(block[..., 4:16])
        # A file has the highest bits in the order of kernels.
        values = torch.cat([pack_nibbles(nibbles_of(block[..., 48:], 32)), block[..., 16:48].flatten(-2)], -1)
    else:
        scales, subscales = block[..., 208:], block[..., 192:208].flatten(-2)
        low, high = nibbles_of(block[..., :128], 64), pairs_of(block[..., 128:192])
        values = torch.cat([pack_nibbles(low), _pack_pairs(high ^ 2)], -1)
    arrays = (values, scales.flatten(-2), subscales)
    padded = (
        torch.nn.functional.pad(array, (0, size - array.shape[-1]))
        for array, size in zip(arrays, ggml_type.array_bytes(columns), strict=True)
    )
    return GgmlTensor(ggml_type, columns, *(array.contiguous() for array in padded))


def nibbles_of(values: torch.Tensor, group: int) -> torch.Tensor:
    """Return the 4-bit values of a file's blocks: [..., blocks, bytes] -> [..., columns].

    `group` bytes hold `group` values in their low bits, then `group` values in their high bits.
    """
    groups = values.unflatten(-1, (-1, group))
    return torch.cat([groups & 15, groups >> 4], -1).flatten(-3)


def pairs_of(values: torch.Tensor) -> torch.Tensor:
    """Return the 2-bit values of a file's blocks: [..., blocks, 64] -> [..., columns].

    32 bytes hold 32 values in their lowest two bits, then 32 values in the next two bits, and so on.
    """
    groups = values.unflatten(-1, (2, 32))
    pairs: torch.Tensor = torch.cat([groups & 3, groups >> 2 & 3, groups >> 4 & 3, groups >> 6], -1).flatten(-3)
    return pairs


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of bytes, the lowest ones first: [..., blocks, bytes] -> [..., blocks * bytes * 8]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    bits: torch.Tensor = (values[..., None] >> shifts & 1).flatten(-3)
    return bits


def _pack_bits(values: torch.Tensor) -> torch.Tensor:
    """Pack bits [..., columns] in chunks of 32 bytes, [..., chunks * 32]. Padding is zeros."""
    chunks = torch.nn.functional.pad(values, (0, -values.shape[-1] % CHUNK)).unflatten(-1, (-1, 8, 32))
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)[:, None]
    packed: torch.Tensor = (chunks << shifts).sum(-2, dtype=torch.uint8).flatten(-2)
    return packed


def _unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """Undo `_pack_bits`, except that padding is kept."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)[:, None]
    bits: torch.Tensor = (packed.unflatten(-1, (-1, 1, 32)) >> shifts & 1).flatten(-3)
    return bits


def _pack_pairs(values: torch.Tensor) -> torch.Tensor:
    """Pack 2-bit values [..., columns] in chunks of 32 half words, [..., chunks * 64]."""
    first, second, third, fourth = values.unflatten(-1, (-1, 2, 4, 32)).unbind(-2)
    packed: torch.Tensor = (first | second << 2 | third << 4 | fourth << 6).transpose(-2, -1).flatten(-3)
    return packed


def _unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Undo `_pack_pairs`."""
    chunks = packed.unflatten(-1, (-1, 32, 2)).transpose(-2, -1)
    return torch.stack([chunks & 3, chunks >> 2 & 3, chunks >> 4 & 3, chunks >> 6], -2).flatten(-4)


def _pack_q4_k_subscales(packed: torch.Tensor) -> torch.Tensor:
    """Arrange the 6-bit scales and minima of sub-blocks so that each is read without a condition on its number.

    packed: [..., blocks, 12]. Returns [..., blocks * 12]. A block has a byte for each sub-block with the low 4 bits of
    its scale and, above them, of its minimum. Then it has 4 bits for each sub-block with the high 2 bits of both. Byte
    i has the bits of sub-block i and, above them, of sub-block i + 4.
    """
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    first, second = ((scales >> 4) | (minima >> 4 << 2)).chunk(2, -1)
    return torch.cat([(scales & 15) | (minima << 4), first | second << 4], -1).flatten(-2)


def dequantize_reference(tensor: GgmlTensor) -> torch.Tensor:
    """Compute the values of packed rows, [..., columns] float32, as ggml does: the specification of all kernels."""
    columns = tensor.columns
    if isinstance(tensor.type, Int4Type):
        return dequantize_int4(tensor.type, columns, *tensor.arrays)
    scales = tensor.scales.view(torch.float16).float()
    if tensor.type == GgmlType.Q8_0:
        return _scaled(tensor.values.view(torch.int8).float(), scales[..., : columns // 32])
    if tensor.type == GgmlType.Q4_0:
        values = (unpack_nibbles(tensor.values)[..., :columns] ^ 8).float()
        return _scaled(values - 8.0, scales[..., : columns // 32])
    if tensor.type != GgmlType.Q6_K:
        return _dequantize_with_minima(tensor, scales.unflatten(-1, (-1, 2, 1)))
    low, high = tensor.values.split([columns // 2, columns // 4], -1)
    values = (unpack_nibbles(low) | (_unpack_pairs(high) ^ 2) << 4).float()
    d = scales[..., : columns // 256].repeat_interleave(16, -1)
    return _scaled(values - 32.0, d * tensor.subscales.view(torch.int8))


def _dequantize_with_minima(tensor: GgmlTensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the values of a format with minima. scales: [..., blocks, 2, 1], of each block scale and minimum."""
    d, dmin = scales.unbind(-2)
    if tensor.type in (GgmlType.Q4_1, GgmlType.Q5_1):
        d, minima = (each.flatten(-2)[..., : tensor.columns // 32] for each in (d, -dmin))
    elif tensor.type == GgmlType.Q2_K:
        packed = tensor.subscales.unflatten(-1, (-1, 16))
        d, minima = ((d * (packed & 15)).flatten(-2), (dmin * (packed >> 4)).flatten(-2))
    else:
        low, high = tensor.subscales.unflatten(-1, (-1, 12)).split([8, 4], -1)
        high = torch.cat([high & 15, high >> 4], -1)
        d, minima = (
            (d * (low & 15 | (high & 3) << 4)).flatten(-2),
            (dmin * (low >> 4 | high >> 2 << 4)).flatten(-2),
        )
    scaled = _scaled(_unsigned(tensor)[..., : tensor.columns].float(), d)
    dense: torch.Tensor = scaled - minima.repeat_interleave(tensor.columns // minima.shape[-1], -1)
    return dense


def _unsigned(tensor: GgmlTensor) -> torch.Tensor:
    """Return the values of a format with minima, padding included: [..., columns] uint8."""
    if tensor.type == GgmlType.Q2_K:
        return _unpack_pairs(tensor.values)
    if tensor.type in (GgmlType.Q4_1, GgmlType.Q4_K):
        return unpack_nibbles(tensor.values)
    low, high = tensor.values.tensor_split((tensor.values.shape[-1] // 5 * 4,), -1)
    return unpack_nibbles(low) | _unpack_bits(high) << 4


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply each of equal groups of values [..., columns] by its scale [..., groups]."""
    scaled: torch.Tensor = (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)
    return scaled


def quantize_blocks(rows: torch.Tensor, ggml_type: GgmlType) -> torch.Tensor:
    """Quantize rows [..., columns] to blocks as a file stores them, uint8 [..., bytes of a row], with ggml's rounding.

    Only Q8_0 and Q4_0 are supported. Raises ValueError for another type, or if a row is not a whole number of blocks.
    """
    ggml_type.row_bytes(rows.shape[-1])
    groups = rows.float().unflatten(-1, (-1, ggml_type.block_size))
    magnitudes = groups.abs()
    if ggml_type == GgmlType.Q8_0:
        scales = magnitudes.amax(-1, keepdim=True)
        scales = scales / torch.full_like(scales, 127.0)  # a Python number would be multiplied by its reciprocal
        scaled = groups * _inverse(scales)
        # Half away from zero: torch rounds half to even.
        floors = scaled.abs().floor()
        values = (floors + (scaled.abs() - floors >= 0.5)).copysign(scaled).to(torch.int8).view(torch.uint8)
    elif ggml_type == GgmlType.Q4_0:
        # The value of the largest magnitude becomes -8.
        scales = groups.gather(-1, magnitudes.argmax(-1, keepdim=True)) / -8.0
        nibbles = (groups * _inverse(scales) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
        low, high = nibbles.chunk(2, -1)
        values = low | (high << 4)
    else:
        raise ValueError(f"{ggml_type.name} is not quantized to here; Q8_0 and Q4_0 are")
    return torch.cat([scales.half().view(torch.uint8), values], -1).flatten(-2)


def random_blocks(
    ggml_type: GgmlType, shape: Sequence[int], deviation: float, generator: torch.Generator
) -> torch.Tensor:
    """Draw random weights of `shape` [..., columns] as a file stores them: uint8 [..., bytes of a row].

    They have zero mean and the standard deviation `deviation`, up to the rounding of scales. They are drawn on the
    generator's device. Raises ValueError if a row is not a whole number of blocks.
    """
    *rows, columns = shape
    row_bytes, device = ggml_type.row_bytes(columns), generator.device
    blocks = torch.empty(*rows, row_bytes, dtype=torch.uint8, device=device).random_(generator=generator)
    block = blocks.view(-1, ggml_type.block_bytes)
    # Random signs: the values of a block of Q4_0 have another mean than zero.
    draws = torch.rand(2, len(block), 1, device=device, generator=generator)
    scales = (draws[0] + 0.5).copysign(draws[1] - 0.5) * (deviation / _STANDARD_DEVIATIONS[ggml_type])
    # Each sub-block has the minimum of its scale.
    if ggml_type in (GgmlType.Q4_K, GgmlType.Q5_K):
        block[:, 8:12] = block[:, 4:8]
        block[:, 12:16] = block[:, 12:16] % 16 * 17
    if ggml_type == GgmlType.Q2_K:
        block[:, :16] = block[:, :16] % 16 * 17
    if ggml_type in _CENTERS:
        scales = torch.cat([scales, _CENTERS[ggml_type] * scales], -1)
    first_byte = _SCALES_OFFSET.get(ggml_type, 0)
    block[:, first_byte : first_byte + 2 * scales.shape[1]] = scales.half().view(torch.uint8)
    return blocks


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0.0, 0.0, torch.ones_like(scales) / scales)
