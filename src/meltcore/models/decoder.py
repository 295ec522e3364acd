"""The decoder that the Qwen families share: pre-norm blocks of grouped-query attention and a gated feed-forward.

What tells the families apart stands in a file each; here it is the switches of DecoderConfig, the `experts` among which
a token's feed-forward is chosen, and the `recurrent` layers, which are Gated DeltaNet in the place of attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from meltcore.kernels.linear import linear
from meltcore.kernels.paged_attention import Segments
from meltcore.kernels.rotary import rotary_table
from meltcore.layers.attention import Attention
from meltcore.layers.delta_net import DeltaNet
from meltcore.layers.destination import Destination
from meltcore.layers.group import Group
from meltcore.layers.mlp import GatedMLP
from meltcore.layers.moe import RoutedMLP
from meltcore.layers.pieces import piece, within
from meltcore.layers.residual import Residual
from meltcore.layers.vocabulary import look_up
from meltcore.models.cache import CacheGroup, StateGroup
from meltcore.models.decoder_config import DecoderConfig
from meltcore.models.tensor_names import (
    FusedTensor,
    attention_tensors,
    delta_tensors,
    dense_tensors,
    expert_tensors,
    fused_expert_tensors,
)


class Block(nn.Module):
    """What mixes the tokens of a sequence, then a feed-forward; both add to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention = _attention(config, layer)
        self.mlp = _feed_forward(config, layer)
        self._rotary_dim = config.rotary_dim

    def forward(
        self,
        residual: Residual,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
    ) -> None:
        if isinstance(self.attention, DeltaNet):
            self.attention(residual, cache, segments)
        else:
            self.attention(residual, positions, rotary, cache, segments)
        self.mlp(residual)

    def divide(self, group: Group) -> None:
        self.attention.divide(group)
        self.mlp.divide(group)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        attention, mlp = self.attention, self.mlp
        table: dict[str, Destination] = {
            "input_layernorm.weight": attention.norm.destination,
            "post_attention_layernorm.weight": mlp.norm.destination,
        }
        if isinstance(attention, DeltaNet):
            table |= delta_tensors(attention)
        else:
            table |= attention_tensors(attention, self._rotary_dim)
        return table | (expert_tensors(mlp) if isinstance(mlp, RoutedMLP) else dense_tensors(mlp))

    def fused_tensors(self) -> dict[str, FusedTensor]:
        return fused_expert_tensors(self.mlp) if isinstance(self.mlp, RoutedMLP) else {}


def _attention(config: DecoderConfig, layer: int) -> Attention | DeltaNet:
    recurrent = config.recurrent
    if recurrent is not None and layer in recurrent.layers:
        return DeltaNet(
            config.hidden_size,
            recurrent.linear_num_key_heads,
            recurrent.linear_num_value_heads,
            recurrent.linear_key_head_dim,
            recurrent.linear_value_head_dim,
            recurrent.linear_conv_kernel_dim,
            config.rms_norm_eps,
            config.norm,
        )
    return Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.norm,
        qkv_bias=config.qkv_bias,
        head_norms=config.head_norms,
        output_gate=config.output_gate,
    )


def _feed_forward(config: DecoderConfig, layer: int) -> GatedMLP | RoutedMLP:
    experts = config.experts
    if experts is None or layer in experts.dense_layers:
        assert config.intermediate_size is not None
        return GatedMLP(config.hidden_size, config.intermediate_size, config.norm)
    return RoutedMLP(
        config.hidden_size,
        experts.moe_intermediate_size,
        experts.num_experts,
        experts.num_experts_per_tok,
        config.norm,
        renormalised=experts.norm_topk_prob,
        shared=experts.shared_expert,
    )


class Decoder(nn.Module):
    """hidden states in, logits out; what is kept of a sequence lives outside, in the engine's caches."""

    prefix = "model."  # of the names of a checkpoint's tensors, but for the head

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = config.norm(config.hidden_size)
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
        for block in self._blocks():
            block.divide(group)

    def prepare(self, max_model_len: int) -> None:
        """Build what is computed rather than loaded, on the device that the weights are on."""
        config, device = self.config, self.embedding.device
        self.rotary = rotary_table(config.head_dim, max_model_len, config.rope_theta, device, config.rotary_dim)

    def cache_groups(self) -> list[CacheGroup | StateGroup]:
        """What the layers keep of a sequence: one CacheGroup, and a StateGroup where some are recurrent."""
        layers = [block.attention for block in self._blocks()]
        attention = [layer for layer in layers if isinstance(layer, Attention)]
        recurrent = [layer for layer in layers if isinstance(layer, DeltaNet)]
        groups: list[CacheGroup | StateGroup] = [
            CacheGroup(len(attention), attention[0].kv_heads, attention[0].head_dim)
        ]
        if recurrent:
            one = recurrent[0]
            sizes = one.conv_channels, one.kernel, one.heads, one.key_dim, one.value_dim
            groups.append(StateGroup(len(recurrent), *sizes))
        return groups

    def recurrent_layers(self) -> frozenset[int]:
        """The layers whose cache is (conv_states, states) instead of keys and values."""
        return self.config.recurrent.layers if self.config.recurrent else frozenset()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        segments: Segments,
    ) -> torch.Tensor:
        """token_ids, positions: [tokens] int64; caches: each layer's keys and values, or conv_states and states.

        Returns [tokens, hidden_size].
        """
        residual = look_up(self.embedding, token_ids, self._group)
        for block, cache in zip(self.blocks, caches, strict=True):
            block(residual, positions, self.rotary, cache, segments)
        return residual.normalised(self.norm)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size] in the type of the weights, or this rank's share of it.

        out: where to put them, contiguous; memory of their own otherwise.
        """
        return linear(hidden, self.head, out=out)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Where each tensor of a published checkpoint goes: its name to our (view of a) parameter."""
        table: dict[str, Destination] = {
            f"{self.prefix}embed_tokens.weight": self._rows_of_all(self.embedding),
            f"{self.prefix}norm.weight": self.norm.destination,
        }
        if not self.config.tie_word_embeddings:
            table["lm_head.weight"] = self._rows_of_all(self.head)
        for index, block in enumerate(self._blocks()):
            prefix = f"{self.prefix}layers.{index}."
            table |= {prefix + name: tensor for name, tensor in block.checkpoint_tensors().items()}
        return table

    def fused_tensors(self) -> dict[str, FusedTensor]:
        """Further names, of tensors that hold several of `checkpoint_tensors` at once."""
        table: dict[str, FusedTensor] = {}
        for index, block in enumerate(self._blocks()):
            prefix = f"{self.prefix}layers.{index}."
            for name, (tensor, stands_for) in block.fused_tensors().items():
                table[prefix + name] = FusedTensor(tensor, tuple(prefix + part for part in stands_for))
        return table

    def ignored_tensor(self, name: str) -> bool:
        """Tensors a checkpoint may hold that this network does not read: the copy of a tied head."""
        return self.config.tie_word_embeddings and name == "lm_head.weight"

    def _rows_of_all(self, own: torch.Tensor) -> Destination:
        """Where a tensor with a row for each token of the vocabulary goes."""
        return piece(own, (self.config.vocab_size, own.shape[1]), within(self._vocabulary))

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block
