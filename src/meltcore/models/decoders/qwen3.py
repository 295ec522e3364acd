"""Qwen3, dense and with routed experts (Qwen3ForCausalLM, Qwen3MoeForCausalLM).

It is the shared decoder with a norm on each head's query and key, and without a bias (Qwen3 Technical Report,
arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import qwen3_config, qwen3_moe_config


class Qwen3(Decoder):
    """A dense Qwen3 model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(qwen3_config(config))


class Qwen3Moe(Decoder):
    """A Qwen3 model with routed experts in all layers that config.json does not list as dense."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(qwen3_moe_config(config))
