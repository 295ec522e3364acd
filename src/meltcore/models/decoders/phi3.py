"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Phi3ForCausalLM; arXiv:2404.14219, arXiv:2412.08905, arXiv:2503.01743).

It is Llama's network. Checkpoints merge queries, keys and values in one tensor, and gate and up projection in another.
Some models have LongRoPE, whose factors depend on the context length that is served. Phi-4-mini rotates three quarters
of a head, and Phi-3-mini-4k has a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import phi3_config


class Phi3(Decoder):
    """A Phi-3 or Phi-4 model. `sliding_window` holds for all layers; null stands for full attention."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(phi3_config(config))
