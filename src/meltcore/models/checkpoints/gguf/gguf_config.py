"""Reads a GGUF file's metadata as the config.json that the same model has on the Hugging Face hub.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. If a file leaves out a value, it gets the default of
llama.cpp and the published configuration. This module does not import torch.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

from meltcore.common.errors import ConfigError, UnservableModelError
from meltcore.models.checkpoints.gguf.gguf_file import GGUFArray, GGUFModel, describe_value
from meltcore.models.checkpoints.gguf.gguf_formats import DENSE_TYPES, EMBEDDING, HEAD, unsupported_formats
from meltcore.models.checkpoints.gguf.gguf_tokens import read_token_ids
from meltcore.models.configs.config_fields import RULES, Rule


class _Family(NamedTuple):
    architecture: str  # of config.json
    model_type: str
    rope_theta: float  # without rope.freq_base


FAMILIES = {
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", 1e6),
    "granite": _Family("GraniteForCausalLM", "granite", 1e4),
    "llama": _Family("LlamaForCausalLM", "llama", 1e4),
    "mistral3": _Family("MistralForCausalLM", "mistral", 1e4),
    "olmo2": _Family("Olmo2ForCausalLM", "olmo2", 1e4),
    "phi3": _Family("Phi3ForCausalLM", "phi3", 1e4),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", 1e4),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", 1e4),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", "qwen3_moe", 1e4),
    "smollm3": _Family("SmolLM3ForCausalLM", "smollm3", 1e4),
}
# Fields of config.json and the keys, after the architecture's name, that hold them.
REQUIRED_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
# Keys that change what a network computes, and the values with which they do not.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
# Granite's fields of config.json and the keys that hold them. 0 and an absent key stand for no factor.
GRANITE_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_OWN_KEYS = {"gemma3": ("attention.scale",), "granite": tuple(GRANITE_KEYS.values())}  # which a family computes
_LAYER_NAME = re.compile(r"blk\.([0-9]{1,9})\.")
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # parts of the configuration
# Gemma 3 by its number of layers: 34 (4B), 48 (12B) and 62 (27B) have linear scaling, and 27B a scale of its own.
_GEMMA_4B_LAYERS, _GEMMA_27B_LAYERS, _GEMMA_FACTOR, GEMMA_PATTERN = 34, 62, 8.0, 6
_ATTENTION_SCALE = Rule(  # its inverse square is a valid query_pre_attn_scalar
    "a number from 0.001 to 10", lambda value: type(value) in (int, float) and 0.001 <= value <= 10
)
# Llama 3.1, 3.2 and 3.3 have these, and an original length of 8192.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTHS = 1.0, 4.0, [2**power for power in range(13, 5, -1)] + [2**14, 2**15, 2**16]


def read_servable_config(model: GGUFModel, *, has_tokenizer: bool) -> dict[str, Any]:
    """Return the config.json of a GGUF checkpoint that can be served.

    With `has_tokenizer`, --tokenizer replaces the file's tokenizer. Raises UnservableModelError with all reasons why
    the file cannot be served: what `read_config` refuses, formats of weights, or a missing tokenizer.
    """
    reasons, config = [], dict[str, Any]()
    try:
        config = read_config(model)
    except ConfigError as error:
        reasons.append(str(error).removeprefix(f"{model.path}: ").removeprefix(f"{model.path} "))
    if (reason := unsupported_formats(model, is_configured=not reasons)) is not None:
        reasons.append(reason)
    if not has_tokenizer and "tokenizer.ggml.tokens" not in model.metadata:
        reasons.append("has no tokenizer (tokenizer.ggml.tokens); name one with --tokenizer")
    if reasons:
        raise UnservableModelError(str(model.path), reasons)
    return config


def read_config(model: GGUFModel) -> dict[str, Any]:
    """Return the config.json of a GGUF checkpoint.

    Formats of weights are not checked. Raises ConfigError for an unknown architecture, for a missing or wrong value,
    and for an unsupported variant. The error names the file and the key.
    """
    name = model.metadata.get("general.architecture")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"{model.path}: general.architecture is {describe_value(name)}; supported: {', '.join(FAMILIES)}"
        )
    keys = _Keys(model, str(name))
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {field: keys.required(field, key) for field, key in REQUIRED_KEYS.items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.optional("num_key_value_heads", "attention.head_count_kv", heads)
    config["head_dim"] = _head_dim(keys, config)
    if name == "phi3":  # Phi-4-mini rotates a part of a head
        rotary_dim = keys.optional("head_dim", "rope.dimension_count", config["head_dim"])
        config["partial_rotary_factor"] = min(1.0, rotary_dim / config["head_dim"])
    if name == "qwen3moe":
        config |= {field: keys.required(field, key) for field, key in EXPERT_KEYS.items()}
        config["norm_topk_prob"] = keys.optional("norm_topk_prob", "expert_weights_norm", True)
    else:
        config["intermediate_size"] = keys.required("intermediate_size", "feed_forward_length")
        keys.require_neutral("expert_count", (0,))
    for key, values in _NEUTRAL_VALUES.items():
        if key not in _OWN_KEYS.get(str(name), ()):
            keys.require_neutral(key, values)
    config |= _read_tensors(model, config)
    config["rope_theta"] = keys.optional("rope_theta", "rope.freq_base", family.rope_theta)
    rope = _read_rope(keys, config)
    if name == "gemma3":
        config |= _read_gemma(keys, config)
        rope = _gemma_rope(keys, config, rope)
    else:
        key = "attention.sliding_window"
        window = None if keys.raw(key) == 0 else keys.optional("sliding_window", key)
        if name in ("phi3", "mistral3"):
            config["sliding_window"] = window
        elif window and name == "llama":  # Mistral 7B v0.1
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        elif window:
            raise keys.unsupported(key)
    if name == "granite":
        config |= _read_granite(keys, config)
    if rope:
        config["rope_scaling"] = rope
        if rope["rope_type"] == "longrope":  # Phi-3's class reads it here first
            config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return config | (_read_token_ids(model, config["vocab_size"]) if EMBEDDING in model.tensors else {})


class _Keys:
    """The metadata keys of an architecture. A value is checked by the rule of the config.json field that it gives."""

    def __init__(self, model: GGUFModel, architecture: str) -> None:
        self.model, self._prefix = model, f"{architecture}."

    def optional(self, field: str | Rule, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the key is absent. An array must repeat one value per layer.

        Args:
            field: a field of config.json, whose rule checks the value. If the field is computed from the value, this is
                the rule itself.
            key: the key without the architecture's prefix.
            default: the value of an absent key.
        """
        value = self.raw(key)
        if isinstance(value, GGUFArray):
            per_layer = set(self.model.numbers(self._prefix + key).tolist())
            if len(per_layer) != 1:
                raise self.error(key, f"differs between layers: {sorted(per_layer)[:5]}; one value is supported")
            value = per_layer.pop()
        if value is None:
            return default
        rule = RULES[field] if isinstance(field, str) else field
        if not rule.is_valid(value):
            raise self.error(key, f"must be {rule.requirement}; got {describe_value(value)}")
        return value

    def required(self, field: str, key: str) -> Any:
        """Return the value of a key. Raises ConfigError if it is absent."""
        value = self.optional(field, key)
        if value is None:
            raise ConfigError(f"{self.model.path} lacks {self._prefix}{key}")
        return value

    def raw(self, key: str) -> Any:
        """Return a value unchecked, or None if it is absent."""
        return self.model.metadata.get(self._prefix + key)

    def require_neutral(self, key: str, values: tuple[Any, ...]) -> None:
        """Raise ConfigError if the key has a value that is not one of `values`.

        Other values need a computation that Meltcore does not have.
        """
        value = self.raw(key)
        if value is not None and (isinstance(value, GGUFArray) or value not in values):
            raise self.unsupported(key)

    def unsupported(self, key: str) -> ConfigError:
        """Return the error for a key whose value is not supported."""
        return self.error(key, f"is {describe_value(self.raw(key))}, which is not computed here")

    def error(self, key: str, reason: str) -> ConfigError:
        """Return the error for a key. In its text `reason` follows the name of the key."""
        return ConfigError(f"{self.model.path}: {self._prefix}{key} {reason}")


