"""The configuration of each family of decoders, from a parsed config.json.

This module does not import torch, since checkpoints are checked without it. Every function takes a parsed
config.json and raises ConfigError for a missing or wrong field, or an unsupported variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meltcore.kernels.rope_scaling import LinearScaling
from meltcore.models.configs.config_fields import Fields
from meltcore.models.decoders.decoder_config import DecoderConfig, ExpertsConfig, RecurrentConfig, with_head_dim
from meltcore.models.decoders.rope import read_rope_scaling, refuse_rope_scaling, rope_fields

# Published configurations omit fields that have the default of the family's configuration class in transformers.
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
}
_MISTRAL_WINDOW = 4096
_GEMMA = "gemma3 here"
_GEMMA_DEFAULTS = {
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
_GEMMA_WINDOW, _GEMMA_PATTERN = 4096, 6
# Granite's fields that multiply, of which each is 1 where config.json leaves it out.
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_OLMO2_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 2048}
_PHI3_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_SMOLLM3_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 2_000_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_ROTARY_FACTOR = 0.25  # partial_rotary_factor of Qwen3.5 without one in config.json: transformers' default


def llama_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a dense Llama model."""
    fields = with_head_dim(_without_bias(Fields(config).with_defaults(**_LLAMA_DEFAULTS), "llama here"))
    if fields.optional("rope_interleaved", False):  # a field of SmolLM2's training code
        raise fields.unsupported_field("rope_interleaved", "llama here")
    fields = fields.with_defaults(num_key_value_heads=fields.optional("num_attention_heads"))
    return DecoderConfig.read(fields, qkv_bias=False, qk_norm=False)


def granite_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a dense Granite 3 model."""
    fields = with_head_dim(_without_bias(Fields(config).with_defaults(**_LLAMA_DEFAULTS), "granite here"))
    fields = fields.with_defaults(num_key_value_heads=fields.optional("num_attention_heads"))
    embedding, attention, residual, logits = (float(fields.optional_not_null(name, 1.0)) for name in _MULTIPLIERS)
    return DecoderConfig.read(
        fields,
        qkv_bias=False,
        qk_norm=False,
        embedding_scale=None if embedding == 1.0 else embedding,
        attention_scale=attention,
        residual_multiplier=residual,
        logits_scaling=logits,
    )


def mistral_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a dense Mistral model, or of the text part of Mistral Small 3.1.

    If config.json has no tie_word_embeddings, the head is a separate tensor, as in the published files. (By default,
    the class in transformers ties head and embedding unless a file has both.)
    """
    fields = Fields(config)
    if fields.has("text_config"):
        fields, config = _text_fields(fields), config["text_config"]
        if fields.optional("model_type", "mistral") != "mistral":  # Ministral 3 scales queries by their position
            raise fields.unsupported_field("model_type", "mistral here")
    fields = with_head_dim(fields.with_defaults(**_MISTRAL_DEFAULTS))
    if "sliding_window" not in config:
        fields = fields.with_values(sliding_window=_MISTRAL_WINDOW)
    sliding = fields.has("sliding_window")
    layers = range(fields.required("num_hidden_layers")["num_hidden_layers"] if sliding else 0)
    return DecoderConfig.read(fields, qkv_bias=False, qk_norm=False, sliding_layers=frozenset(layers))


