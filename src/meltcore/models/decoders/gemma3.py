"""Gemma 3 (Gemma3ForCausalLM, and the text part of Gemma3ForConditionalGeneration; Gemma 3 report, arXiv:2503.19786).

It is the shared decoder with GeGLU, scaled embeddings, a tied head, and norms before and after attention and
feed-forward. Most layers have a sliding window and unscaled rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder_families import gemma3_config
from meltcore.models.decoders.text_decoder import TextDecoder


class Gemma3(TextDecoder):
    """The language model of a Gemma 3 model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(config, gemma3_config(config))
