"""Qwen3, the dense family (Qwen3ForCausalLM; Qwen3 Technical Report, arXiv:2505.09388).

The shared decoder with normalised queries and keys, head by head, and no bias anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig


class Qwen3(Decoder):
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a parsed config.json. Raises ConfigError for a field that is missing or wrong, or a variant that we do
        not compute."""
        fields = Fields(config)
        if fields.optional("attention_bias", False):
            raise fields.not_computed("attention_bias", "qwen3 here")
        super().__init__(DecoderConfig.read(fields, qkv_bias=False, head_norms=True))
