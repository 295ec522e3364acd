"""How a linear layer holds its weight: as it was published, or in FP8.

Both forms are modules with the same few operations, so that a layer neither knows nor asks which it has.
"""

from __future__ import annotations

import torch
from torch import nn

from meltcore.kernels.fp8 import FP8
from meltcore.kernels.fp8_linear import fp8_gated_linear, fp8_linear, fp8_linear_add
from meltcore.kernels.fp8_quantise import Fp8Rows, quantise
from meltcore.kernels.linear import gated_linear, linear, linear_add
from meltcore.kernels.norm import Norm
from meltcore.layers.destination import Destination


class DenseWeight(nn.Module):
    """values: [output_size, input_size] in the type of the model."""

    def __init__(self, output_size: int, input_size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)

    def rows(self, start: int, stop: int) -> Destination:
        return self.values[start:stop]

    def product(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return linear(hidden, self.values, norm)

    def gated_product(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return gated_linear(hidden, self.values, norm)

    def add_product(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return linear_add(residual, hidden, self.values)


class Fp8Weight(nn.Module):
    """values: [output_size, input_size] e4m3; scales: [output_size] float32, one for each output."""

    def __init__(self, output_size: int, input_size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(output_size, input_size, dtype=FP8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(output_size, dtype=torch.float32), requires_grad=False)

    def rows(self, start: int, stop: int) -> Destination:
        return _Fp8Destination(self.values[start:stop], self.scales[start:stop])

    def product(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return fp8_linear(hidden, self._matrix(), norm)

    def gated_product(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return fp8_gated_linear(hidden, self._matrix(), norm)

    def add_product(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return fp8_linear_add(residual, hidden, self._matrix())

    def _matrix(self) -> Fp8Rows:
        return Fp8Rows(self.values, self.scales)


class _Fp8Destination:
    """Rows of an FP8 weight. Each has a scale of its own, so any of them can be quantised without the others."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        self._values, self._scales = values, scales

    @property
    def shape(self) -> torch.Size:
        return self._values.shape

    def copy_(self, source: torch.Tensor) -> None:
        values, scales = quantise(source.to(self._values.device).contiguous())
        self._values.copy_(values)
        self._scales.copy_(scales)
