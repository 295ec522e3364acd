"""Reads rotary embeddings from config.json (`rope_scaling` or `rope_parameters`) and applies --hf-overrides.

Both fields hold the same object: `rope_parameters` since transformers 5, `rope_scaling` before.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.kernels.rope_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling
from meltcore.models.configs.config_fields import MAX_POSITIONS, Fields

_ROPE_FIELD_NAMES = ("rope_scaling", "rope_parameters")
_OVERRIDES_OPTION = "--hf-overrides"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Fields of rope_parameters that a changed scaling keeps from the checkpoint: they belong to the trained weights.
_WEIGHT_FIELDS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def rope_fields(config: Fields) -> Fields:
    """Return the object of rotary embeddings: a non-empty rope_scaling, else rope_parameters, as in transformers."""
    return config.nested_fields("rope_scaling" if config.optional("rope_scaling") else "rope_parameters")


def read_rope_scaling(config: Fields, rotary_dim: int | None = None) -> RopeScaling | None:
    """Return the scaling of rotary frequencies that `config` states under either name. Returns None without a scaling.

    With `rotary_dim`, a scaling that has a factor per pair of rotated dimensions must have one for each pair. Raises
    ConfigError for an unknown type, for a missing or wrong field, and if both names state different scalings.
    """
    scalings: dict[str, RopeScaling | None] = {}
    for name in _ROPE_FIELD_NAMES:
        rope_object = config.nested_fields(name)
        for key, value in config.optional(name, {}).items():
            # An object of one type of layers, or Ministral 3's scale of queries by their position.
            if isinstance(value, dict) or (key == "llama_4_scaling_beta" and value):
                raise rope_object.unsupported_field(key)
        if config.optional(name):
            rope_type = _rope_type(rope_object)
            scaling = None if rope_type == "default" else _SCALING_READERS[rope_type](config, rope_object)
            if rotary_dim is not None and isinstance(scaling, LongRopeScaling):
                _check_factors(rope_object, scaling, rotary_dim // 2)
            scalings[name] = scaling
    if len(set(scalings.values())) > 1:
        raise config.field_error(
            "rope_scaling", f"and rope_parameters contradict each other: {_describe_scalings(scalings)}"
        )
    return next(iter(scalings.values()), None)


def refuse_rope_scaling(config: Fields) -> None:
    """Raise ConfigError if `config`, the top level of a multimodal model, states scaled frequencies."""
    for name in _ROPE_FIELD_NAMES:
        rope_object = config.nested_fields(name)
        for key, value in config.optional(name, {}).items():
            if isinstance(value, dict) or (key in ("rope_type", "type") and value not in (None, "default")):
                raise rope_object.unsupported_field(key, "a model with a text_config (state it there)")


def max_context(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """Return the context length in tokens to which `scaling` extends a model.

    A checkpoint's max_position_embeddings may be its original or its extended length. The larger length counts. With
    llama3 and longrope max_position_embeddings is always the extended length, which may be less than factor times the
    original length (Llama 3.2).
    """
    if scaling is None or isinstance(scaling, Llama3Scaling | LongRopeScaling):
        return max_position_embeddings
    extended = int(scaling.original_max_position_embeddings * scaling.factor)
    return min(max(max_position_embeddings, extended), MAX_POSITIONS)


def scaling_for(max_model_len: int, max_position_embeddings: int) -> str:
    """Return the command-line option that extends a model from `max_position_embeddings` to `max_model_len` tokens.

    The text is part of an error.
    """
    factor = float(math.ceil(max_model_len / max_position_embeddings))
    rope = {"rope_type": "yarn", "factor": factor, _ORIGINAL_LENGTH: max_position_embeddings}
    return f"{_OVERRIDES_OPTION} '{json.dumps({'rope_parameters': rope})}'"


def apply_overrides(given: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with its rope_parameters and rope_scaling replaced by rope_parameters of --hf-overrides.

    The overrides may nest rope_parameters in `text_config`, as config.json of a multimodal model does. Fields that
    belong to the weights, such as rope_theta, stay as they are unless overridden. Raises ConfigError for any other
    field.
    """
    if not overrides:
        return given
    override_fields = Fields(overrides, _OVERRIDES_OPTION)
    overridden_fields = (
        override_fields.nested_fields("text_config") if override_fields.has("text_config") else override_fields
    )
    field_names, text_field_names = set(overrides), set(override_fields.optional("text_config", {}))
    replaced_fields = sorted(
        (field_names - {"text_config"}) | text_field_names if override_fields.has("text_config") else field_names
    )
    if replaced_fields != ["rope_parameters"]:
        raise ConfigError(
            f"{_OVERRIDES_OPTION} may replace rope_parameters and nothing else; got {', '.join(replaced_fields)}"
        )
    rope = overridden_fields.optional("rope_parameters", {})
    unknown_fields = sorted(set(rope) - _KNOWN_FIELDS)
    if unknown_fields:
        raise overridden_fields.field_error(
            "rope_parameters", f"has an unknown field {unknown_fields[0]}; known: {', '.join(sorted(_KNOWN_FIELDS))}"
        )

    config = dict(given)
    nested = isinstance(config.get("text_config"), dict)
    text_config = dict(config["text_config"]) if nested else config
    read_rope_scaling(
        overridden_fields.with_values(
            **{name: text_config.get(name) for name in ("max_position_embeddings", _ORIGINAL_LENGTH)}
        )
    )  # an error then names the option, not the file
    checkpoint_rope = text_config.get("rope_scaling") or text_config.get("rope_parameters") or {}
    if not isinstance(checkpoint_rope, dict):
        checkpoint_rope = {}
    by_layer_type = isinstance(checkpoint_rope.get("full_attention"), dict)  # Gemma 3: the override is for these layers
    trained_rope = checkpoint_rope["full_attention"] if by_layer_type else checkpoint_rope
    rope = {name: trained_rope[name] for name in _WEIGHT_FIELDS if name in trained_rope} | rope
    if by_layer_type:
        rope = checkpoint_rope | {"full_attention": rope}
    text_config |= {"rope_parameters": rope, "rope_scaling": None}
    return config | {"text_config": text_config} if nested else text_config