def olmo2_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of an OLMo 2 model."""
    fields = with_head_dim(_without_bias(Fields(config).with_defaults(**_OLMO2_DEFAULTS), "olmo2 here"))
    fields = fields.with_defaults(num_key_value_heads=fields.optional("num_attention_heads"))
    return DecoderConfig.read(
        fields, qkv_bias=False, qk_norm=False, wide_qk_norm=True, pre_norms=False, post_norms=True, float32_norms=True
    )


def phi3_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a Phi-3, Phi-3.5, Phi-4 or Phi-4-mini model.

    A sliding window is dropped if it is at least as long as the context.
    """
    fields = with_head_dim(_without_bias(Fields(config).with_defaults(**_PHI3_DEFAULTS), "phi3 here"))
    fields = fields.with_defaults(num_key_value_heads=fields.optional("num_attention_heads"))
    fields = _with_longrope_name(fields)
    window = fields.optional("sliding_window")
    sliding = window is not None and window < fields.optional("max_position_embeddings")
    layers = range(fields.required("num_hidden_layers")["num_hidden_layers"] if sliding else 0)
    return DecoderConfig.read(
        fields, qkv_bias=False, qk_norm=False, rotary_factor=1.0, sliding_layers=frozenset(layers)
    )


def smollm3_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a SmolLM3 model."""
    fields = with_head_dim(_without_bias(Fields(config).with_defaults(**_SMOLLM3_DEFAULTS), "smollm3 here"))
    kv_heads = fields.optional("num_attention_heads") if "num_key_value_heads" in config else 4
    fields = fields.with_defaults(num_key_value_heads=kv_heads)
    return DecoderConfig.read(fields, qkv_bias=False, qk_norm=False, nope_layers=_nope_layers(fields))


def qwen2_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a dense Qwen2 or Qwen2.5 model."""
    return DecoderConfig.read(with_head_dim(Fields(config)), qkv_bias=True, qk_norm=False)


def qwen3_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a dense Qwen3 model."""
    return DecoderConfig.read(_without_bias(Fields(config), "qwen3 here"), qkv_bias=False, qk_norm=True)


def qwen3_moe_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a Qwen3 model with routed experts."""
    fields = _without_bias(Fields(config), "qwen3_moe here")
    return DecoderConfig.read(fields, qkv_bias=False, qk_norm=True, experts=ExpertsConfig.read(fields))


def qwen3_5_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a Qwen3.5 model's text part."""
    fields = Fields(config)
    if fields.has("text_config"):
        fields = _text_fields(fields)
    for name, expected in (("attention_bias", False), ("attn_output_gate", True)):
        if fields.optional_not_null(name, expected) is not expected:
            raise fields.unsupported_field(name, "qwen3_5_moe here")
    fields.required("shared_expert_intermediate_size")
    # The family has no such fields, so config.json cannot set them to anything else.
    routing_fields = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return DecoderConfig.read(
        fields,
        qkv_bias=False,
        qk_norm=True,
        output_gate=True,
        zero_centered_norms=True,
        rotary_factor=_ROTARY_FACTOR,
        experts=ExpertsConfig.read(fields.with_values(**routing_fields)),
        recurrent=RecurrentConfig.read(fields),
    )


def gemma3_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a Gemma 3 model's text part. Raises ConfigError as `DecoderConfig.read` does."""
    fields = Fields(config)
    if fields.has("text_config"):
        top_fields = fields
        refuse_rope_scaling(top_fields)
        tied = top_fields.optional("tie_word_embeddings", True)  # that of the whole model counts
        fields = top_fields.nested_fields("text_config").with_values(tie_word_embeddings=tied)
    for name in ("attention_bias", "use_bidirectional_attention"):
        if fields.optional(name, False):
            raise fields.unsupported_field(name, _GEMMA)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(name):
            raise fields.unsupported_field(name, _GEMMA)
    fields = fields.with_defaults(**_GEMMA_DEFAULTS)
    fields = fields.with_values(sliding_window=fields.optional_not_null("sliding_window", _GEMMA_WINDOW))
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
        rounds_embedding_scale=True,
    )


