"""The decoder that the dense Qwen families share: pre-norm blocks of grouped-query attention and a gated feed-forward.

What tells the families apart stands in a file each; here it is two switches, `qkv_bias` and `head_norms`.
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
from meltcore.layers.weight import Destination
from meltcore.models.cache import CacheGroup


@dataclass(frozen=True)
class DecoderConfig:
    """The fields of config.json that shape the network, and the switches of its family.

    qkv_bias: queries, keys and values have a bias; head_norms: each head's query and key are normalised.
    """

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
    qkv_bias: bool
    head_norms: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], *, qkv_bias: bool, head_norms: bool) -> DecoderConfig:
        """From a parsed config.json. Raises ConfigError for a missing field or a variant that we do not compute."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        unsupported = {
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        }
        for name, is_set in unsupported.items():
            if is_set:
                raise ConfigError(
                    f"config.json sets {name} to {config.get(name, rope)}, which this decoder does not compute"
                )
        values = {name: value for name, value in config.items() if value is not None}
        values |= {"qkv_bias": qkv_bias, "head_norms": head_norms}
        values.setdefault("rope_theta", rope.get("rope_theta"))
        values.setdefault("tie_word_embeddings", False)
        names = cls.__dataclass_fields__
        missing = [name for name in names if values.get(name) is None]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in names})


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
            qkv_bias=config.qkv_bias,
            head_norms=config.head_norms,
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

    def checkpoint_tensors(self) -> dict[str, Destination]:
        attention, mlp = self.attention, self.mlp
        table: dict[str, Destination] = {
            "input_layernorm.weight": attention.norm.weight,
            "self_attn.q_proj.weight": attention.qkv.part(0),
            "self_attn.k_proj.weight": attention.qkv.part(1),
            "self_attn.v_proj.weight": attention.qkv.part(2),
            "self_attn.o_proj.weight": attention.output.part(0),
            "post_attention_layernorm.weight": mlp.norm.weight,
            "mlp.gate_proj.weight": mlp.gate_up.part(0),
            "mlp.up_proj.weight": mlp.gate_up.part(1),
            "mlp.down_proj.weight": mlp.down.part(0),
        }
        if attention.qkv.bias is not None:
            names = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
            table |= zip(names, attention.qkv.bias.split(attention.qkv.output_sizes), strict=True)
        if attention.query_norm is not None and attention.key_norm is not None:
            table["self_attn.q_norm.weight"] = attention.query_norm.weight
            table["self_attn.k_norm.weight"] = attention.key_norm.weight
        return table


class Decoder(nn.Module):
    """hidden states in, logits out; the keys and values live outside, in the engine's paged cache."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
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

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Where each tensor of a published checkpoint goes: its name to our (view of a) parameter."""
        table: dict[str, Destination] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            table["lm_head.weight"] = self.head
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            table |= {f"model.layers.{index}.{name}": tensor for name, tensor in block.checkpoint_tensors().items()}
        return table

    def ignored_tensor(self, name: str) -> bool:
        """Tensors a checkpoint may hold that this network does not read: the copy of a tied head."""
        return self.config.tie_word_embeddings and name == "lm_head.weight"
