"""Self-attention over the paged cache."""

import torch
from torch import nn

from meltcore.kernels.paged_attention import Segments, paged_attention, write_kv
from meltcore.kernels.rotary import apply_rotary
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
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))
        queries, keys, values = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        queries = apply_rotary(self.query_norm(queries), rotary, positions)
        keys = apply_rotary(self.key_norm(keys), rotary, positions)
        write_kv(keys, values, *cache, segments.slots)
        mixed = paged_attention(queries, *cache, segments, self.scale)
        return self.output(mixed.flatten(1))
