"""Qwen3.5 with routed experts (Qwen3_5MoeForConditionalGeneration and its text part, Qwen3_5MoeForCausalLM).

It is a hybrid: three layers of Gated DeltaNet, then one layer of attention with partial rotary embeddings and an output
gate. Every layer has routed experts and a shared expert. A checkpoint's vision tensors are ignored, and so is its layer
for multi-token prediction (mtp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig, ExpertsConfig, RecurrentConfig
from meltcore.models.rope import refuse_rope_scaling

_ROTARY_FACTOR = 0.25  # partial_rotary_factor without one in config.json: transformers' default


class Qwen3_5(Decoder):  # noqa: N801 - the family is called Qwen3.5
    """The language model of a Qwen3.5 model with routed experts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        top_fields = Fields(config)
        has_text_config = top_fields.has("text_config")
        fields = _text_fields(top_fields) if has_text_config else top_fields
        for name, expected in (("attention_bias", False), ("attn_output_gate", True)):
            if fields.optional_not_null(name, expected) is not expected:
                raise fields.unsupported_field(name, "qwen3_5_moe here")
        fields.required("shared_expert_intermediate_size")
        # The family has no such fields, so config.json cannot set them to anything else.
        routing_fields = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        super().__init__(
            DecoderConfig.read(
                fields,
                qkv_bias=False,
                qk_norm=True,
                output_gate=True,
                zero_centered_norms=True,
                rotary_factor=_ROTARY_FACTOR,
                experts=ExpertsConfig.read(fields.with_values(**routing_fields)),
                recurrent=RecurrentConfig.read(fields),
            )
        )
        if has_text_config:
            self.prefix = "model.language_model."

    def ignored_tensor(self, name: str) -> bool:
        """Return whether `name` belongs to vision, multi-token prediction or the copy of a tied head."""
        return super().ignored_tensor(name) or name.startswith(("mtp.", "model.visual."))


def _text_fields(top_fields: Fields) -> Fields:
    """Return the fields of the language model. A tie_word_embeddings at the top level takes precedence."""
    refuse_rope_scaling(top_fields)
    text_fields = top_fields.nested_fields("text_config")
    tie_word_embeddings = top_fields.optional("tie_word_embeddings")
    return (
        text_fields if tie_word_embeddings is None else text_fields.with_values(tie_word_embeddings=tie_word_embeddings)
    )
