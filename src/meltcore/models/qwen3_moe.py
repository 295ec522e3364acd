"""Qwen3, the family of routed experts (Qwen3MoeForCausalLM; Qwen3 Technical Report, arXiv:2505.09388).

Qwen3's decoder with experts in place of the feed-forward, in all layers but those the configuration leaves dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.errors import ConfigError
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig, ExpertsConfig


class Qwen3Moe(Decoder):
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a parsed config.json. Raises ConfigError for a missing field or a variant that we do not compute."""
        if config.get("attention_bias"):
            raise ConfigError("config.json sets attention_bias, which qwen3_moe here does not compute")
        experts = ExpertsConfig.read(config)
        super().__init__(DecoderConfig.read(config, qkv_bias=False, head_norms=True, experts=experts))