def _sliding_layers(fields: Fields) -> frozenset[int]:
    """Return the indices of the layers with a sliding window, from layer_types or sliding_window_pattern.

    With a pattern of N, the last of every N layers has full attention.
    """
    num_layers = fields.required("num_hidden_layers")["num_hidden_layers"]
    layer_types = fields.optional("layer_types")
    if layer_types is None:
        pattern = fields.optional("sliding_window_pattern", _GEMMA_PATTERN)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % pattern)
    if len(layer_types) != num_layers or set(layer_types) - {"full_attention", "sliding_attention"}:
        raise fields.rule_error("layer_types", f"full_attention or sliding_attention for each of {num_layers} layers")
    return frozenset(layer for layer, layer_type in enumerate(layer_types) if layer_type == "sliding_attention")


def _nope_layers(fields: Fields) -> frozenset[int]:
    """Return the indices of the layers without rotary embeddings, from no_rope_layers or its interval.

    no_rope_layers has a 0 for such a layer. With an interval of N, it is the last of every N layers.
    """
    num_layers = fields.required("num_hidden_layers")["num_hidden_layers"]
    flags = fields.optional("no_rope_layers")
    if flags is None:
        interval = fields.optional("no_rope_layer_interval", 4)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    if len(flags) < num_layers:
        raise fields.rule_error("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return frozenset(layer for layer in range(num_layers) if not flags[layer])


def _with_longrope_name(fields: Fields) -> Fields:
    """Return `fields` with LongRoPE's current type name, in place of the names in Phi-3's first files."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.optional(name) or {}
        old = {key: "longrope" for key in ("rope_type", "type") if rope.get(key) in ("su", "yarn")}
        if old:
            fields = fields.with_values(**{name: {**rope, **old}})
    return fields


def _with_global_rope(fields: Fields) -> Fields:
    """Return `fields` with the rotary embeddings of full attention as the only rope_parameters.

    Since transformers 5, rope_parameters holds an object per layer type. With linear scaling, max_position_embeddings
    is the extended length, so the original length is computed from it.
    """
    rope = fields.nested_fields("rope_parameters")
    if rope.has("full_attention") or rope.has("sliding_attention"):
        local = rope.optional("sliding_attention", {})
        if read_rope_scaling(fields.with_values(rope_parameters=local, rope_scaling=None)) is not None:
            raise rope.unsupported_field("sliding_attention", _GEMMA)
        local_theta = Fields(local).optional("rope_theta", fields.optional("rope_local_base_freq"))
        fields = fields.with_values(rope_parameters=rope.optional("full_attention"), rope_local_base_freq=local_theta)
    scaling = read_rope_scaling(fields)
    name = "original_max_position_embeddings"
    if isinstance(scaling, LinearScaling) and not rope_fields(fields).has(name):
        length = fields.required("max_position_embeddings")["max_position_embeddings"]
        fields = fields.with_defaults(**{name: max(1, int(length / scaling.factor))})
    return fields


def _without_bias(fields: Fields, family: str) -> Fields:
    if fields.optional("attention_bias", False):
        raise fields.unsupported_field("attention_bias", family)
    return fields


def _text_fields(top_fields: Fields) -> Fields:
    """Return the fields of the language model. A tie_word_embeddings at the top level takes precedence."""
    refuse_rope_scaling(top_fields)
    text_fields = top_fields.nested_fields("text_config")
    tie_word_embeddings = top_fields.optional("tie_word_embeddings")
    return (
        text_fields if tie_word_embeddings is None else text_fields.with_values(tie_word_embeddings=tie_word_embeddings)
    )


DECODER_CONFIGS: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "Gemma3ForCausalLM": gemma3_config,
    "Gemma3ForConditionalGeneration": gemma3_config,
    "GraniteForCausalLM": granite_config,
    "LlamaForCausalLM": llama_config,
    "Mistral3ForConditionalGeneration": mistral_config,
    "MistralForCausalLM": mistral_config,
    "Olmo2ForCausalLM": olmo2_config,
    "Phi3ForCausalLM": phi3_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
    "Qwen3_5MoeForCausalLM": qwen3_5_config,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_config,
    "Qwen3MoeForCausalLM": qwen3_moe_config,
    "SmolLM3ForCausalLM": smollm3_config,
}
