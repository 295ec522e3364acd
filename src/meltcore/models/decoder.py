"""The decoder that the Qwen families share: pre-norm blocks of grouped-query attention and a gated feed-forward.

What tells the families apart stands in a file each; here it is two switches, `qkv_bias` and `head_norms`, and the
`experts` among which a token's feed-forward is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from meltcore.errors import ConfigError
from meltcore.kernels.linear import linear
from meltcore.kernels.paged_attention import Segments
from meltcore.kernels.rotary import rotary_table
from meltcore.layers.attention import Attention
from meltcore.layers.group import Group
from meltcore.layers.mlp import GatedMLP
from meltcore.layers.moe import RoutedMLP
from meltcore.layers.norm import RMSNorm
from meltcore.layers.pieces import piece, within
from meltcore.layers.vocabulary import look_up
from meltcore.layers.weight import Destination
from meltcore.models.cache import CacheGroup, StateGroup


@dataclass(frozen=True)
class ExpertsConfig:
    """The fields of config.json that shape routed experts. dense_layers: those with an ordinary feed-forward."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: frozenset[int]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ExpertsConfig:
        """From a parsed config.json, whose number of experts has one of two names. Raises ConfigError for a missing
        field, or more experts to a token than there are."""
        values = {"norm_topk_prob": False, **config}
        values["num_experts"] = values.get("num_experts") or values.get("num_local_experts")
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        missing = [name for name in (*names, "num_hidden_layers") if values.get(name) is None]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        experts, choices = values["num_experts"], values["num_experts_per_tok"]
        if not 1 <= choices <= experts:
            raise ConfigError(f"config.json: num_experts_per_tok is from 1 to num_experts, {experts}; got {choices}")
        step, layers = values.get("decoder_sparse_step") or 1, range(values["num_hidden_layers"])
        dense = {layer for layer in layers if (layer + 1) % step} | set(values.get("mlp_only_layers") or ())
        return cls(**{name: values[name] for name in names}, dense_layers=frozenset(dense))


