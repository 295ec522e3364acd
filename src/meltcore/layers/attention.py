"""Self-attention over the paged KV cache."""

import torch
from torch import nn

from meltcore.kernels.activation import apply_sigmoid_gate
from meltcore.kernels.attention.metadata import AttentionMetadata, AttentionParams, HeadNorms
from meltcore.kernels.attention.paged import paged_attention
from meltcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from meltcore.layers.norm import NormFactory, WideHeadNorms
from meltcore.layers.residual import ResidualStream
from meltcore.layers.tensor_parallel import TensorParallelGroup


class Attention(nn.Module):
    """Computes residual + o_proj(attention(qkv_proj(norm(residual)))) with grouped queries.

    Args:
        qkv_bias: whether queries, keys and values have a bias (Qwen2).
        qk_norm: whether each head's query and key are normalized (Qwen3).
        wide_qk_norm: whether queries and keys are normalized over all heads together instead (OLMo 2).
        output_gate: whether each head's output is multiplied by the sigmoid of a gate (Qwen3.5). The first matrix of
            `qkv_proj` then holds the gates of all heads above the queries of all heads.
        sliding_window: the number of newest tokens that a query sees, including its own. None lets it see all tokens.
        scale: factor of the scores, by default head_dim^-0.5.
        post_norm: whether the output of `o_proj` is normalized before it is added (Gemma 3).
        pre_norm: whether the residual stream is normalized before it is read. OLMo 2 has norms only after the layers.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: NormFactory,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        output_gate: bool = False,
        sliding_window: int | None = None,
        scale: float | None = None,
        post_norm: bool = False,
        pre_norm: bool = True,
        wide_qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.output_gate = output_gate
        self.sliding_window = sliding_window
        self.norm = norm(hidden_size) if pre_norm else None
        self.post_norm = norm(hidden_size) if post_norm else None
        q_size, kv_size = (1 + output_gate) * num_heads * head_dim, num_kv_heads * head_dim
        self.qkv_proj = ColumnParallelLinear(hidden_size, q_size, kv_size, kv_size, bias=qkv_bias)
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size)
        self.q_norm = norm(head_dim) if qk_norm else None
        self.k_norm = norm(head_dim) if qk_norm else None
        self.wide_norms = WideHeadNorms(norm, q_size, kv_size) if wide_qk_norm else None

    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's heads. If there are fewer KV heads than ranks, several ranks keep the same KV head."""
        local_heads = group.shard(self.num_heads, "attention heads (num_attention_heads)")
        local_kv_heads = group.shard_or_replicate(self.num_kv_heads, "key-value heads (num_key_value_heads)")
        self.num_heads, self.num_kv_heads = len(local_heads), len(local_kv_heads)
        kv_rows = self._weight_rows(local_kv_heads)
        if self.wide_norms is not None:
            self.wide_norms.shard(self._weight_rows(local_heads), kv_rows, group)
        self.qkv_proj.shard(self._weight_rows(local_heads, 1 + self.output_gate), kv_rows, kv_rows)
        self.o_proj.shard(self._weight_rows(local_heads), group)

    def forward(
        self,
        residual: ResidualStream,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> None:
        """Add the layer's output to the residual stream.

        `positions` is [tokens]; `cache` has this layer's keys and values.
        """
        qkv = self.qkv_proj(*residual.read(self.norm))
        if self.output_gate:
            gates, qkv = qkv.tensor_split([self.num_heads * self.head_dim], dim=1)
        if self.wide_norms is not None:
            self.wide_norms(qkv)
        params = AttentionParams(self._head_norms(), rotary, *cache, self.scale, self.sliding_window)
        output = paged_attention(qkv, params, positions, metadata).flatten(1)
        if self.output_gate:
            output = apply_sigmoid_gate(output, gates)
        self.o_proj.add_to(residual, output, self.post_norm)

    def _weight_rows(self, local_heads: range, projections_per_head: int = 1) -> range:
        """Return the rows of a projection that belong to `local_heads`.

        `projections_per_head` is 2 when the projection also holds a gate of head_dim rows for each head, else 1.
        """
        rows_per_head = projections_per_head * self.head_dim
        return range(local_heads.start * rows_per_head, local_heads.stop * rows_per_head)

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
