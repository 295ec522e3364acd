"""The interface of models that compute embeddings of texts or scores of pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meltcore.layers.weight_loader import WeightLoader
from meltcore.models.configs.pooling_config import PoolingConfig


class PoolingModel(nn.Module, ABC):
    """Computes one vector of each input of a batch. `LoadableModel` explains what the loader needs."""

    config: PoolingConfig

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...  # noqa: D102

    @property
    @abstractmethod
    def device(self) -> torch.device: ...  # noqa: D102

    def prepare(self) -> None:
        """Build computed tensors and turn gradients off. Weights must not change afterwards."""
        self.requires_grad_(False).eval()

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, lengths: torch.Tensor, second_starts: torch.Tensor, row_lens: Sequence[int]
    ) -> torch.Tensor:
        """Return float32 embeddings [rows, size], or a reranker's logits [rows, 1].

        Args:
            token_ids: [tokens] int64, the tokens of all rows one after another.
            lengths: [rows] int64, the tokens of each row, at least 1.
            second_starts: [rows] int64, the position at which the second text of a pair begins, whose tokens have type
                1. A row of one text has a position at or after its end.
            row_lens: the numbers of `lengths` on the host.
        """

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, WeightLoader]: ...  # noqa: D102
    @abstractmethod
    def fused_tensors(self) -> dict[str, Any]: ...  # noqa: D102
    @abstractmethod
    def canonical_name(self, name: str) -> str: ...  # noqa: D102
    @abstractmethod
    def ignored_tensor(self, name: str) -> bool: ...  # noqa: D102
