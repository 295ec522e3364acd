"""IndicTrans2: an encoder-decoder that translates between English and 22 Indian languages.

It is fairseq's pre-norm transformer: LayerNorms with biases, biases in all linear layers, sinusoidal positions, and
embeddings scaled by the square root of their size. Encoder and decoder have separate vocabularies. The distilled
checkpoints normalize embeddings, and the decoder's embedding is also the head. Paper: https://arxiv.org/abs/2305.16307.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from meltcore.kernels.attention.beam import beam_cross_attention, beam_self_attention
from meltcore.kernels.attention.packed import MAX_HEAD_DIM, packed_attention
from meltcore.kernels.launch import use_triton
from meltcore.kernels.layer_norm import add_layer_norm
from meltcore.layers.embedding import make_embedding
from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.configs.task_configs import IndicTrans2Config

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}
PAD_ID, EOS_ID = 1, 2  # as in fairseq; the end token is the decoder's first input too
_FIRST_POSITION = PAD_ID + 1
_MAX_WAVELENGTH = 10_000.0


class SelfAttention(nn.Module):
    """Attention of a sequence over itself, with the norm before it. Query, key and value are one matrix."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [rows, heads, positions, head_dim] of hidden [rows, positions, size]."""
        qkv = self.qkv_proj(self.norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        return tuple(qkv.permute(2, 0, 3, 1, 4).unbind(0))

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the output projection, [rows, positions, size], of `attended` [rows, heads, positions, head_dim]."""
        projected: torch.Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def tensors(self, prefix: str) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor, including the norm's, by the tensor's name."""
        return {
            **norm_tensors(f"{prefix}self_attn_layer_norm", self.norm),
            **linear_tensors([f"{prefix}self_attn.{part}_proj" for part in "qkv"], self.qkv_proj),
            **linear_tensors([f"{prefix}self_attn.out_proj"], self.out_proj),
        }


class CrossAttention(nn.Module):
    """Attention of the decoder over the encoded source, with the norm before it."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(hidden_size)
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.kv_proj = nn.Linear(hidden_size, 2 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def keys_and_values(self, encoded: torch.Tensor) -> torch.Tensor:
        """Return keys and values [2, rows, heads, positions, head_dim] of encoded sources [rows, positions, size]."""
        keys_values: torch.Tensor = self.kv_proj(encoded)
        split: torch.Tensor = keys_values.unflatten(-1, (2, self.num_heads, -1))  # torch has no types for it
        return split.permute(2, 0, 3, 1, 4)

    def forward(self, normed: torch.Tensor, cross_kv: torch.Tensor, step: DecodeStep) -> torch.Tensor:
        """Return the output [rows, beams, size] for normalized hidden states.

        `DecoderLayer.forward` explains cross_kv.
        """
        queries = self.q_proj(normed).unflatten(-1, (self.num_heads, -1))
        projected: torch.Tensor = self.out_proj(
            beam_cross_attention(queries, cross_kv, step.slots, step.source_lengths, step.max_source)
        )
        return projected

    def tensors(self, prefix: str) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor, including the norm's, by the tensor's name."""
        return {
            **norm_tensors(f"{prefix}encoder_attn_layer_norm", self.norm),
            **linear_tensors([f"{prefix}encoder_attn.q_proj"], self.q_proj),
            **linear_tensors([f"{prefix}encoder_attn.{part}_proj" for part in "kv"], self.kv_proj),
            **linear_tensors([f"{prefix}encoder_attn.out_proj"], self.out_proj),
        }


class FeedForward(nn.Module):
    """Two linear layers with an activation between, and the norm before them."""

    def __init__(self, hidden_size: int, ffn_size: int, activation: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.fc1 = nn.Linear(hidden_size, ffn_size)
        self.fc2 = nn.Linear(ffn_size, hidden_size)
        self._activation = _ACTIVATIONS[activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the block's output [..., size], which the caller adds to `hidden`."""
        return self.of_normed(self.norm(hidden))

    def of_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the block's output for hidden states whose norm is `normed`. The caller adds the output to them."""
        added: torch.Tensor = self.fc2(self._activation(self.fc1(normed)))
        return added

    def tensors(self, prefix: str) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor, including the norm's, by the tensor's name."""
        return {
            **norm_tensors(f"{prefix}final_layer_norm", self.norm),
            **linear_tensors([f"{prefix}fc1"], self.fc1),
            **linear_tensors([f"{prefix}fc2"], self.fc2),
        }


class Embedding(nn.Module):
    """Embeds tokens and adds their positions. `prepare` builds the table of positions."""

    def __init__(self, config: IndicTrans2Config, vocab_size: int) -> None:
        super().__init__()
        self.tokens = make_embedding(vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size) if config.layernorm_embedding else None
        self._scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0

    def prepare(self, num_positions: int) -> None:
        """Build the table: zeros for padding, then a row per position with sines of all frequencies and cosines."""
        weight = self.tokens.weight
        half = weight.shape[1] // 2
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(_MAX_WAVELENGTH) / (half - 1)))
        angles = torch.arange(_FIRST_POSITION, _FIRST_POSITION + num_positions)[:, None] * frequencies
        self._positions = functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, 0, 1, 0)).to(weight)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return embeddings with positions, [rows, columns, size]. token_ids: [rows, columns].

        Positions count from 0 and are broadcast to that shape.
        """
        rows = torch.where(token_ids == PAD_ID, 0, positions + 1)
        hidden: torch.Tensor = self.tokens(token_ids) * self._scale + self._positions[rows]
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden


class EncoderLayer(nn.Module):
    """A layer of the encoder."""

    def __init__(self, config: IndicTrans2Config) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config.hidden_size, config.encoder.num_heads)
        self.mlp = FeedForward(config.hidden_size, config.encoder.ffn_size, config.activation)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the new hidden states [rows, positions, size]. mask: [rows, 1, 1, positions] bool."""
        queries, keys, values = self.self_attn.project(hidden)
        attended = functional.scaled_dot_product_attention(queries, keys, values, mask)
        hidden = hidden + self.self_attn.output(attended)
        return hidden.add(self.mlp(hidden))

    def forward_packed(self, hidden: torch.Tensor, normed: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward's output [tokens, size], which the caller adds to `hidden`.

        Args:
            hidden: [tokens, size], changed in place.
            normed: the norm of `hidden`.
            tiles: the tiles of rows from `make_row_tiles`.
        """
        attended = packed_attention(self.self_attn.qkv_proj(normed), tiles, self.self_attn.num_heads)
        return self.mlp.of_normed(_add_norm(hidden, self.self_attn.out_proj(attended), self.mlp.norm))


class DecoderLayer(nn.Module):
    """A layer of the decoder, for one new position of each beam."""

    def __init__(self, config: IndicTrans2Config) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config.hidden_size, config.decoder.num_heads)
        self.cross_attn = CrossAttention(config.hidden_size, config.decoder.num_heads)
        self.mlp = FeedForward(config.hidden_size, config.decoder.ffn_size, config.activation)

    def forward(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        step: DecodeStep,
        self_kv: torch.Tensor,
        cross_kv: torch.Tensor,
    ) -> torch.Tensor:
        """Return the feed-forward's output, which the caller adds to `hidden`. Write keys and values to `self_kv`.

        Args:
            hidden: [rows, beams, size], changed in place.
            normed: the norm of `hidden`.
            step: the inputs that all layers share.
            self_kv: [2, slots, heads, positions, beams, head_dim].
            cross_kv: [2, slots, heads, source positions, head_dim].
        """
        attended = beam_self_attention(
            self.self_attn.qkv_proj(normed).unflatten(-1, (3, self.self_attn.num_heads, -1)),
            self_kv,
            step.writers,
            step.slots,
            step.positions,
            step.num_positions,
        )
        normed = _add_norm(hidden, self.self_attn.out_proj(attended), self.cross_attn.norm)
        normed = _add_norm(hidden, self.cross_attn(normed, cross_kv, step), self.mlp.norm)
        return self.mlp.of_normed(normed)


@dataclass(frozen=True)
class DecodeStep:
    """The inputs that all layers of the decoder share in one step.

    Args:
        token_ids: [rows, beams] int64.
        slots: [rows] int64, the slots of each row's keys and values.
        positions: [rows] int64, the positions of the new tokens.
        writers: [slots, beams, positions] int8, the beam that wrote each position of a beam's prefix.
        source_lengths: [rows] int64.
        num_positions: an upper bound of positions + 1.
        max_source: an upper bound of source_lengths.
    """

    token_ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    num_positions: int
    writers: torch.Tensor
    source_lengths: torch.Tensor
    max_source: int


class IndicTrans2(nn.Module):
    """The whole model. Weights must be loaded and `prepare` called before it is used."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Build the network of a parsed config.json. Raises ConfigError for unsupported configurations."""
        super().__init__()
        self.config = config = IndicTrans2Config.read(values)
        self.encoder_embedding = Embedding(config, config.encoder.vocab_size)
        self.encoder_layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder.num_layers))
        self.encoder_norm = nn.LayerNorm(config.hidden_size)
        self.decoder_embedding = Embedding(config, config.decoder.vocab_size)
        self.decoder_layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder.num_layers))
        self.decoder_norm = nn.LayerNorm(config.hidden_size)
        head = nn.Linear(config.hidden_size, config.decoder.vocab_size, bias=False)
        self.lm_head = None if config.tie_head else head

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.decoder_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.decoder_norm.weight.device

    @property
    def is_packed(self) -> bool:
        """Whether kernels encode sources of different lengths without padding, in shapes that depend on no length."""
        head_dim = self.config.hidden_size // self.config.encoder.num_heads
        return use_triton(self.decoder_norm.weight) and self.dtype.itemsize == 2 and head_dim <= MAX_HEAD_DIM

    def prepare(self) -> None:
        """Build computed tensors. Weights must not change afterwards."""
        self.encoder_embedding.prepare(self.config.max_source_positions)
        self.decoder_embedding.prepare(self.config.max_target_positions)
        self.requires_grad_(False).eval()

    def encode(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the encoded sources [rows, positions, size].

        token_ids: [rows, positions] int64, padded at the end with any token; lengths: [rows] int64, at least 1.
        """
        positions = torch.arange(token_ids.shape[1], device=self.device)
        mask = (positions < lengths[:, None])[:, None, None]
        hidden = self.encoder_embedding(token_ids, positions)
        for layer in self.encoder_layers:
            hidden = layer(hidden, mask)
        encoded: torch.Tensor = self.encoder_norm(hidden)
        return encoded

    def encode_packed(self, token_ids: torch.Tensor, positions: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Return the encoded sources [tokens, size] of sources that lie one after another without padding.

        Args:
            token_ids: [tokens].
            positions: [tokens], the position of each token in its source.
            tiles: the tiles of the sources from `make_row_tiles`.
        """
        hidden = self.encoder_embedding(token_ids, positions)
        layers = cast("list[EncoderLayer]", list(self.encoder_layers))
        norms = [*(layer.self_attn.norm for layer in layers), self.encoder_norm]
        normed: torch.Tensor = norms[0](hidden)
        for layer, next_norm in zip(layers, norms[1:], strict=True):
            normed = _add_norm(hidden, layer.forward_packed(hidden, normed, tiles), next_norm)
        return normed

    def cross_keys_values(self, encoded: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each decoder layer's keys and values of the sources: [2, rows, heads, positions, head_dim].

        Layers are computed one at a time: all layers together would take as much memory as the rest of the encoder.
        """
        for layer in self.decoder_layers:
            yield layer.cross_attn.keys_and_values(encoded)  # type: ignore[union-attr, operator]

    def decode(self, step: DecodeStep, self_kv: torch.Tensor, cross_kv: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens [rows, beams, decoder vocab_size].

        `self_kv` and `cross_kv` have the shapes in `DecoderLayer.forward`, with the layers as an additional first
        dimension.
        """
        hidden = self.decoder_embedding(step.token_ids, step.positions[:, None])
        layers = cast("list[DecoderLayer]", list(self.decoder_layers))
        norms = [*(layer.self_attn.norm for layer in layers), self.decoder_norm]
        normed = norms[0](hidden)
        for layer, next_norm, *caches in zip(layers, norms[1:], self_kv, cross_kv, strict=True):
            normed = _add_norm(hidden, layer(hidden, normed, step, *caches), next_norm)
        head = self.decoder_embedding.tokens if self.lm_head is None else self.lm_head
        return functional.linear(normed, head.weight)

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor of a published checkpoint, by the tensor's name."""
        loaders: dict[str, WeightLoader] = {}
        for side, embedding, layers, norm in (
            ("encoder", self.encoder_embedding, self.encoder_layers, self.encoder_norm),
            ("decoder", self.decoder_embedding, self.decoder_layers, self.decoder_norm),
        ):
            loaders[f"model.{side}.embed_tokens.weight"] = embedding.tokens.weight.data
            if embedding.norm is not None:
                loaders |= norm_tensors(f"model.{side}.layernorm_embedding", embedding.norm)
            loaders |= norm_tensors(f"model.{side}.layer_norm", norm)
            for i, layer in enumerate(layers):
                for part in layer.children():
                    loaders |= part.tensors(f"model.{side}.layers.{i}.")  # type: ignore[operator]
        if self.lm_head is not None:
            loaders["lm_head.weight"] = self.lm_head.weight.data
        return loaders

    def fused_tensors(self) -> dict[str, Any]:
        """Return no tensors: no published checkpoint merges any."""
        return {}

    def canonical_name(self, name: str) -> str:
        """Return the name itself: published checkpoints have one layout."""
        return name

    def ignored_tensor(self, name: str) -> bool:
        """Return whether a tensor is a computed table of positions, or the copy of the embedding in a tied head."""
        return name.endswith("embed_positions.weights") or (self.lm_head is None and name == "lm_head.weight")


def _add_norm(hidden: torch.Tensor, added: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """Add `added` to `hidden` in place, and return the norm of the sum."""
    return add_layer_norm(hidden, added, norm.weight, norm.bias, norm.eps)


def norm_tensors(prefix: str, norm: nn.LayerNorm) -> dict[str, WeightLoader]:
    """Return the loaders of a norm's weight and bias, by the tensors' names."""
    return {f"{prefix}.weight": norm.weight.data, f"{prefix}.bias": norm.bias.data}


def linear_tensors(prefixes: list[str], linear: nn.Linear) -> dict[str, WeightLoader]:
    """Return the loaders of linear layers that are merged into one, by the tensors' names."""
    loaders: dict[str, WeightLoader] = {}
    for kind, merged in (("weight", linear.weight), ("bias", linear.bias)):
        for prefix, part in zip(prefixes, merged.data.chunk(len(prefixes)), strict=True):
            loaders[f"{prefix}.{kind}"] = part
    return loaders
