"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) as in Qwen3.5."""

import torch
from torch import nn

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.common import GatedDeltaParams
from meltcore.kernels.gated_delta.layer import gated_delta_net
from meltcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from meltcore.layers.norm import NormFactory
from meltcore.layers.residual import ResidualStream
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import WeightLoader, as_slice, merged_shard_loader, shard_loader


class GatedDeltaNet(nn.Module):
    """A recurrent layer that computes residual + out_proj(gated_delta_net(in_proj(norm(residual)))).

    There are `num_heads` value heads, and each key head serves num_heads / num_key_heads of them. `in_proj` computes
    queries, keys and values, which pass a convolution over `conv_kernel` tokens, output gates z, and b and a. A head's
    step size and decay are computed from b and a. `a_log` and `dt_bias` are [heads], float32 whatever the model's type,
    and `value_norm` is [value_dim].
    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        eps: float,
        norm: NormFactory,
    ) -> None:
        super().__init__()
        self.num_key_heads, self.num_heads, self.key_dim, self.value_dim = num_key_heads, num_heads, key_dim, value_dim
        self.conv_kernel, self.eps = conv_kernel, eps
        self.norm = norm(hidden_size)
        k_size, v_size = num_key_heads * key_dim, num_heads * value_dim
        self.in_proj = ColumnParallelLinear(hidden_size, k_size, k_size, v_size, v_size, num_heads, num_heads)
        self.value_norm = nn.Parameter(torch.empty(value_dim), requires_grad=False)
        self.out_proj = RowParallelLinear(v_size, hidden_size)
        self._checkpoint_heads, self._local_heads = num_heads, range(num_heads)
        self._checkpoint_channels = (k_size, k_size, v_size)
        self._local_channels = (range(k_size), range(k_size), range(v_size))
        self._allocate()

    @property
    def conv_channels(self) -> int:
        """Number of channels (queries, keys and values) of the convolution that this rank keeps."""
        return sum(map(len, self._local_channels))

    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's value heads and the key heads that they read."""
        key_heads = group.shard(self.num_key_heads, "key heads of Gated DeltaNet (linear_num_key_heads)")
        heads = group.shard(self.num_heads, "value heads of Gated DeltaNet (linear_num_value_heads)")
        self.num_key_heads, self.num_heads, self._local_heads = len(key_heads), len(heads), heads
        k_rows = range(key_heads.start * self.key_dim, key_heads.stop * self.key_dim)
        v_rows = range(heads.start * self.value_dim, heads.stop * self.value_dim)
        self._local_channels = k_rows, k_rows, v_rows
        self.in_proj.shard(k_rows, k_rows, v_rows, v_rows, heads, heads)
        self.out_proj.shard(v_rows, group)
        self._allocate()

    def forward(
        self, residual: ResidualStream, cache: tuple[torch.Tensor, torch.Tensor], metadata: AttentionMetadata
    ) -> None:
        """Add the layer's output to the residual stream. `cache` has this layer's convolution and recurrent states."""
        parameters = self.conv, self.a_log, self.dt_bias, self.value_norm, self.eps
        params = GatedDeltaParams(*parameters, self.num_key_heads, *cache)
        output = gated_delta_net(self.in_proj(*residual.read(self.norm)), params, metadata)
        self.out_proj.add_to(residual, output)

    def conv_loader(self) -> WeightLoader:
        """Return the loader of the checkpoint's convolution weight, [channels, 1, conv_kernel]."""
        weight = self.conv[:, None]
        if self.conv_channels == sum(self._checkpoint_channels):
            return weight
        targets = torch.split(weight, [len(channels) for channels in self._local_channels])
        shape = (sum(self._checkpoint_channels), 1, self.conv_kernel)
        return merged_shard_loader(shape, self._local_channels, self._checkpoint_channels, targets)

    def head_loader(self, target: torch.Tensor) -> WeightLoader:
        """Return a loader that copies this rank's heads of a checkpoint tensor [value heads] into `target` [heads]."""
        return shard_loader(target, (self._checkpoint_heads,), as_slice(self._local_heads))

    def _allocate(self) -> None:
        self.conv = nn.Parameter(torch.empty(self.conv_channels, self.conv_kernel), requires_grad=False)
        self.a_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32), requires_grad=False)
