"""Gemma 3 (Gemma3ForCausalLM, and the text part of Gemma3ForConditionalGeneration; Gemma 3 report, arXiv:2503.19786).

It is the shared decoder with a sliding window and unscaled rotary embeddings in most layers, norms before and after
attention and feed-forward, GeGLU, scaled embeddings and a tied head. Vision tensors are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meltcore.kernels.rotary import LinearScaling
from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.decoder_config import DecoderConfig
from meltcore.models.rope import read_rope_scaling, refuse_rope_scaling, rope_fields

_FAMILY = "gemma3 here"
# Published configurations omit fields that have these defaults of the configuration class in transformers.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_DEFAULT_WINDOW, _DEFAULT_PATTERN = 4096, 6
_TEXT_PREFIX, _OLDER_TEXT_PREFIX = "model.language_model.", "language_model.model."
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")


class Gemma3(Decoder):
    """The language model of a Gemma 3 model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the model from a parsed config.json.

        Raises ConfigError for a missing or wrong field, or an unsupported variant.
        """
        top_fields = Fields(config)
        has_text_config = top_fields.has("text_config")
        fields = top_fields
        if has_text_config:
            refuse_rope_scaling(top_fields)
            fields = top_fields.nested_fields("text_config")
            tied = top_fields.optional("tie_word_embeddings", True)  # that of the whole model counts
            fields = fields.with_values(tie_word_embeddings=tied)
        super().__init__(_read_config(fields))
        if has_text_config:
            self.prefix = _TEXT_PREFIX

    def canonical_name(self, name: str) -> str:
        """Return the tensor's name as transformers 5 writes it; published checkpoints of 2025 have an older form."""
        if name.startswith(_OLDER_TEXT_PREFIX):
            return _TEXT_PREFIX + name.removeprefix(_OLDER_TEXT_PREFIX)
        return name.removeprefix("language_model.")

    def ignored_tensor(self, name: str) -> bool:
        """Return whether `name` belongs to vision or is the copy of a tied head."""
        return super().ignored_tensor(name) or name.removeprefix("model.").startswith(_VISION_PREFIXES)


def _read_config(fields: Fields) -> DecoderConfig:
    for name in ("attention_bias", "use_bidirectional_attention"):
        if fields.optional(name, False):
            raise fields.unsupported_field(name, _FAMILY)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(name):
            raise fields.unsupported_field(name, _FAMILY)
    fields = fields.with_defaults(**_DEFAULTS)
    fields = fields.with_values(sliding_window=fields.optional_not_null("sliding_window", _DEFAULT_WINDOW))
    fields = _with_global_rope(fields)
    return DecoderConfig.read(
        fields,
        qkv_bias=False,
        qk_norm=True,
        zero_centered_norms=True,
        sliding_layers=_sliding_layers(fields),
        rope_local_theta=fields.optional("rope_local_base_freq"),
        attention_scale=fields.optional("query_pre_attn_scalar") ** -0.5,
        post_norms=True,
        activation="gelu_pytorch_tanh",
        embedding_scale=fields.required("hidden_size")["hidden_size"] ** 0.5,
    )


def _sliding_layers(fields: Fields) -> frozenset[int]:
    """Return the indices of the layers with a sliding window, from layer_types or the pattern: the last of every N."""
    num_layers = fields.required("num_hidden_layers")["num_hidden_layers"]
    layer_types = fields.optional("layer_types")
    if layer_types is None:
        pattern = fields.optional("sliding_window_pattern", _DEFAULT_PATTERN)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % pattern)
    if len(layer_types) != num_layers or set(layer_types) - {"full_attention", "sliding_attention"}:
        raise fields.rule_error("layer_types", f"full_attention or sliding_attention for each of {num_layers} layers")
    return frozenset(layer for layer, layer_type in enumerate(layer_types) if layer_type == "sliding_attention")


def _with_global_rope(fields: Fields) -> Fields:
    """Return `fields` with the rotary embeddings of full attention as the only rope_parameters.

    Since transformers 5, rope_parameters holds an object per layer type. max_position_embeddings is the extended length
    of a linear scaling, so the original length follows from it.
    """
    rope = fields.nested_fields("rope_parameters")
    if rope.has("full_attention") or rope.has("sliding_attention"):
        local = rope.optional("sliding_attention", {})
        if read_rope_scaling(fields.with_values(rope_parameters=local, rope_scaling=None)) is not None:
            raise rope.unsupported_field("sliding_attention", _FAMILY)
        local_theta = Fields(local).optional("rope_theta", fields.optional("rope_local_base_freq"))
        fields = fields.with_values(rope_parameters=rope.optional("full_attention"), rope_local_base_freq=local_theta)
    scaling = read_rope_scaling(fields)
    name = "original_max_position_embeddings"
    if isinstance(scaling, LinearScaling) and not rope_fields(fields).has(name):
        length = fields.required("max_position_embeddings")["max_position_embeddings"]
        fields = fields.with_defaults(**{name: max(1, int(length / scaling.factor))})
    return fields