@dataclass(frozen=True)
class DecoderConfig:
    """The fields of config.json that shape the network, and the switches of its family.

    qkv_bias: queries, keys and values have a bias; head_norms: each head's query and key are normalised; experts: what
    feed-forwards choose from, None for a dense network.
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
    experts: ExpertsConfig | None = None

    @classmethod
    def read(
        cls, config: Mapping[str, Any], *, qkv_bias: bool, head_norms: bool, experts: ExpertsConfig | None = None
    ) -> DecoderConfig:
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
        names = [name for name in cls.__dataclass_fields__ if name != "experts"]
        missing = [name for name in names if values.get(name) is None]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in names}, experts=experts)


class FusedTensor(NamedTuple):
    """A tensor in which some checkpoints hold several of ours. stands_for: the names of those."""

    tensor: Destination
    stands_for: tuple[str, ...]


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
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
        self.mlp = _feed_forward(config, layer)

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
    ) -> torch.Tensor:
        return self.mlp(self.attention(residual, positions, rotary, cache, segments))

    def divide(self, group: Group) -> None:
        self.attention.divide(group)
        self.mlp.divide(group)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        attention, mlp = self.attention, self.mlp
        table: dict[str, Destination] = {
            "input_layernorm.weight": attention.norm.weight,
            "self_attn.q_proj.weight": attention.qkv.part(0),
            "self_attn.k_proj.weight": attention.qkv.part(1),
            "self_attn.v_proj.weight": attention.qkv.part(2),
            "self_attn.o_proj.weight": attention.output.part(0),
            "post_attention_layernorm.weight": mlp.norm.weight,
        }
        table |= _expert_tensors(mlp) if isinstance(mlp, RoutedMLP) else _dense_tensors(mlp)
        if attention.qkv.bias is not None:
            for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
                table[f"self_attn.{name}.bias"] = attention.qkv.bias_part(part)
        if attention.query_norm is not None and attention.key_norm is not None:
            table["self_attn.q_norm.weight"] = attention.query_norm.weight
            table["self_attn.k_norm.weight"] = attention.key_norm.weight
        return table

    def fused_tensors(self) -> dict[str, FusedTensor]:
        if not isinstance(self.mlp, RoutedMLP):
            return {}
        names = [name for name in _expert_tensors(self.mlp) if ".experts." in name]
        down = tuple(name for name in names if "down_proj" in name)
        gate_up = tuple(name for name in names if "down_proj" not in name)
        return {
            "mlp.experts.gate_up_proj": FusedTensor(self.mlp.gate_up_of_all(), gate_up),
            "mlp.experts.down_proj": FusedTensor(self.mlp.down_of_all(), down),
        }


def _feed_forward(config: DecoderConfig, layer: int) -> GatedMLP | RoutedMLP:
    experts = config.experts
    if experts is None or layer in experts.dense_layers:
        return GatedMLP(config.hidden_size, config.intermediate_size, config.rms_norm_eps)
    return RoutedMLP(
        config.hidden_size,
        experts.moe_intermediate_size,
        experts.num_experts,
        experts.num_experts_per_tok,
        config.rms_norm_eps,
        renormalised=experts.norm_topk_prob,
    )


def _dense_tensors(mlp: GatedMLP) -> dict[str, Destination]:
    return {
        "mlp.gate_proj.weight": mlp.gate_up.part(0),
        "mlp.up_proj.weight": mlp.gate_up.part(1),
        "mlp.down_proj.weight": mlp.down.part(0),
    }


def _expert_tensors(mlp: RoutedMLP) -> dict[str, Destination]:
    table: dict[str, Destination] = {"mlp.gate.weight": mlp.router}
    for expert in range(mlp.experts):
        table |= {
            f"mlp.experts.{expert}.gate_proj.weight": mlp.gate_part(expert),
            f"mlp.experts.{expert}.up_proj.weight": mlp.up_part(expert),
            f"mlp.experts.{expert}.down_proj.weight": mlp.down_part(expert),
        }
    return table


class Decoder(nn.Module):
    """hidden states in, logits out; the keys and values live outside, in the engine's paged cache."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.untied_head = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.rotary = torch.empty(0)
        self._group: Group | None = None
        self._vocabulary = range(config.vocab_size)

    @property
    def head(self) -> torch.Tensor:
        return self.embedding if self.config.tie_word_embeddings else self.untied_head

    def divide(self, group: Group) -> None:
        """Keep one rank's share of every layer and of the vocabulary, before anything is loaded.

        `logits` are those of its own tokens from now on. Raises ConfigError where not all can have the same share.
        """
        self._group = group
        self._vocabulary = group.share(self.config.vocab_size, "tokens of the vocabulary (vocab_size)")
        shape = (len(self._vocabulary), self.config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape), requires_grad=False)
        if not self.config.tie_word_embeddings:
            self.untied_head = nn.Parameter(torch.empty(shape), requires_grad=False)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.divide(group)

    def prepare(self, max_model_len: int) -> None:
        """Build what is computed rather than loaded, on the device that the weights are on."""
        config = self.config
        self.rotary = rotary_table(config.head_dim, max_model_len, config.rope_theta, self.embedding.device)

    def cache_groups(self) -> list[CacheGroup | StateGroup]:
        """What the layers keep of a sequence: one CacheGroup, and a StateGroup where some are recurrent."""
        first = self.blocks[0]
        assert isinstance(first, Block)
        return [CacheGroup(len(self.blocks), first.attention.kv_heads, first.attention.head_dim)]

    def recurrent_layers(self) -> frozenset[int]:
        """The layers whose cache is (conv_states, states) instead of keys and values."""
        return frozenset()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        segments: Segments,
    ) -> torch.Tensor:
        """token_ids, positions: [tokens] int64; caches: keys and values per layer. Returns [tokens, hidden_size]."""
        residual = look_up(self.embedding, token_ids, self._group)
        for block, cache in zip(self.blocks, caches, strict=True):
            residual = block(residual, positions, self.rotary, cache, segments)
        return self.norm(residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size] in the type of the weights, or this rank's share of it."""
        return linear(hidden, self.head)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Where each tensor of a published checkpoint goes: its name to our (view of a) parameter."""
        table: dict[str, Destination] = {
            "model.embed_tokens.weight": self._rows_of_all(self.embedding),
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            table["lm_head.weight"] = self._rows_of_all(self.head)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            table |= {f"model.layers.{index}.{name}": tensor for name, tensor in block.checkpoint_tensors().items()}
        return table

    def fused_tensors(self) -> dict[str, FusedTensor]:
        """Further names, of tensors that hold several of `checkpoint_tensors` at once."""
        table: dict[str, FusedTensor] = {}
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            prefix = f"model.layers.{index}."
            for name, (tensor, stands_for) in block.fused_tensors().items():
                table[prefix + name] = FusedTensor(tensor, tuple(prefix + part for part in stands_for))
        return table

    def ignored_tensor(self, name: str) -> bool:
        """Tensors a checkpoint may hold that this network does not read: the copy of a tied head."""
        return self.config.tie_word_embeddings and name == "lm_head.weight"

    def _rows_of_all(self, own: torch.Tensor) -> Destination:
        """Where a tensor with a row for each token of the vocabulary goes."""
        return piece(own, (self.config.vocab_size, own.shape[1]), within(self._vocabulary))
