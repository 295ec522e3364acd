"""Qwen3.5 with routed experts (Qwen3_5MoeForConditionalGeneration and its text part, Qwen3_5MoeForCausalLM).

It is a hybrid: three layers of Gated DeltaNet, then one layer of attention with partial rotary embeddings and an output
gate. Every layer has routed experts and a shared expert. A layer for multi-token prediction drafts tokens, if it is
added. A checkpoint's vision tensors are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.layers.linear import ColumnParallelLinear
from meltcore.layers.residual import ResidualStream
from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.configs.config_fields import Fields
from meltcore.models.decoders.decoder import Decoder, DecoderBlock
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.decoder_families import qwen3_5_config
from meltcore.models.decoders.model import MtpModel
from meltcore.models.decoders.tensor_names import named_tensors


class MultiTokenPrediction(nn.Module):
    """Computes the hidden state of the token after the next one, from a hidden state and the next token's embedding.

    One block of attention and routed experts reads a projection of both. Every rank has the whole projection. It keeps
    the model's type, as in published FP8 checkpoints.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = config.norm(config.hidden_size), config.norm(config.hidden_size)
        self.fc = ColumnParallelLinear(2 * config.hidden_size, config.hidden_size)
        self.block = DecoderBlock(config, config.num_hidden_layers)  # no recurrent layer has this index
        self.norm = config.norm(config.hidden_size)

    def forward(
        self,
        next_embedding: ResidualStream,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute hidden states [tokens, hidden_size]. `MtpModel.draft_hidden` explains the arguments."""
        normalized = next_embedding.normalized(self.embedding_norm), self.hidden_norm(hidden)
        residual = ResidualStream(self.fc(torch.cat(normalized, dim=-1)))
        self.block(residual, positions, rotary, cache, metadata)
        return residual.normalized(self.norm)

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loaders of all tensors but the block's, by the tensors' names in a checkpoint."""
        return {
            "mtp.pre_fc_norm_embedding.weight": self.embedding_norm.loader,
            "mtp.pre_fc_norm_hidden.weight": self.hidden_norm.loader,
            "mtp.norm.weight": self.norm.loader,
            **named_tensors("mtp.fc", self.fc.tensors(0)),
        }


class Qwen3_5(Decoder, MtpModel):  # noqa: N801 - the family is called Qwen3.5
    """The language model of a Qwen3.5 model with routed experts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(qwen3_5_config(config))
        self._fields = Fields(config)
        if self._fields.has("text_config"):
            self.prefix = "model.language_model."
            self._fields = self._fields.nested_fields("text_config")
        self.mtp: MultiTokenPrediction | None = None

    def add_mtp(self) -> None:
        """Add the layer for multi-token prediction. Call this before `shard`.

        Raises ConfigError unless config.json has one such layer, which shares the embedding and the head.
        """
        if self._fields.optional("mtp_num_hidden_layers", 0) != 1:
            raise self._fields.rule_error("mtp_num_hidden_layers", "1 for multi-token prediction (MTP)")
        if self._fields.optional("mtp_use_dedicated_embeddings", False):
            raise self._fields.unsupported_field("mtp_use_dedicated_embeddings", "qwen3_5_moe here")
        self.mtp = MultiTokenPrediction(self.config)

    def prepare_decode(self, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Prepare faster decode steps of all layers but the layer for multi-token prediction: see `Model`."""
        super().prepare_decode(caches[: len(self.blocks)])

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        metadata: list[AttentionMetadata],
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Compute hidden states [tokens, hidden_size] without the layer for multi-token prediction: see `Model`."""
        layers = len(self.blocks)
        return super().forward(token_ids, positions, caches[:layers], metadata[:layers], between_layers)

    def draft_hidden(
        self,
        next_token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run the layer for multi-token prediction, which must have been added: see `MtpModel`."""
        assert self.mtp is not None
        embedding = self.embedding(next_token_ids)
        drafted: torch.Tensor = self.mtp(embedding, hidden, positions, self.rotary, cache, metadata)
        return drafted

    def named_blocks(self) -> Iterator[tuple[str, DecoderBlock]]:
        """Yield each block and its prefix, and at last the block for multi-token prediction."""
        yield from super().named_blocks()
        if self.mtp is not None:
            yield "mtp.layers.0.", self.mtp.block

    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor of a published checkpoint, by the tensor's name."""
        own = {} if self.mtp is None else self.mtp.checkpoint_tensors()
        return super().checkpoint_tensors() | own

    def ignored_tensor(self, name: str) -> bool:
        """Return whether `name` belongs to vision, a layer that was not added, or the copy of a tied head."""
        is_unread = name.startswith("model.visual.") or (self.mtp is None and name.startswith("mtp."))
        return super().ignored_tensor(name) or is_unread
