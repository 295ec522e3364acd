"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), as Qwen3.5 has it."""

import torch
from torch import nn

from meltcore.kernels.delta_net import DeltaWeights, delta_net
from meltcore.kernels.paged_attention import Segments
from meltcore.layers.destination import Destination
from meltcore.layers.group import Group
from meltcore.layers.linear import Linear
from meltcore.layers.norm import MakeNorm
from meltcore.layers.pieces import piece, stacked_piece, within
from meltcore.layers.residual import Residual


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
        self.norm = norm(hidden_size)
        keys, values = key_heads * key_dim, heads * value_dim
        self.projection = Linear(hidden_size, keys, keys, values, values, heads, heads)
        self.value_norm = nn.Parameter(torch.empty(value_dim), requires_grad=False)
        self.output = Linear(values, hidden_size)
        self._published_heads, self._kept_heads = heads, range(heads)
        self._published_channels, self._kept_channels = (keys, keys, values), (range(keys), range(keys), range(values))
        self._allocate()

    @property
    def conv_channels(self) -> int:
        return sum(map(len, self._kept_channels))

    def divide(self, group: Group) -> None:
        """Keep this rank's share of the heads, each with the key head that it reads."""
        key_heads = group.share(self.key_heads, "key heads of Gated DeltaNet (linear_num_key_heads)")
        heads = group.share(self.heads, "value heads of Gated DeltaNet (linear_num_value_heads)")
        self.key_heads, self.heads, self._kept_heads = len(key_heads), len(heads), heads
        keys = range(key_heads.start * self.key_dim, key_heads.stop * self.key_dim)
        values = range(heads.start * self.value_dim, heads.stop * self.value_dim)
        self._kept_channels = keys, keys, values
        self.projection.keep_outputs(keys, keys, values, values, heads, heads)
        self.output.keep_inputs(values, group)
        self._allocate()

    def forward(self, residual: Residual, cache: tuple[torch.Tensor, torch.Tensor], segments: Segments) -> None:
        """Add to the residual stream. cache: this layer's conv_states, states."""
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.value_norm, self.eps)
        mixed = delta_net(self.projection(*residual.read(self.norm)), weights, *cache, segments, self.key_heads)
        self.output.add_to(residual, mixed)

    # --- where a checkpoint's tensors go ---

    def conv_part(self) -> Destination:
        """[published channels, 1, kernel]."""
        targets = self.conv[:, None].split([len(kept) for kept in self._kept_channels])
        published = self._published_channels
        if self.conv_channels == sum(published):
            return self.conv[:, None]
        return stacked_piece((sum(published), 1, self.kernel), self._kept_channels, published, targets)

    def head_part(self, own: torch.Tensor) -> Destination:
        """[published heads], for a tensor [heads] of ours."""
        return piece(own, (self._published_heads,), within(self._kept_heads))

    def _allocate(self) -> None:
        self.conv = nn.Parameter(torch.empty(self.conv_channels, self.kernel), requires_grad=False)
        self.a_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
