"""Qwen3.5 with routed experts (Qwen3_5MoeForConditionalGeneration and its text part, Qwen3_5MoeForCausalLM).

It is a hybrid: three layers of Gated DeltaNet, then one layer of attention with partial rotary embeddings and an output
gate. Every layer has routed experts and a shared expert. A checkpoint's vision tensors are ignored, and so is its layer
for multi-token prediction (mtp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.configs.config_fields import Fields
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_families import qwen3_5_config


class Qwen3_5(Decoder):  # noqa: N801 - the family is called Qwen3.5
    """The language model of a Qwen3.5 model with routed experts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(qwen3_5_config(config))
        if Fields(config).has("text_config"):
            self.prefix = "model.language_model."

    def ignored_tensor(self, name: str) -> bool:
        """Return whether `name` belongs to vision, multi-token prediction or the copy of a tied head."""
        return super().ignored_tensor(name) or name.startswith(("mtp.", "model.visual."))