def _rope_type(rope_object: Fields) -> str:
    """Return the type of scaling, which is in the field rope_type or type."""
    types = {name: rope_object.optional(name) for name in ("rope_type", "type")}
    given_types = {name: value for name, value in types.items() if value is not None}
    for name, value in given_types.items():
        if value != "default" and value not in _SCALING_READERS:
            raise rope_object.rule_error(name, f"one of default, {', '.join(_SCALING_READERS)}")
    if len(set(given_types.values())) > 1:
        raise rope_object.rule_error("type", f"the same as rope_type, {json.dumps(given_types['rope_type'])}")
    return next(iter(given_types.values()), "default")


def _read_linear(config: Fields, rope_object: Fields) -> LinearScaling:
    return LinearScaling(**_read_common_fields(config, rope_object))


def _read_llama3(config: Fields, rope_object: Fields) -> Llama3Scaling:
    bounds = rope_object.required("low_freq_factor", "high_freq_factor")
    if bounds["high_freq_factor"] <= bounds["low_freq_factor"]:
        raise rope_object.rule_error("high_freq_factor", f"more than low_freq_factor, {bounds['low_freq_factor']:g}")
    return Llama3Scaling(**_read_common_fields(config, rope_object), **bounds)


def _read_yarn(config: Fields, rope_object: Fields) -> YarnScaling:
    common_fields = _read_common_fields(config, rope_object)
    beta_fast, beta_slow = rope_object.optional("beta_fast", 32.0), rope_object.optional("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise rope_object.rule_error(
            "beta_fast" if rope_object.has("beta_fast") else "beta_slow",
            f"such that beta_fast, {beta_fast:g}, is at least beta_slow, {beta_slow:g}",
        )
    return YarnScaling(
        **common_fields,
        attention_factor=rope_object.optional(
            "attention_factor", _yarn_attention_factor(rope_object, common_fields["factor"])
        ),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope_object.optional("truncate", True),
    )


def _read_longrope(config: Fields, rope_object: Fields) -> LongRopeScaling:
    """Return the scaling with factors in float32, as transformers computes with them.

    The default of the factor is the extended length divided by the original length. The default of attention_factor is
    computed from the factor, as in the paper.
    """
    extended_length = config.required("max_position_embeddings")["max_position_embeddings"]
    original_length = _original_length(config, rope_object)
    factor = rope_object.optional("factor", extended_length / original_length)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0
    return LongRopeScaling(
        factor=float(factor),
        original_max_position_embeddings=original_length,
        attention_factor=float(rope_object.optional("attention_factor", attention_factor)),
        **{name: tuple(array("f", rope_object.required(name)[name])) for name in ("short_factor", "long_factor")},
    )


def _check_factors(rope_object: Fields, scaling: LongRopeScaling, pairs: int) -> None:
    for name in ("short_factor", "long_factor"):
        count = len(getattr(scaling, name))
        if count != pairs:
            raise rope_object.field_error(
                name, f"must have a factor for each of {pairs} pairs of dimensions; got {count}"
            )


def _yarn_attention_factor(rope_object: Fields, factor: float) -> float:
    """Return the factor 0.1 ln(factor) + 1 of the paper.

    With mscale and mscale_all_dim, the factor is a ratio of two such terms.
    """

    def scale_term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all_dim = rope_object.optional("mscale", 0.0), rope_object.optional("mscale_all_dim", 0.0)
    return scale_term(mscale) / scale_term(mscale_all_dim) if mscale and mscale_all_dim else scale_term(1.0)


def _read_common_fields(config: Fields, rope_object: Fields) -> dict[str, Any]:
    """Return the fields that all types have: the factor and the original context length.

    The original length may also be a field of `config`. If neither object has it, it is max_position_embeddings.
    """
    factor = rope_object.required("factor")["factor"]
    return {"factor": float(factor), _ORIGINAL_LENGTH: _original_length(config, rope_object)}


def _original_length(config: Fields, rope_object: Fields) -> int:
    """Return the context length of the unscaled frequencies."""
    original_length: int | None = rope_object.optional(_ORIGINAL_LENGTH)
    outer_length = config.optional(_ORIGINAL_LENGTH)
    if original_length is not None and outer_length not in (None, original_length):
        raise rope_object.rule_error(_ORIGINAL_LENGTH, f"the same as outside of this object, {outer_length}")
    if original_length is None:
        original_length = outer_length or config.required("max_position_embeddings")["max_position_embeddings"]
    assert original_length is not None
    return original_length


def _describe_scalings(scalings: Mapping[str, RopeScaling | None]) -> str:
    return " and ".join(
        f"{name} {scaling.rope_type} of factor {scaling.factor:g}" if scaling else f"{name} default"
        for name, scaling in scalings.items()
    )


_SCALING_READERS: dict[str, Callable[[Fields, Fields], RopeScaling]] = {
    "linear": _read_linear,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
    "yarn": _read_yarn,
}
_KNOWN_FIELDS = {
    *_WEIGHT_FIELDS,
    *("rope_type", "type", "factor", _ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
