"""Linear layers. Checkpoint matrices that read the same input share one weight, so that one product serves them."""

import torch
from torch import nn

from meltcore.layers.norm import RMSNorm
from meltcore.layers.weight import DenseWeight, Destination, Fp8Weight


class Linear(nn.Module):
    """y = x W^T, plus a bias of [sum(output_sizes)] where there is one.

    weight: [sum(output_sizes), input_size], in the form that layers/weight.py gives it; `part(i)` is where the i-th
    matrix of a checkpoint goes.
    """

    def __init__(self, input_size: int, *output_sizes: int, bias: bool = False) -> None:
        super().__init__()
        self.input_size, self.output_sizes = input_size, output_sizes
        self.weight: DenseWeight | Fp8Weight = DenseWeight(sum(output_sizes), input_size)
        self.bias = nn.Parameter(torch.empty(sum(output_sizes)), requires_grad=False) if bias else None

    def to_fp8(self) -> None:
        """Hold the weight in FP8, before anything is loaded into it."""
        self.weight = Fp8Weight(sum(self.output_sizes), self.input_size)

    def part(self, index: int) -> Destination:
        start = sum(self.output_sizes[:index])
        return self.weight.rows(start, start + self.output_sizes[index])

    def forward(self, hidden: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """Of norm(hidden) where a norm is given."""
        product = self.weight.product(hidden, norm.parts() if norm else None)
        return product if self.bias is None else product.add_(self.bias)

    def gated(self, hidden: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """silu(gate) * up, where the two halves of the product are gate and up."""
        return self.weight.gated_product(hidden, norm.parts() if norm else None)

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """residual + forward(hidden), in the memory of `residual`."""
        return self.weight.add_product(residual, hidden)
