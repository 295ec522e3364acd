"""Self-attention over the paged cache."""

import torch
from torch import nn

from meltcore.kernels.paged_attention import Segments, paged_attention
from meltcore.kernels.qkv import HeadNorms
from meltcore.layers.linear import Linear
from meltcore.layers.norm import RMSNorm


class Attention(nn.Module):
    """residual + output(attention(qkv(norm(residual)))), with grouped queries and head norms (as in Qwen3)."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.norm = RMSNorm(hidden_size, eps)
        self.qkv = Linear(hidden_size, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.output = Linear(heads * head_dim, hidden_size)
        self.query_norm = RMSNorm(head_dim, eps)
        self.key_norm = RMSNorm(head_dim, eps)

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
    ) -> torch.Tensor:
        """residual: [tokens, hidden_size], changed in place and returned; positions: [tokens]; cache: this layer's."""
        norms = HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
        qkv = self.qkv(residual, self.norm)
        mixed = paged_attention(qkv, norms, rotary, positions, *cache, segments, self.scale)
        return self.output.add_to(residual, mixed.flatten(1))
