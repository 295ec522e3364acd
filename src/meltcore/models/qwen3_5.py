"""Qwen3.5, the family of routed experts (Qwen3_5MoeForConditionalGeneration and its text part, Qwen3_5MoeForCausalLM).

A hybrid: three layers of Gated DeltaNet, then one of attention, whose heads turn in part and whose output is gated.
Every layer has routed experts and a shared one. Text only: what a checkpoint holds to see with is left out, and so is
the layer that predicts one token more (mtp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig, ExpertsConfig, RecurrentConfig, plain_rope

_TURNING = 0.25  # the share of a head that turns where a configuration does not say: transformers' default


class Qwen3_5(Decoder):
    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a parsed config.json. Raises ConfigError for a field that is missing or wrong, or a variant that we do
        not compute."""
        whole = Fields(config)
        nested = whole.has("text_config")
        fields = _text_fields(whole) if nested else whole
        for name, expected in (("attention_bias", False), ("attn_output_gate", True)):
            if fields.not_null(name, expected) is not expected:
                raise fields.not_computed(name, "qwen3_5_moe here")
        fields.required("shared_expert_intermediate_size")
        # Here these are no fields that could say otherwise.
        every_layer_routed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        super().__init__(
            DecoderConfig.read(
                fields,
                qkv_bias=False,
                head_norms=True,
                output_gate=True,
                zero_centred_norms=True,
                turning=_TURNING,
                experts=ExpertsConfig.read(fields.replaced(**every_layer_routed)),
                recurrent=RecurrentConfig.read(fields),
            )
        )
        if nested:
            self.prefix = "model.language_model."

    def ignored_tensor(self, name: str) -> bool:
        return super().ignored_tensor(name) or name.startswith(("mtp.", "model.visual."))


def _text_fields(whole: Fields) -> Fields:
    """The part of the language model. Whether its head is tied, the whole model says, where it says anything."""
    plain_rope(whole)
    text = whole.part("text_config")
    tied = whole.optional("tie_word_embeddings")
    return text if tied is None else text.replaced(tie_word_embeddings=tied)
