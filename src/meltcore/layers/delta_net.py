"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), as Qwen3.5 has it."""

import torch
from torch import nn

from meltcore.errors import ConfigError
from meltcore.kernels.delta_net import DeltaWeights, delta_net
from meltcore.kernels.paged_attention import Segments
from meltcore.layers.group import Group
from meltcore.layers.linear import Linear
from meltcore.layers.norm import MakeNorm


class DeltaNet(nn.Module):
    """residual + output(delta_net(projection(norm(residual)))): a recurrent layer, whose state has a fixed size.

    heads: of values; each key head serves heads / key_heads of them. The parts of `projection`: queries, keys and
    values, which go through a convolution over `kernel` tokens; the output gates z; b and a, of which a head's step
    size and decay are made. a_log, dt_bias: [heads], float32 whatever the model's type; value_norm: [value_dim].
    """

    def __init__(
        self,
        hidden_size: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
        norm: MakeNorm,
    ) -> None:
        super().__init__()
        self.key_heads, self.heads, self.key_dim, self.value_dim = key_heads, heads, key_dim, value_dim
        self.kernel, self.eps = kernel, eps
        self.conv_channels = 2 * key_heads * key_dim + heads * value_dim
        self.norm = norm(hidden_size)
        self.projection = Linear(hidden_size, self.conv_channels, heads * value_dim, heads, heads)
        self.conv = nn.Parameter(torch.empty(self.conv_channels, kernel), requires_grad=False)
        self.a_log = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
        self.value_norm = nn.Parameter(torch.empty(value_dim), requires_grad=False)
        self.output = Linear(heads * value_dim, hidden_size)

    def divide(self, group: Group) -> None:
        raise ConfigError(f"--tp {group.size} does not share out Gated DeltaNet, which this model has")

    def forward(
        self, residual: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], segments: Segments
    ) -> torch.Tensor:
        """residual: [tokens, hidden_size], changed in place and returned; cache: this layer's conv_states, states."""
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.value_norm, self.eps)
        mixed = delta_net(self.projection(residual, self.norm), weights, *cache, segments, self.key_heads)
        return self.output.add_to(residual, mixed)
