"""Qwen3, the dense family (Qwen3ForCausalLM; Qwen3 Technical Report, arXiv:2505.09388).

A decoder of pre-norm blocks: grouped-query attention with normalised queries and keys, then a gated feed-forward block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meltcore.errors import ConfigError
from meltcore.kernels.linear import linear
from meltcore.kernels.paged_attention import Segments
from meltcore.kernels.rotary import rotary_table
from meltcore.layers.attention import Attention
from meltcore.layers.mlp import GatedMLP
from meltcore.layers.norm import RMSNorm
from meltcore.models.cache import CacheGroup


@dataclass(frozen=True)
class Qwen3Config:
    """The fields of config.json that shape the network."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """From a parsed config.json. Raises ConfigError for a missing field or a variant that we do not compute."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        unsupported = {
            "attention_bias": bool(config.get("attention_bias")),
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        }
        for name, is_set in unsupported.items():
            if is_set:
                raise ConfigError(
                    f"config.json sets {name} to {config.get(name, rope)}, which qwen3 here does not compute"
                )
        values = {name: value for name, value in config.items() if value is not None}
        values.setdefault("rope_theta", rope.get("rope_theta"))
        values.setdefault("tie_word_embeddings", False)
        names = cls.__dataclass_fields__
        missing = [name for name in names if values.get(name) is None]
        if missing:
            raise ConfigError(f"config.json of a Qwen3 model lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in names})


class Block(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.attention = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
        )
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.rms_norm_eps)

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
    ) -> torch.Tensor:
        return self.mlp(self.attention(residual, positions, rotary, cache, segments))


class Qwen3(nn.Module):
    """hidden states in, logits out; the keys and values live outside, in the engine's paged cache."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = Qwen3Config.read(config)
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.num_hidden_layers))
        self.norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        if not self.config.tie_word_embeddings:
            self.untied_head = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.rotary = torch.empty(0)

    @property
    def head(self) -> torch.Tensor:
        return self.embedding if self.config.tie_word_embeddings else self.untied_head

    def prepare(self, max_model_len: int) -> None:
        """Build what is computed rather than loaded, on the device that the weights are on."""
        config = self.config
        self.rotary = rotary_table(config.head_dim, max_model_len, config.rope_theta, self.embedding.device)

    def cache_groups(self) -> list[CacheGroup]:
        config = self.config
        return [CacheGroup(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        segments: Segments,
    ) -> torch.Tensor:
        """token_ids, positions: [tokens] int64; caches: keys and values per layer. Returns [tokens, hidden_size]."""
        residual = self.embedding[token_ids]
        for block, cache in zip(self.blocks, caches, strict=True):
            residual = block(residual, positions, self.rotary, cache, segments)
        return self.norm(residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size] in the type of the weights."""
        return linear(hidden, self.head)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a published checkpoint goes: its name to our (view of a) parameter."""
        table: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            table["lm_head.weight"] = self.head
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            attention, mlp = block.attention, block.mlp
            layer = {
                "input_layernorm": attention.norm.weight,
                "self_attn.q_proj": attention.qkv.part(0),
                "self_attn.k_proj": attention.qkv.part(1),
                "self_attn.v_proj": attention.qkv.part(2),
                "self_attn.o_proj": attention.output.weight,
                "self_attn.q_norm": attention.query_norm.weight,
                "self_attn.k_norm": attention.key_norm.weight,
                "post_attention_layernorm": mlp.norm.weight,
                "mlp.gate_proj": mlp.gate_up.part(0),
                "mlp.up_proj": mlp.gate_up.part(1),
                "mlp.down_proj": mlp.down.weight,
            }
            table |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
        return table

    def ignored_tensor(self, name: str) -> bool:
        """Tensors a checkpoint may hold that this network does not read: the copy of a tied head."""
        return self.config.tie_word_embeddings and name == "lm_head.weight"
