"""Llama 2 to 3.3 and Mistral, dense (LlamaForCausalLM, MistralForCausalLM).

Both are the shared decoder without biases and without norms on queries and keys (Llama 3, arXiv:2407.21783; Mistral 7B,
arXiv:2310.06825). Mistral 7B v0.1 has a sliding window in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig, with_head_dim

# Published configurations omit fields that have the default of the family's configuration class in transformers.
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
}
_MISTRAL_WINDOW = 4096


class Llama(Decoder):
    """A dense Llama model. num_key_value_heads is num_attention_heads by default, as in Llama 2 7B."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        fields = with_head_dim(Fields(config).with_defaults(**_LLAMA_DEFAULTS))
        if fields.optional("attention_bias", False):
            raise fields.unsupported_field("attention_bias", "llama here")
        fields = fields.with_defaults(num_key_value_heads=fields.optional("num_attention_heads"))
        super().__init__(DecoderConfig.read(fields, qkv_bias=False, qk_norm=False))


class Mistral(Decoder):
    """A dense Mistral model. `sliding_window` holds for all layers; null stands for full attention."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        fields = with_head_dim(Fields(config).with_defaults(**_MISTRAL_DEFAULTS))
        if "sliding_window" not in config:
            fields = fields.with_values(sliding_window=_MISTRAL_WINDOW)
        sliding = fields.has("sliding_window")
        layers = range(fields.required("num_hidden_layers")["num_hidden_layers"] if sliding else 0)
        super().__init__(DecoderConfig.read(fields, qkv_bias=False, qk_norm=False, sliding_layers=frozenset(layers)))
