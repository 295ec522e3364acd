"""The language model of a checkpoint that may have a vision tower beside it, in LLaVA's layout of names.

Gemma 3 and Mistral Small 3.1 share the layout. Vision tensors are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.configs.config_fields import Fields
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_config import DecoderConfig

_TEXT_PREFIX, _OLDER_TEXT_PREFIX = "model.language_model.", "language_model.model."
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")


class TextDecoder(Decoder):
    """A decoder whose config.json may hold its fields in `text_config`, and whose names then have a prefix."""

    def __init__(self, config: Mapping[str, Any], decoder_config: DecoderConfig) -> None:
        """Build the model. `config` is the parsed config.json that `decoder_config` was read from."""
        super().__init__(decoder_config)
        if Fields(config).has("text_config"):
            self.prefix = _TEXT_PREFIX

    def canonical_name(self, name: str) -> str:
        """Return the tensor's name as transformers 5 writes it. Checkpoints published in 2025 have older names."""
        if name.startswith(_OLDER_TEXT_PREFIX):
            return _TEXT_PREFIX + name.removeprefix(_OLDER_TEXT_PREFIX)
        return name.removeprefix("language_model.")

    def ignored_tensor(self, name: str) -> bool:
        """Return whether `name` belongs to vision or is the copy of a tied head."""
        return super().ignored_tensor(name) or name.removeprefix("model.").startswith(_VISION_PREFIXES)
