"""A small network with recurrent and attention layers, known to the engine only by the Model interface."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from torch import nn

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.common import GatedDeltaParams
from meltcore.kernels.gated_delta.layer import gated_delta_net
from meltcore.models import registry
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, KVCacheSpec, RecurrentStateSpec
from meltcore.models.decoders.qwen3 import Qwen3

RECURRENT = frozenset({0, 2})
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 1, 16, 16, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
CONFIG: dict[str, object] = {
    "architectures": ["Hybrid"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": tools.VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "eos_token_id": 1,
}


class Hybrid(Qwen3):
    """Qwen3 with a delta rule instead of attention in the layers RECURRENT."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        hidden, layers = self.config.hidden_size, len(RECURRENT)
        self.project = nn.Parameter(torch.empty(layers, CHANNELS + HEADS * (VALUE_DIM + 2), hidden))
        self.conv = nn.Parameter(torch.empty(layers, CHANNELS, KERNEL))
        self.output = nn.Parameter(torch.empty(layers, hidden, HEADS * VALUE_DIM))

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        attention = FullAttentionSpec(self.config.num_key_value_heads, self.config.head_dim)
        recurrent = RecurrentStateSpec(CHANNELS, KERNEL, HEADS, KEY_DIM, VALUE_DIM)
        return [recurrent if layer in RECURRENT else attention for layer in range(self.config.num_hidden_layers)]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        metadata: list[AttentionMetadata],
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        assert between_layers is None, "no class is above these engines' class"
        residual = self.embedding(token_ids)
        for layer, (block, cache, of_layer) in enumerate(zip(self.blocks, caches, metadata, strict=True)):
            if layer in RECURRENT:
                self._recurrent(sorted(RECURRENT).index(layer), residual.values, cache, of_layer)
            else:
                block(residual, positions, self.rotary, cache, of_layer)
        return residual.normalized(self.norm)

    def _recurrent(
        self, index: int, residual: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], metadata: AttentionMetadata
    ) -> None:
        """Add to `residual` in place."""
        # A decay of about 0.98 a token: what was read a hundred tokens ago still shows.
        decay = torch.full((HEADS,), -4.0)
        weights = self.conv[index], decay, torch.zeros(HEADS), torch.ones(VALUE_DIM), 1e-6
        params = GatedDeltaParams(*weights, KEY_HEADS, *cache)
        mixed = gated_delta_net(residual @ self.project[index].T, params, metadata)
        residual += mixed @ self.output[index].T


def open_hybrid(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> tools.SeenEngine:
    """An engine on a Hybrid whose weights are the same every time."""
    monkeypatch.setitem(registry.ARCHITECTURES, "Hybrid", Hybrid)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    seen = tools.open_engine(folder, load_format="dummy", **settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in seen.engine.runner.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return seen
