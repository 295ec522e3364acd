"""Qwen3 with sliding windows in some layers, which published Qwen3 checkpoints do not use. No transformers here.

As a program it is a rank process that knows this model.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from meltcore.models import registry
from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig

ARCHITECTURE = "SlidingQwen3"
# What DecoderConfig refuses for Qwen3.
_WINDOW_FIELDS = {"use_sliding_window", "sliding_window", "layer_types"}


class SlidingQwen3(Decoder):
    """Qwen3 whose `layer_types` are followed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        plain = Fields({name: value for name, value in config.items() if name not in _WINDOW_FIELDS})
        sliding = (layer for layer, kind in enumerate(config["layer_types"]) if kind == "sliding_attention")
        super().__init__(
            dataclasses.replace(
                DecoderConfig.read(plain, qkv_bias=False, qk_norm=True),
                sliding_window=config["sliding_window"],
                sliding_layers=frozenset(sliding),
            )
        )


if __name__ == "__main__":
    from meltcore.engine.distributed.rank_process import main

    registry.ARCHITECTURES[ARCHITECTURE] = SlidingQwen3
    sys.exit(main())
