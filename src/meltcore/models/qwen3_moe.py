"""Qwen3, the family of routed experts (Qwen3MoeForCausalLM; Qwen3 Technical Report, arXiv:2505.09388).

Qwen3's decoder with experts in place of the feed-forward, in all layers but those the configuration leaves dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig, ExpertsConfig


class Qwen3Moe(Decoder):
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a parsed config.json. Raises ConfigError for a field that is missing or wrong, or a variant that we do
        not compute."""
        fields = Fields(config)
        if fields.optional("attention_bias", False):
            raise fields.not_computed("attention_bias", "qwen3_moe here")
        experts = ExpertsConfig.read(fields)
        super().__init__(DecoderConfig.read(fields, qkv_bias=False, head_norms=True, experts=experts))
