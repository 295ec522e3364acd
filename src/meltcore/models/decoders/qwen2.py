"""Qwen2 and Qwen2.5, dense (Qwen2ForCausalLM; Qwen2 and Qwen2.5 Technical Reports, arXiv:2407.10671, arXiv:2412.15115).

It is the shared decoder with a bias on queries, keys and values, and without norms on queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import qwen2_config


class Qwen2(Decoder):
    """A dense Qwen2 model. Without `head_dim` in config.json, head_dim is hidden_size / num_attention_heads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(qwen2_config(config))
