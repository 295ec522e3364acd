"""The feed-forward block."""

import torch
from torch import nn

from meltcore.kernels.swiglu import swiglu
from meltcore.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, intermediate_size, intermediate_size)
        self.down = Linear(intermediate_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(self.gate_up(hidden)))
