"""Self-attention over the paged cache."""

import torch
from torch import nn

from meltcore.kernels.paged_attention import Segments, paged_attention
from meltcore.kernels.qkv import HeadNorms
from meltcore.layers.group import Group
from meltcore.layers.linear import Linear
from meltcore.layers.norm import RMSNorm


class Attention(nn.Module):
    """residual + output(attention(qkv(norm(residual)))), with grouped queries.

    qkv_bias: queries, keys and values have a bias (Qwen2's form); head_norms: each head's query and key are normalised
    (Qwen3's form).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        qkv_bias: bool,
        head_norms: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.norm = RMSNorm(hidden_size, eps)
        self.qkv = Linear(hidden_size, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, bias=qkv_bias)
        self.output = Linear(heads * head_dim, hidden_size)
        self.query_norm = RMSNorm(head_dim, eps) if head_norms else None
        self.key_norm = RMSNorm(head_dim, eps) if head_norms else None

    def divide(self, group: Group) -> None:
        """Keep this rank's share of the heads; keys and values of fewer heads than ranks are held by several."""
        queries = group.share(self.heads, "attention heads (num_attention_heads)")
        keys = group.share_or_copy(self.kv_heads, "key-value heads (num_key_value_heads)")
        self.heads, self.kv_heads = len(queries), len(keys)
        self.qkv.keep_outputs(self._columns(queries), self._columns(keys), self._columns(keys))
        self.output.keep_inputs(self._columns(queries), group)

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
    ) -> torch.Tensor:
        """residual: [tokens, hidden_size], changed in place and returned; positions: [tokens]; cache: this layer's."""
        qkv = self.qkv(residual, self.norm)
        mixed = paged_attention(qkv, self._head_norms(), rotary, positions, *cache, segments, self.scale)
        return self.output.add_to(residual, mixed.flatten(1))

    def _columns(self, heads: range) -> range:
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)

    def _head_norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
