"""A weight of a linear layer whose matrices have several formats, such as Q4_K with a Q6_K v_proj."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Unpack, cast

import torch
from torch import nn

from meltcore.kernels.gemm.linear import LinearOptions, apply_options
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.layers.quantization import LinearFormat, LinearWeight, QuantizationMethod
from meltcore.layers.weight_loader import MatrixPart, WeightLoader, as_slice


class MergedWeight(nn.Module):
    """A weight [sum(output_sizes), input_size] of matrices whose formats are `formats`.

    Neighboring matrices of one format are one part and one GEMM.
    """

    def __init__(self, formats: Sequence[LinearFormat], output_sizes: Sequence[int], input_size: int) -> None:
        super().__init__()
        if len(formats) != len(output_sizes):
            raise ValueError(f"{len(formats)} formats are given for a layer of {len(output_sizes)} matrices")
        self._rows: list[range] = []
        self.parts = nn.ModuleList()
        start = 0
        for weight_format, group in groupby(zip(formats, output_sizes, strict=True), key=lambda matrix: matrix[0]):
            sizes = tuple(size for _, size in group)
            self.parts.append(cast("nn.Module", weight_format(sizes, input_size)))
            self._rows.append(range(start, start + sum(sizes)))
            start = self._rows[-1].stop

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return the loaders of a checkpoint's matrix. Raises ValueError for rows of several parts."""
        start, stop = part.rows.start, part.rows.stop
        rows, weight = next(candidate for candidate in self._parts() if start in candidate[0])
        if stop > rows.stop:
            raise ValueError(f"rows {start} to {stop} have several formats and cannot be loaded from one tensor")
        return weight.tensors(part._replace(rows=range(start - rows.start, stop - rows.start)))

    def matmul(self, hidden: torch.Tensor, norm: Norm | None = None, **options: Unpack[LinearOptions]) -> torch.Tensor:
        """Return norm(hidden) W^T with the options of `LinearWeight.matmul`."""
        hidden = rms_norm(hidden, *norm) if norm else hidden
        output = hidden.new_empty(len(hidden), self._rows[-1].stop)
        for rows, weight in self._parts():
            weight.matmul(hidden, out=output[:, as_slice(rows)])
        return apply_options(output, **options)

    def _parts(self) -> list[tuple[range, LinearWeight]]:
        """Return the rows and the weight of each part."""
        return [(rows, cast("LinearWeight", part)) for rows, part in zip(self._rows, self.parts, strict=True)]


def merged_method(methods: Sequence[QuantizationMethod]) -> QuantizationMethod:
    """Return the quantization method of a layer whose matrices have `methods`, which may all be equal."""
    if len(set(methods)) == 1:
        return methods[0]
    return QuantizationMethod(
        partial(MergedWeight, [method.linear for method in methods]),
        None,
        None,
        max(method.column_multiple for method in methods),
    )
