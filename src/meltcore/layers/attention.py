"""Self-attention over the paged cache."""

import torch
from torch import nn

from meltcore.kernels.paged_attention import Segments, paged_attention
from meltcore.kernels.qkv import HeadNorms
from meltcore.layers.linear import Linear
from meltcore.layers.norm import RMSNorm


class Attention(nn.Module):
    """Grouped-query attention with per-head query and key norms (Qwen3's form)."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.qkv = Linear(hidden_size, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.output = Linear(heads * head_dim, hidden_size)
        self.query_norm = RMSNorm(head_dim, eps)
        self.key_norm = RMSNorm(head_dim, eps)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
    ) -> torch.Tensor:
        """hidden: [tokens, hidden_size]; positions: [tokens]; cache: this layer's keys and values (paged)."""
        norms = HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
        mixed = paged_attention(self.qkv(hidden), norms, rotary, positions, *cache, segments, self.scale)
        return self.output(mixed.flatten(1))
