"""Self-attention over the paged cache."""

import torch
from torch import nn

from meltcore.kernels.output_gate import gate_output
from meltcore.kernels.paged_attention import Segments, paged_attention
from meltcore.kernels.qkv import HeadNorms
from meltcore.layers.group import Group
from meltcore.layers.linear import Linear
from meltcore.layers.norm import MakeNorm
from meltcore.layers.residual import Residual


class Attention(nn.Module):
    """residual + output(attention(qkv(norm(residual)))), with grouped queries.

    qkv_bias: queries, keys and values have a bias (Qwen2's form); head_norms: each head's query and key are normalised
    (Qwen3's form); output_gate: what comes out of a head is multiplied by the sigmoid of a gate (Qwen3.5's form). The
    first part of `qkv` is then all heads' gates above all queries.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norm: MakeNorm,
        *,
        qkv_bias: bool,
        head_norms: bool,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.output_gate = output_gate
        self.norm = norm(hidden_size)
        queries = (1 + output_gate) * heads * head_dim
        self.qkv = Linear(hidden_size, queries, kv_heads * head_dim, kv_heads * head_dim, bias=qkv_bias)
        self.output = Linear(heads * head_dim, hidden_size)
        self.query_norm = norm(head_dim) if head_norms else None
        self.key_norm = norm(head_dim) if head_norms else None

    def divide(self, group: Group) -> None:
        """Keep this rank's share of the heads; keys and values of fewer heads than ranks are held by several."""
        queries = group.share(self.heads, "attention heads (num_attention_heads)")
        keys = group.share_or_copy(self.kv_heads, "key-value heads (num_key_value_heads)")
        self.heads, self.kv_heads = len(queries), len(keys)
        gates = 1 + self.output_gate
        self.qkv.keep_outputs(self._columns(queries, gates), self._columns(keys), self._columns(keys))
        self.output.keep_inputs(self._columns(queries), group)

    def forward(
        self,
        residual: Residual,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
    ) -> None:
        """Add to the residual stream. positions: [tokens]; cache: this layer's."""
        qkv = self.qkv(*residual.read(self.norm))
        if self.output_gate:
            gates, qkv = qkv.tensor_split([self.heads * self.head_dim], dim=1)
        mixed = paged_attention(qkv, self._head_norms(), rotary, positions, *cache, segments, self.scale).flatten(1)
        if self.output_gate:
            mixed = gate_output(mixed, gates)
        self.output.add_to(residual, mixed)

    def _columns(self, heads: range, parts: int = 1) -> range:
        """parts: how many times a head's size, one after the other, belong to it."""
        size = parts * self.head_dim
        return range(heads.start * size, heads.stop * size)

    def _head_norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