def _head_dim(keys: _Keys, config: dict[str, Any]) -> int:
    """Return the head size. Keys and values must have the same size, and all dimensions must rotate."""
    hidden_size, heads, kv_heads = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if heads % kv_heads:
        raise keys.error("attention.head_count", f"must be a multiple of head_count_kv, {kv_heads}; got {heads}")
    head_dim: int | None = keys.optional("head_dim", "attention.key_length")
    if head_dim is None:
        if hidden_size % heads:
            raise keys.error("embedding_length", f"must be a multiple of head_count, {heads}; got {hidden_size}")
        head_dim = hidden_size // heads
    keys.require_neutral("attention.value_length", (head_dim,))
    if keys.model.metadata["general.architecture"] != "phi3":
        keys.require_neutral("rope.dimension_count", (head_dim,))
    return head_dim


def _read_tensors(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that tensors give: the vocabulary, whether the head is tied, and the type of weights."""
    embedding = model.tensors.get(EMBEDDING)
    if embedding is None and EMBEDDING in model.unknown_types:
        return {"vocab_size": 0, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}  # the type is refused
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != config["hidden_size"]:
        shape = "is missing" if embedding is None else f"has shape {list(embedding.shape)}"
        raise ConfigError(f"{model.path}: {EMBEDDING} {shape}; it must be [vocabulary, {config['hidden_size']}]")
    names = (*model.tensors, *model.unknown_types)
    layers = {int(match[1]) for name in names if (match := _LAYER_NAME.match(name))}
    if layers != set(range(config["num_hidden_layers"])):
        raise ConfigError(
            f"{model.path}: block_count is {config['num_hidden_layers']}; the file has tensors of {len(layers)} layers"
        )
    query = model.tensors.get("blk.0.attn_q.weight", model.tensors.get("blk.0.attn_qkv.weight"))
    dtype = DENSE_TYPES.get(query.type, "bfloat16") if query is not None else "bfloat16"
    if config["model_type"] in ("gemma3_text", "granite") and dtype == "float16":
        dtype = "bfloat16"  # Gemma's activations overflow float16; Granite's stream is larger here than published
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": HEAD not in model.tensors,
        "torch_dtype": dtype,
    }


def _read_rope(keys: _Keys, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return rope_scaling, or None for unscaled frequencies."""
    rope_type = keys.raw("rope.scaling.type")
    factor_key = "rope.scaling.factor" if keys.raw("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = keys.optional("factor", factor_key) if keys.raw(factor_key) != 0.0 else None
    if LONG_FACTORS in keys.model.tensors or SHORT_FACTORS in keys.model.tensors:
        keys.require_neutral("rope.scaling.type", ("none", "longrope"))
        return _longrope(keys, config)
    keys.require_neutral("rope.scaling.attn_factor", (1.0,))
    if ROPE_FACTORS in keys.model.tensors:
        keys.require_neutral("rope.scaling.type", ("none", "llama3"))
        return _llama3_rope(keys.model, config)
    if rope_type is None and factor is not None:
        rope_type = "linear"
    if rope_type not in (None, "none", "linear", "yarn"):
        raise keys.unsupported("rope.scaling.type")
    if rope_type in (None, "none") or factor in (None, 1.0):
        return None
    rope = {"rope_type": rope_type, "factor": factor}
    original = keys.optional("original_max_position_embeddings", "rope.scaling.original_context_length")
    if original is not None:
        rope["original_max_position_embeddings"] = original
    if rope_type == "yarn":
        for field, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = keys.optional(field, f"rope.scaling.{key}")
            rope |= {} if value is None else {field: value}
        keys.require_neutral("rope.scaling.yarn_ext_factor", (-1.0, 1.0))
        keys.require_neutral("rope.scaling.yarn_attn_factor", (1.0,))
        keys.require_neutral("rope.scaling.yarn_log_multiplier", (0.0, 0.1))
    return rope


def _longrope(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return LongRoPE's scaling, whose factors are two tensors. Without attn_factor the scores are not scaled."""
    context, original = (
        keys.optional("original_max_position_embeddings", key)
        for key in ("context_length", "rope.scaling.original_context_length")
    )
    keys.require_neutral("rope.scaling.factor", (0.0, 1.0))
    original = context if original is None else original
    attention_factor = keys.optional("attention_factor", "rope.scaling.attn_factor", 1.0)
    # The file has the published value, which follows from the lengths, in float32.
    published = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original > 1 else 1.0
    pairs = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)) // 2
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "attention_factor": published if math.isclose(attention_factor, published, rel_tol=1e-6) else attention_factor,
        "short_factor": _factors(keys.model, SHORT_FACTORS, pairs).tolist(),
        "long_factor": _factors(keys.model, LONG_FACTORS, pairs).tolist(),
    }


