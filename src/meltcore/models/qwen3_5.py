"""Qwen3.5, the family of routed experts (Qwen3_5MoeForConditionalGeneration and its text part, Qwen3_5MoeForCausalLM).

A hybrid: three layers of Gated DeltaNet, then one of attention, whose heads turn in part and whose output is gated.
Every layer has routed experts and a shared one. Text only: what a checkpoint holds to see with is left out, and so is
the layer that predicts one token more (mtp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.errors import ConfigError
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig, ExpertsConfig, RecurrentConfig


class Qwen3_5(Decoder):
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a parsed config.json. Raises ConfigError for a missing field or a variant that we do not compute."""
        nested = config.get("text_config") is not None
        if nested:
            config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **config["text_config"]}
        for name, expected in (("attention_bias", False), ("attn_output_gate", True)):
            if config.get(name, expected) is not expected:
                raise ConfigError(f"config.json sets {name} to {config[name]}, which qwen3_5_moe here does not compute")
        super().__init__(
            DecoderConfig.read(
                config,
                qkv_bias=False,
                head_norms=True,
                output_gate=True,
                zero_centred_norms=True,
                experts=ExpertsConfig.read({**config, "norm_topk_prob": True}),
                recurrent=RecurrentConfig.read(config),
            )
        )
        if nested:
            self.prefix = "model.language_model."

    def ignored_tensor(self, name: str) -> bool:
        return super().ignored_tensor(name) or name.startswith(("mtp.", "model.visual."))
