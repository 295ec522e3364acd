"""Granite 3, dense (GraniteForCausalLM).

It is Llama's network with four constants ("maximal update parametrization", Yang et al. 2022, arXiv:2203.03466). Three
are factors: of the token embeddings, of the attention scores, and of each layer's output. The fourth is the divisor of
the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import granite_config


class Granite(Decoder):
    """A dense Granite model. Each of its four constants is 1 by default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(granite_config(config))