def _factors(model: GGUFModel, name: str, pairs: int) -> np.ndarray[Any, Any]:
    """Return the divisors of rotary frequencies that a tensor holds. Raises ConfigError for another type or shape."""
    tensor = model.tensors.get(name)
    if tensor is None or tensor.type != GGMLQuantizationType.F32 or tensor.shape != (pairs,):
        problem = "is missing" if tensor is None else f"is {tensor.type.name} {list(tensor.shape)}"
        raise ConfigError(f"{model.path}: {name} {problem}; it must be F32 [{pairs}]")
    factors: np.ndarray[Any, Any] = model.file_by_tensor[name].blocks(name).view("<f4")[0].astype(np.float64)
    return factors


def _llama3_rope(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the llama3 scaling whose divisors of the frequencies are in the tensor rope_freqs.weight.

    The file says nothing else about the scaling. Raises ConfigError if no llama3 scaling gives these divisors.
    """
    head_dim = config["head_dim"]
    divisors = _factors(model, ROPE_FACTORS, head_dim // 2)
    factor = float(divisors.max())
    if factor == 1.0:
        return None
    frequencies = config["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    for length in _LLAMA3_LENGTHS:
        turns = length * frequencies / (2 * math.pi)
        kept_fraction = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
        if np.allclose(divisors, 1 / (kept_fraction + (1 - kept_fraction) / factor), rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": length,
            }
    raise ConfigError(
        f"{model.path}: {ROPE_FACTORS} divides rotary frequencies by up to {factor:g} in a way that is not Llama 3's; "
        "supported are low_freq_factor 1 and high_freq_factor 4"
    )


def _read_gemma(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Gemma 3 that other families lack."""
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    is_27b = layers == _GEMMA_27B_LAYERS
    scale = keys.optional(_ATTENTION_SCALE, "attention.scale")
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim
    fields = {
        "sliding_window": keys.required("sliding_window", "attention.sliding_window"),
        "query_pre_attn_scalar": scalar if scale is None else round(scale**-2, 3),
        "rope_local_base_freq": keys.optional("rope_local_base_freq", "rope.freq_base_swa", 10_000.0),
    }
    key = "attention.sliding_window_pattern"
    if isinstance(keys.raw(key), GGUFArray):  # per layer: whether it has a window
        sliding = keys.model.numbers(f"gemma3.{key}").tolist()
        if len(sliding) != layers:
            raise keys.error(key, f"must have a value for each of {layers} layers; got {len(sliding)}")
        if invalid := [each for each in sliding if each not in (0, 1)]:
            raise keys.error(key, f"must be true or false for each layer; got {invalid[0]}")
        return fields | {"layer_types": ["sliding_attention" if each else "full_attention" for each in sliding]}
    return fields | {"sliding_window_pattern": keys.optional("sliding_window_pattern", key, GEMMA_PATTERN)}


def _read_granite(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return Granite's four constants. Without a constant for attention, scores have their usual scale."""
    keys.require_neutral("rope.scaling.finetuned", (True,))  # false: no rotary embeddings at all
    fields = {field: keys.optional(field, key) for field, key in GRANITE_KEYS.items() if keys.raw(key) != 0.0}
    fields = {field: value for field, value in fields.items() if value is not None}
    return {"attention_multiplier": config["head_dim"] ** -0.5} | fields


def _gemma_rope(keys: _Keys, config: dict[str, Any], rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return rope_scaling with the published default of 4B and larger models, whose files may leave it out."""
    is_stated = keys.raw("rope.scaling.factor") is not None or keys.raw("rope.scaling.type") is not None
    if is_stated or config["num_hidden_layers"] < _GEMMA_4B_LAYERS:
        return rope
    return {"rope_type": "linear", "factor": _GEMMA_FACTOR}


def _read_token_ids(model: GGUFModel, vocab_size: int) -> dict[str, Any]:
    """Return bos_token_id and eos_token_id.

    End tokens are the tokens that the file names as such, and control tokens whose text ends a turn. Returns no fields
    if the file has no vocabulary, which --tokenizer may replace.
    """
    if "tokenizer.ggml.tokens" not in model.metadata:
        return {}
    tokens = model.texts("tokenizer.ggml.tokens")
    if len(tokens) > vocab_size:
        raise ConfigError(f"{model.path}: tokenizer.ggml.tokens has {len(tokens)} tokens; {EMBEDDING} has {vocab_size}")
    return read_token_ids(model, tokens)
