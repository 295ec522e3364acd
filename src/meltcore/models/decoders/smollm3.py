"""SmolLM3 (SmolLM3ForCausalLM).

It is Llama's network with tied embeddings, and every fourth layer has no rotary embeddings: its queries and keys are
not rotated ("NoPE", Yang et al. 2025, arXiv:2501.18795).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import smollm3_config


class SmolLM3(Decoder):
    """A SmolLM3 model. `no_rope_layers` has a 0 for each layer without rotary embeddings."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(smollm3_config(config))
