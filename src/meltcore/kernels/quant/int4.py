"""Groups of 4-bit values with a scale and a zero point, as AWQ and GPTQ checkpoints have them.

A value is scale * (q - zero): q has 4 bits, and `group_size` columns of a row have a scale in 16 bits and a zero point
from 0 to 16. Here they are packed for the kernels of all block-quantized formats (ggml.py); layers/int4_weights.py
reads checkpoints. Frantar et al. 2022, arXiv:2210.17323; Lin et al. 2023, arXiv:2306.00978.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Values in 4 bits that 32 words of 4 bytes hold: word j values j, 32 + j, ..., 224 + j, the lowest bits first.
CHUNK = 256
GROUP_SIZES = (32, 64, 128)
_MIDDLE = 8  # is subtracted from values and zero points, which makes both signed


@dataclass(frozen=True)
class Int4Type:
    """The format of a tensor in groups of 4-bit values. Its `scale_dtype` is float16 or bfloat16."""

    group_size: int
    scale_dtype: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        """The name of the format."""
        return f"INT4_G{self.group_size}_{'BF16' if self.scale_dtype == torch.bfloat16 else 'F16'}"

    @property
    def block_size(self) -> int:
        """Values per group, which divides the columns of a tensor and of each shard of it."""
        return self.group_size

    @property
    def groups_per_chunk(self) -> int:
        """Groups of a chunk of values: 2, 4 or 8."""
        return CHUNK // self.group_size

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` values with its scales and zero points in a checkpoint.

        Raises ValueError if the row is not a whole number of groups.
        """
        if columns % self.group_size:
            raise ValueError(f"{columns} columns are no multiple of the groups of {self.group_size}")
        groups = columns // self.group_size
        return columns // 2 + 2 * groups + (groups + 1) // 2

    def array_bytes(self, columns: int) -> tuple[int, int, int]:
        """Return the bytes of a packed row's values, scales and zero points. All are multiples of 4."""
        chunks, groups = -(-columns // CHUNK), self.groups_per_chunk
        return 128 * chunks, 2 * groups * chunks, max(4, groups) * chunks


def pack_int4_values(values: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values, uint8 [..., columns]. 8 is subtracted, and the differences are stored as two's complements.

    `pack_nibbles` explains the order.
    """
    return pack_nibbles(values ^ _MIDDLE)


def pack_int4_scales(scales: torch.Tensor, int4_type: Int4Type) -> torch.Tensor:
    """Return the bytes of scales [..., groups], padded to the scales of whole chunks."""
    return _of_whole_chunks(scales, int4_type).contiguous().view(torch.uint8)


def pack_int4_zeros(zeros: torch.Tensor, int4_type: Int4Type) -> torch.Tensor:
    """Pack zero points, uint8 [..., groups], as 8 - zero in int8. A chunk's zero points begin a word of 4 bytes."""
    groups = int4_type.groups_per_chunk
    by_chunk = _of_whole_chunks(_MIDDLE - zeros, int4_type).unflatten(-1, (-1, groups))
    return torch.nn.functional.pad(by_chunk, (0, -groups % 4)).flatten(-2)


def _of_whole_chunks(of_groups: torch.Tensor, int4_type: Int4Type) -> torch.Tensor:
    """Append zeros to per-group values, [..., groups], until the groups fill whole chunks."""
    return torch.nn.functional.pad(of_groups, (0, -of_groups.shape[-1] % int4_type.groups_per_chunk))


def dequantize_int4(
    int4_type: Int4Type, columns: int, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Compute the values of packed rows, [..., columns] float32. `GgmlTensor` explains the arrays."""
    groups, of_chunk = columns // int4_type.group_size, int4_type.groups_per_chunk
    numbers = (unpack_nibbles(values)[..., :columns] ^ _MIDDLE).float().unflatten(-1, (groups, -1)) - _MIDDLE
    in_chunks = zeros.view(torch.int8).unflatten(-1, (-1, max(4, of_chunk)))[..., :of_chunk]
    offsets = in_chunks.flatten(-2)[..., :groups, None].float()
    wide_scales = scales.view(int4_type.scale_dtype)[..., :groups, None].float()
    dense: torch.Tensor = ((numbers + offsets) * wide_scales).flatten(-2)
    return dense


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values [..., columns] in chunks, [..., chunks * 128]. The last chunk is padded with zeros."""
    chunks = torch.nn.functional.pad(values, (0, -values.shape[-1] % CHUNK)).unflatten(-1, (-1, 4, 2, 32))
    packed: torch.Tensor = (chunks[..., 0, :] | chunks[..., 1, :] << 4).transpose(-2, -1).flatten(-3)
    return packed


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_nibbles`. Padding is not removed."""
    chunks = packed.unflatten(-1, (-1, 32, 4)).transpose(-2, -1)
    return torch.stack([chunks & 15, chunks >> 4], -2).flatten(-4)
