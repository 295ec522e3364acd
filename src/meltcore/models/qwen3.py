"""Qwen3, the dense family (Qwen3ForCausalLM; Qwen3 Technical Report, arXiv:2505.09388).

The shared decoder with normalised queries and keys, head by head, and no bias anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.errors import ConfigError
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig


class Qwen3(Decoder):
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a parsed config.json. Raises ConfigError for a missing field or a variant that we do not compute."""
        if config.get("attention_bias"):
            raise ConfigError("config.json sets attention_bias, which qwen3 here does not compute")
        super().__init__(DecoderConfig.read(config, qkv_bias=False, head_norms=True))
