"""Gemma 3 (Gemma3ForCausalLM, and the text part of Gemma3ForConditionalGeneration; Gemma 3 report, arXiv:2503.19786).

It is the shared decoder with a sliding window and unscaled rotary embeddings in most layers, norms before and after
attention and feed-forward, GeGLU, scaled embeddings and a tied head. Vision tensors are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_families import gemma3_config

_TEXT_PREFIX, _OLDER_TEXT_PREFIX = "model.language_model.", "language_model.model."
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")


class Gemma3(Decoder):
    """The language model of a Gemma 3 model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        super().__init__(gemma3_config(config))
        if Fields(config).has("text_config"):
            self.prefix = _TEXT_PREFIX

    def canonical_name(self, name: str) -> str:
        """Return the tensor's name as transformers 5 writes it; published checkpoints of 2025 have an older form."""
        if name.startswith(_OLDER_TEXT_PREFIX):
            return _TEXT_PREFIX + name.removeprefix(_OLDER_TEXT_PREFIX)
        return name.removeprefix("language_model.")

    def ignored_tensor(self, name: str) -> bool:
        """Return whether `name` belongs to vision or is the copy of a tied head."""
        return super().ignored_tensor(name) or name.removeprefix("model.").startswith(_VISION_PREFIXES)
