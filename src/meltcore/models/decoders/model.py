"""The interface between a model and the engine that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.kv_cache_specs import KVCacheSpec

if TYPE_CHECKING:
    from meltcore.kernels.attention.metadata import AttentionMetadata
    from meltcore.models.decoders.tensor_names import FusedTensor


class LoadableModel(Protocol):
    """The members of a model that the loader needs, whether it is a `Model` or a model of another task.

    `Model` documents the members.
    """

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    def checkpoint_tensors(self) -> dict[str, WeightLoader]: ...  # noqa: D102
    def fused_tensors(self) -> dict[str, FusedTensor]: ...  # noqa: D102
    def canonical_name(self, name: str) -> str: ...  # noqa: D102
    def ignored_tensor(self, name: str) -> bool: ...  # noqa: D102


class Model(nn.Module, ABC):
    """A language model. `forward` computes hidden states, and `logits` computes their logits.

    The engine holds all caches. `forward` takes token_ids and positions [tokens] int64, each layer's cache (keys and
    values in pages, or conv_states and states), each layer's attention metadata, and a function to call between two
    layers (default: None). A layer has the page table of its cache group. `forward` returns [tokens, hidden_size].
    """

    config: DecoderConfig

    @property
    @abstractmethod
    def local_vocab_size(self) -> int:
        """Number of tokens whose logits `logits` computes: vocab_size, or this rank's part of it."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of hidden states, and of unquantized weights unless a layer needs another."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the weights."""

    @abstractmethod
    def shard(self, group: TensorParallelGroup) -> None:
        """Keep this rank's shard of every layer and of the vocabulary. Call this before weights are loaded.

        `logits` then computes logits of this rank's tokens only. Raises ConfigError when a size cannot be divided
        evenly.
        """

    @abstractmethod
    def prepare(self, max_model_len: int) -> None:
        """Build computed tensors, such as the rotary table, for contexts of up to `max_model_len` tokens."""

    def prepare_decode(self, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Prepare faster decode steps with the caches of all layers. The caches must be at their final addresses."""

    def one_layer_per_kind(self) -> AbstractContextManager[None]:
        """Return a context in which `forward` runs only as many layers as are needed to launch every kernel once.

        Its results are invalid.
        """
        return nullcontext()

    @abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Return the specification of each layer's cache per sequence."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits of hidden states: [rows, hidden_size] -> [rows, vocab_size] float32.

        A rank computes logits of its own part of the vocabulary only. The result is written to `out`, contiguous memory
        that is new by default.
        """

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, WeightLoader]:
        """Return the weight loader of each tensor of a published checkpoint, by the tensor's name."""

    @abstractmethod
    def fused_tensors(self) -> dict[str, FusedTensor]:
        """Return the checkpoint tensors that merge several of `checkpoint_tensors`, by name."""

    def canonical_name(self, name: str) -> str:
        """Return the name in `checkpoint_tensors` of a tensor whose name in a file is `name`.

        The names differ in families whose checkpoints have two layouts.
        """
        return name

    @abstractmethod
    def ignored_tensor(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although the model does not read it."""


class MtpModel(Model):
    """A language model that may have a layer for multi-token prediction (MTP), which drafts tokens.

    The layer's cache comes after the caches of all other layers. `forward` does not run the layer.
    """

    @abstractmethod
    def add_mtp(self) -> None:
        """Add the layer. Call this before `shard`.

        Raises ConfigError if config.json has no such layer, or a variant that is not supported.
        """

    @abstractmethod
    def draft_hidden(
        self,
        next_token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run the layer. `logits` of the result are the logits of the token after the next one.

        The result at a position is also the hidden state from which the layer drafts one token more, at the next
        position.

        Args:
            next_token_ids: [tokens] int64, the token that follows each position.
            hidden: [tokens, hidden_size], the result of `forward` at each position, or of this method at the position
                before it.
            positions: [tokens] int64.
            cache: the layer's keys and values.
            metadata: the layer's metadata.

        Returns [tokens, hidden_size].
        """
