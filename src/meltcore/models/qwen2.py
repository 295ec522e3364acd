"""Qwen2 and Qwen2.5, the dense families (Qwen2ForCausalLM; Qwen2 and Qwen2.5 Technical Reports, arXiv:2407.10671 and
arXiv:2412.15115).

The shared decoder with a bias on queries, keys and values, and no norm of theirs. Heads divide the hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig


class Qwen2(Decoder):
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a parsed config.json. Raises ConfigError for a field that is missing or wrong, or a variant that we do
        not compute."""
        fields = Fields(config)
        if not fields.has("head_dim"):
            sizes = fields.required("hidden_size", "num_attention_heads")
            fields = fields.replaced(head_dim=sizes["hidden_size"] // sizes["num_attention_heads"])
        super().__init__(DecoderConfig.read(fields, qkv_bias=True, head_norms=False))
