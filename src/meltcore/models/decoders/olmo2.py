"""OLMo 2 (Olmo2ForCausalLM; arXiv:2501.00656).

It is the shared decoder with norms after attention and feed-forward only: both read the residual stream as it is.
Queries and keys are normalized over all heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import olmo2_config


class Olmo2(Decoder):
    """An OLMo 2 model. num_key_value_heads is num_attention_heads by default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(olmo2_config(config))
