"""Converts blocks of GGUF formats that no kernel decodes to blocks of a format that kernels decode (`GgmlType.held`).

Values are small whole numbers times a scale. If the numbers and the scale fit the other format, they are copied, so
nothing is rounded again. `dequantize_blocks` computes the values of every format as ggml does.
"""

from __future__ import annotations

import torch

from meltcore.kernels.quant.ggml import bits_of, dequantize_reference, nibbles_of, pack, pairs_of
from meltcore.kernels.quant.ggml_types import GgmlType

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the format's values
# Exponents of the smallest and the largest power of two in float16, and the bits that a value of MXFP4 leaves of int8.
_LEAST_EXPONENT, _MOST_EXPONENT, _SPARE_BITS = -24, 15, 3
_E8M0_BIAS = 128  # with values that are twice the format's
_SUB_BLOCKS = {GgmlType.Q3_K: 16, GgmlType.IQ4_XS: 8}


def restore_blocks(blocks: torch.Tensor, ggml_type: GgmlType) -> torch.Tensor:
    """Return rows of a file's blocks as blocks of `ggml_type.held.type`: uint8 [..., bytes of a row].

    Raises ValueError for scales that the other format cannot have.
    """
    if ggml_type.held.type == ggml_type:
        return blocks
    numbers, scales = _numbers(blocks, ggml_type), _scale_parts(blocks, ggml_type)
    if ggml_type == GgmlType.Q3_K:
        return _as_q6_k(numbers, *scales)
    if ggml_type == GgmlType.MXFP4:
        numbers, half = _with_half_scales(numbers.unflatten(-1, (-1, 32)), scales[0])
        return _as_q8_0(numbers, half)
    half = scales[0].half() if len(scales) == 1 else (scales[0] * scales[1]).half().flatten(-2)
    return _as_q8_0(numbers.unflatten(-1, (-1, 32)), half)


def dequantize_blocks(blocks: torch.Tensor, ggml_type: GgmlType) -> torch.Tensor:
    """Compute the values of rows of blocks as a file stores them, [..., columns] float32, as ggml does."""
    if ggml_type.held.type == ggml_type:
        return dequantize_reference(pack(blocks, ggml_type))
    numbers, scales = _numbers(blocks, ggml_type).float(), _scale_parts(blocks, ggml_type)
    if ggml_type == GgmlType.MXFP4:
        scale = _power_of_two(scales[0])
    else:
        scale = scales[0] if len(scales) == 1 else (scales[0] * scales[1]).flatten(-2)
    values: torch.Tensor = (numbers.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
    return values


def _numbers(blocks: torch.Tensor, ggml_type: GgmlType) -> torch.Tensor:
    """Return the whole numbers that scales multiply, [..., columns] int8."""
    block = blocks.unflatten(-1, (-1, ggml_type.block_bytes))
    numbers: torch.Tensor
    if ggml_type == GgmlType.Q5_0:
        numbers = (nibbles_of(block[..., 6:], 16) | bits_of(block[..., 2:6]) << 4).view(torch.int8)
        return numbers - 16
    if ggml_type == GgmlType.Q3_K:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        high = (block[..., None, :32] >> shifts & 1).flatten(-3)
        numbers = (pairs_of(block[..., 32:96]) | high << 2).view(torch.int8)
        return numbers - 4
    table = _MXFP4_VALUES if ggml_type == GgmlType.MXFP4 else _IQ4_VALUES
    first_byte = ggml_type.block_bytes - ggml_type.block_size // 2
    indices = nibbles_of(block[..., first_byte:], 16).int()
    return torch.tensor(table, dtype=torch.int8, device=blocks.device)[indices]


def _scale_parts(blocks: torch.Tensor, ggml_type: GgmlType) -> tuple[torch.Tensor, ...]:
    """Return the scale of each block, [..., blocks] float32. For MXFP4, return the scale's exponent in int32.

    For formats with sub-blocks, return the scale of each block, [..., blocks, 1], and the whole numbers that multiply
    it, [..., blocks, sub-blocks], both float32.
    """
    block = blocks.unflatten(-1, (-1, ggml_type.block_bytes))
    if ggml_type == GgmlType.MXFP4:
        return (block[..., 0].int() - _E8M0_BIAS,)
    first_byte = 108 if ggml_type == GgmlType.Q3_K else 0
    scale = block[..., first_byte : first_byte + 2].contiguous().view(torch.float16).float()
    if ggml_type not in _SUB_BLOCKS:
        return (scale.flatten(-2),)
    if ggml_type == GgmlType.Q3_K:
        low, high = block[..., 96:104], block[..., 104:108]
        low = torch.cat([low & 15, low >> 4], -1)
        high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    else:
        low, high = block[..., 4:8], block[..., 2:4]
        low = torch.stack([low & 15, low >> 4], -1).flatten(-2)
        high = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    return scale, (low | high << 4).float() - 32.0


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in float32, for exponents from -128 on. The smallest results are subnormal."""
    bits = torch.where(exponent < -126, 1 << (exponent + 149).clamp(0, 23), (exponent + 127) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _with_half_scales(numbers: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of MXFP4, [..., blocks, 32] int8, and their scales in float16, [..., blocks].

    If a scale is too large for float16, its excess multiplies the numbers, which have spare bits. If it is too small,
    the numbers are rounded to multiples of float16's smallest number. Raises ValueError if a scale's excess is too
    large for the numbers.
    """
    is_zero = (numbers == 0).all(-1)
    exponent = torch.where(is_zero, 0, exponent)
    if (exponent > _MOST_EXPONENT + _SPARE_BITS).any():
        largest = f"2^{int(exponent.max())}; held as {GgmlType.MXFP4.held.type.name}, it may be up to 2^18"
        raise ValueError(f"has a block with the scale {largest}")
    clamped = exponent.clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    excess = _power_of_two((exponent - clamped).clamp(min=-100))[..., None]
    return (numbers.float() * excess).round().to(torch.int8), _power_of_two(clamped).half()


def _as_q8_0(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return blocks of Q8_0 from int8 [..., blocks, 32] and float16 [..., blocks]."""
    scale_bytes = scales[..., None].contiguous().view(torch.uint8)
    return torch.cat([scale_bytes, numbers.contiguous().view(torch.uint8)], -1).flatten(-2)


def _as_q6_k(numbers: torch.Tensor, scales: torch.Tensor, subscales: torch.Tensor) -> torch.Tensor:
    """Return blocks of Q6_K from int8 [..., columns], float32 [..., blocks, 1] and [..., blocks, 16]."""
    unsigned = (numbers + 32).view(torch.uint8).unflatten(-1, (-1, 2, 128))
    low, high = (unsigned & 15).unflatten(-1, (2, 64)), (unsigned >> 4).unflatten(-1, (4, 32))
    first, second, third, fourth = high.unbind(-2)
    parts = [
        (low[..., 0, :] | low[..., 1, :] << 4).flatten(-2),
        (first | second << 2 | third << 4 | fourth << 6).flatten(-2),
        subscales.to(torch.int8).view(torch.uint8),
        scales.half().view(torch.uint8),
    ]
    return torch.cat(parts, -1).flatten(-2)
