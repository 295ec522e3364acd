"""Lists the block formats of GGUF files, and the format in which a device holds each. This module needs no torch.

    Q8_0   32 values: d * q, q int8
    Q4_0   32 values: d * (q - 8), q of 4 bits
    Q4_1   32 values: d * q + m, q of 4 bits
    Q5_0   32 values: d * (q - 16), q of 5 bits
    Q5_1   32 values: d * q + m, q of 5 bits
    IQ4_NL 32 values: d * table[q], q of 4 bits, the table has whole numbers from -127 to 113
    MXFP4  32 values: d * table[q], q of 4 bits, d a power of two, the table has whole numbers from -12 to 12
    Q2_K   256 values in 16 sub-blocks: d * scale * q - dmin * minimum, q of 2 bits, scale and minimum of 4 bits
    Q3_K   256 values in 16 sub-blocks: d * (scale - 32) * (q - 4), q of 3 bits, scale of 6 bits
    Q4_K   256 values in 8 sub-blocks: d * scale * q - dmin * minimum, q of 4 bits, scale and minimum of 6 bits
    Q5_K   as Q4_K, q of 5 bits
    Q6_K   256 values in 16 sub-blocks: d * scale * (q - 32), q of 6 bits, scale int8
    IQ4_XS 256 values in 8 sub-blocks: d * (scale - 32) * table[q], scale of 6 bits, the table of IQ4_NL

d, m and dmin are float16. Formats: ggml's ggml-common.h and the GGUF specification (ggml-org).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

_CHUNK = 256  # columns of packed values, kernels/quant/int4.py


class GgmlType(IntEnum):
    """The supported block formats, by their numbers in GGUF files."""

    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    MXFP4 = 39

    @property
    def block_size(self) -> int:
        """Values per block, which divides the columns of a tensor and of each shard of it."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block in a file."""
        return _BLOCKS[self][1]

    @property
    def held(self) -> Holding:
        """The `Holding` that says in which format a device holds blocks of this format."""
        return _HOLDINGS.get(self, Holding(self))

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` values in a file.

        Raises ValueError if the row is not a whole number of blocks.
        """
        if columns % self.block_size:
            raise ValueError(f"{columns} columns are no multiple of {self.name}'s blocks of {self.block_size}")
        return columns // self.block_size * self.block_bytes

    def columns(self, row_bytes: int) -> int:
        """Return the values in a file's row of `row_bytes` bytes."""
        return row_bytes // self.block_bytes * self.block_size

    def array_bytes(self, columns: int) -> tuple[int, int, int]:
        """Return the bytes of a packed row's values, scales and sub-scales. All are multiples of 4.

        Raises KeyError for a format that is held as another format.
        """
        chunks = -(-columns // _CHUNK)
        if self == GgmlType.Q8_0:
            return columns, (columns // 32 + 1) // 2 * 4, 0
        return {
            GgmlType.Q4_0: (128 * chunks, 16 * chunks, 0),
            GgmlType.Q4_1: (128 * chunks, 32 * chunks, 0),
            GgmlType.Q5_1: (160 * chunks, 32 * chunks, 0),
            GgmlType.Q2_K: (64 * chunks, 4 * chunks, 16 * chunks),
            GgmlType.Q4_K: (128 * chunks, 4 * chunks, 12 * chunks),
            GgmlType.Q5_K: (160 * chunks, 4 * chunks, 12 * chunks),
            GgmlType.Q6_K: (192 * chunks, (chunks + 1) // 2 * 4, 16 * chunks),
        }[self]


class Holding(NamedTuple):
    """Says how a device holds the blocks of a file: converted to another format, or unchanged.

    `loss` says in words how far the conversion rounds a value at most, relative to the value. It is empty if nothing is
    rounded.
    """

    type: GgmlType
    loss: str = ""


_BLOCKS = {
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.MXFP4: (32, 17),
}
# Whole numbers fit the 8 or 6 bits of the other format, and its scale is theirs. The scale of IQ4_XS, float16 times 6
# bits, is rounded to float16; where that is subnormal, it is exact. Scales of MXFP4 from 2^-24 to 2^18 are exact.
_HOLDINGS = {
    GgmlType.Q5_0: Holding(GgmlType.Q8_0),
    GgmlType.IQ4_NL: Holding(GgmlType.Q8_0),
    GgmlType.MXFP4: Holding(GgmlType.Q8_0, "none, but values of scales below 2^-24 are rounded to multiples of 2^-24"),
    GgmlType.IQ4_XS: Holding(GgmlType.Q8_0, "2.0e-4 (RMS), at most 2^-11 of a value: its scale is rounded to float16"),
    GgmlType.Q3_K: Holding(GgmlType.Q6_K),
}
HELD_TYPES = tuple(each for each in GgmlType if each.held.type == each)
