"""Llama 2 to 3.3, SmolLM2 and Mistral, dense (LlamaForCausalLM, MistralForCausalLM).

Both are the shared decoder without biases and without norms on queries and keys (Llama 3, arXiv:2407.21783; Mistral 7B,
arXiv:2310.06825). Mistral 7B v0.1 has a sliding window in all layers. Mistral Small 3.1 and 3.2 have a vision tower
beside the text part (Mistral3ForConditionalGeneration).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import llama_config, mistral_config
from meltcore.models.decoders.text_decoder import TextDecoder


class Llama(Decoder):
    """A dense Llama model. num_key_value_heads is num_attention_heads by default, as in Llama 2 7B."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(llama_config(config))


class Mistral(TextDecoder):
    """The language model of a dense Mistral model.

    `sliding_window` holds for all layers; null stands for full attention.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(config, mistral_config(config))
