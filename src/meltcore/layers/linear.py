"""Linear layers. Checkpoint matrices that read the same input share one weight, so that one product serves them."""

import torch
from torch import nn

from meltcore.kernels.linear import gated_linear, linear, linear_add
from meltcore.layers.norm import RMSNorm


class Linear(nn.Module):
    """y = x W^T, plus a bias of [sum(output_sizes)] where there is one.

    weight: [sum(output_sizes), input_size]; `part(i)` is the view of the i-th matrix.
    """

    def __init__(self, input_size: int, *output_sizes: int, bias: bool = False) -> None:
        super().__init__()
        self.output_sizes = output_sizes
        self.weight = nn.Parameter(torch.empty(sum(output_sizes), input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(output_sizes)), requires_grad=False) if bias else None

    def part(self, index: int) -> torch.Tensor:
        start = sum(self.output_sizes[:index])
        return self.weight[start : start + self.output_sizes[index]]

    def forward(self, hidden: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """Of norm(hidden) where a norm is given."""
        product = linear(hidden, self.weight, norm.parts() if norm else None)
        return product if self.bias is None else product.add_(self.bias)

    def gated(self, hidden: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """silu(gate) * up, where the two halves of the product are gate and up."""
        return gated_linear(hidden, self.weight, norm.parts() if norm else None)

    def add_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """residual + forward(hidden), in the memory of `residual`."""
        return linear_add(residual, hidden, self.weight)
