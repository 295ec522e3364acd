"""One table with the type and range of every field that is read from a checkpoint's JSON files.

Without these checks a wrong value would fail in a kernel, or change results without an error. This module does not
import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meltcore.common.errors import ConfigError

_MAX_SHOWN_CHARS = 120
# Of a context. Memory ends before: at this length the rotary table of heads of 128 dimensions takes 8 GiB.
MAX_POSITIONS = 2**24


class Rule(NamedTuple):
    """The requirement of a field: a text for errors (after "must be"), and a function that checks the value."""

    requirement: str
    is_valid: Callable[[Any], bool]


def _integer_rule(minimum: int, maximum: int) -> Rule:
    # type() and not isinstance: true and false are ints to Python.
    return Rule(
        f"a whole number from {minimum} to {maximum}", lambda value: type(value) is int and minimum <= value <= maximum
    )


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_group_size(value: Any) -> bool:
    return type(value) is int and (value > 0 or value == -1)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_token_dict(value: Any) -> bool:
    """Return whether the value is an object of tokens by their ids, as in tokenizer_config.json."""
    return isinstance(value, dict) and all(
        key.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        for key, token in value.items()
    )


def _is_token_list(value: Any) -> bool:
    """Return whether the value is a list of tokens with their ids, as in tokenizer.json."""
    return isinstance(value, list) and all(
        isinstance(token, dict) and _is_id(token.get("id")) and isinstance(token.get("content"), str) for token in value
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


_FLAG = Rule("true or false", lambda value: isinstance(value, bool))
_OBJECT = Rule("an object", lambda value: isinstance(value, dict))
_TEXT = Rule("text", lambda value: isinstance(value, str))
_TEXT_LIST = Rule("a list of texts", _is_text_list)
_FRACTION = Rule("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
_POSITIVE = Rule("a number above 0 and at most 1e6", lambda value: type(value) in (int, float) and 0 < value <= 1e6)
_NON_NEGATIVE = Rule("a number from 0 to 1e6", lambda value: type(value) in (int, float) and 0 <= value <= 1e6)
_MULTIPLIER = Rule("a number from 1e-4 to 1e4", lambda value: type(value) in (int, float) and 1e-4 <= value <= 1e4)
_THETA = Rule("a number from 1 to 1e12", lambda value: type(value) in (int, float) and 1 <= value <= 1e12)
# The largest numbers are far beyond any model, and small enough that no product of them overflows.
_COUNT = _integer_rule(1, 2**14)
_WIDTH = _integer_rule(1, 2**20)
_SIZES = Rule("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_is_id, value)))

_FACTORS = Rule(
    "a list of numbers from 1e-4 to 1e6",
    lambda value: isinstance(value, list) and all(type(each) in (int, float) and 1e-4 <= each <= 1e6 for each in value),
)

RULES: dict[str, Rule] = {
    # config.json
    "architectures": _TEXT_LIST,
    "model_type": _TEXT,
    "text_config": _OBJECT,
    "quantization_config": _OBJECT,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": _COUNT,
    "vocab_size": _integer_rule(1, 2**24),
    # Of text encoders, and of the files of sentence-transformers
    "layer_norm_eps": _FRACTION,
    "type_vocab_size": _COUNT,
    **dict.fromkeys(("pad_token_id", "true_token_id", "false_token_id"), Rule("a whole number of at least 0", _is_id)),
    "position_embedding_type": _TEXT,
    "is_decoder": _FLAG,
    "add_cross_attention": _FLAG,
    "is_matryoshka": _FLAG,
    "matryoshka_dimensions": _SIZES,
    "id2label": _OBJECT,
    "path": _TEXT,
    "max_seq_length": _integer_rule(2, MAX_POSITIONS),
    # Of encoder-decoders
    **{
        f"{side}_{name}": rule
        for side in ("encoder", "decoder")
        for name, rule in (
            ("vocab_size", _integer_rule(1, 2**24)),
            ("embed_dim", _WIDTH),
            ("ffn_dim", _WIDTH),
            ("layers", _COUNT),
            ("attention_heads", _COUNT),
            ("normalize_before", _FLAG),
        )
    },
    "activation_function": _TEXT,
    "scale_embedding": _FLAG,
    "layernorm_embedding": _FLAG,
    "share_decoder_input_output_embed": _FLAG,
    "max_source_positions": _integer_rule(1, MAX_POSITIONS),
    "max_target_positions": _integer_rule(1, MAX_POSITIONS),
    # Of F5-TTS's configurations
    **dict.fromkeys(("arch", "mel_spec", "vocoder"), _OBJECT),
    **dict.fromkeys(("dim", "text_dim", "intermediate_dim", "target_sample_rate"), _WIDTH),
    **dict.fromkeys(("depth", "heads", "dim_head", "ff_mult", "conv_layers", "num_layers"), _COUNT),
    **dict.fromkeys(("hop_length", "win_length", "n_mel_channels", "pe_attn_head"), _COUNT),
    "max_frames": _integer_rule(256, 2**14),
    "text_mask_padding": _FLAG,
    "qk_norm": _TEXT,
    "vocab_path": _TEXT,
    "max_position_embeddings": _integer_rule(2, MAX_POSITIONS),  # at least a prompt's token and an answer's
    "rms_norm_eps": _FRACTION,
    "rope_theta": _THETA,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "rope_local_base_freq": _THETA,
    "full_attention": _OBJECT,
    "sliding_attention": _OBJECT,
    "partial_rotary_factor": _FRACTION,
    # Of rope_parameters and rope_scaling
    "rope_type": _TEXT,
    "type": _TEXT,
    "factor": Rule("a number from 1 to 1e6", lambda value: type(value) in (int, float) and 1 <= value <= 1e6),
    "original_max_position_embeddings": _integer_rule(1, MAX_POSITIONS),
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "attention_factor": _POSITIVE,
    "mscale": _NON_NEGATIVE,
    "mscale_all_dim": _NON_NEGATIVE,
    "truncate": _FLAG,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "lm_head_bias": _FLAG,
    "attn_output_gate": _FLAG,
    "use_sliding_window": _FLAG,
    "sliding_window": _integer_rule(1, MAX_POSITIONS),
    "sliding_window_pattern": _COUNT,
    "query_pre_attn_scalar": _POSITIVE,
    "attn_logit_softcapping": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "use_bidirectional_attention": _FLAG,
    "is_causal": _FLAG,
    "hidden_activation": _TEXT,
    "hidden_act": _TEXT,
    "layer_types": _TEXT_LIST,
    "full_attention_interval": _COUNT,
    **dict.fromkeys(
        ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), _MULTIPLIER
    ),
    "no_rope_layers": Rule(
        "a list of 0 and 1", lambda value: isinstance(value, list) and all(_is_id(each) and each <= 1 for each in value)
    ),
    "no_rope_layer_interval": _COUNT,
    "rope_interleaved": _FLAG,
    "linear_num_key_heads": _COUNT,
    "linear_num_value_heads": _COUNT,
    "linear_key_head_dim": _COUNT,
    "linear_value_head_dim": _COUNT,
    "linear_conv_kernel_dim": _COUNT,
    "num_experts": _COUNT,
    "num_local_experts": _COUNT,
    "num_experts_per_tok": _COUNT,
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _integer_rule(0, 2**20),
    "mtp_num_hidden_layers": _integer_rule(0, 2**14),
    "mtp_use_dedicated_embeddings": _FLAG,
    "norm_topk_prob": _FLAG,
    "decoder_sparse_step": _COUNT,
    "mlp_only_layers": Rule(
        "a list of whole numbers of at least 0", lambda value: isinstance(value, list) and all(map(_is_id, value))
    ),
    # Of quantization_config
    "quant_method": _TEXT,
    "modules_to_not_convert": _TEXT_LIST,
    "ignored_layers": _TEXT_LIST,
    "weight_block_size": _SIZES,
    "activation_scheme": _TEXT,
    "fmt": _TEXT,
    "format": _TEXT,
    "config_groups": Rule(
        "an object of objects",
        lambda value: isinstance(value, dict) and all(isinstance(group, dict) for group in value.values()),
    ),
    "ignore": _TEXT_LIST,
    "targets": _TEXT_LIST,
    "weights": _OBJECT,
    "input_activations": _OBJECT,
    "kv_cache_scheme": _OBJECT,
    "num_bits": _COUNT,
    "strategy": _TEXT,
    "symmetric": _FLAG,
    "block_structure": _SIZES,
    "dynamic": Rule("true, false or an object", lambda value: isinstance(value, (bool, dict))),
    "bits": _COUNT,
    "group_size": Rule("a whole number of at least 1, or -1", _is_group_size),
    "zero_point": _FLAG,
    "version": _TEXT,
    "desc_act": _FLAG,
    "sym": _FLAG,
    "checkpoint_format": _TEXT,
    "lm_head": _FLAG,
    # model_config.yaml of NeMo
    **dict.fromkeys(
        (
            "preprocessor",
            "encoder",
            "decoder",
            "prednet",
            "joint",
            "jointnet",
            "tokenizer",
            "langs",
            "decoding",
            "greedy",
        ),
        _OBJECT,
    ),
    "nemo_version": _TEXT,
    "sample_rate": _integer_rule(8000, 192_000),
    "window_size": _FRACTION,
    "window_stride": _FRACTION,
    "n_fft": _integer_rule(16, 2**16),
    "features": _integer_rule(1, 1024),
    "preemph": Rule("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "feat_in": _integer_rule(1, 1024),
    "n_layers": _COUNT,
    "d_model": _WIDTH,
    "n_heads": _COUNT,
    "subsampling": _TEXT,
    "subsampling_factor": _integer_rule(2, 64),
    "subsampling_conv_channels": Rule(
        "-1 or a count", lambda value: type(value) is int and (value == -1 or 1 <= value <= 2**14)
    ),
    "ff_expansion_factor": _integer_rule(1, 64),
    "xscaling": _FLAG,
    "conv_kernel_size": _integer_rule(1, 1023),
    "pred_hidden": _WIDTH,
    "pred_rnn_layers": _COUNT,
    "joint_hidden": _WIDTH,
    "activation": _TEXT,
    "num_classes": _integer_rule(1, 2**24),
    "language_keys": _TEXT_LIST,
    "max_symbols": _COUNT,
    # config.json of IndicConformer's published files
    "BLANK_ID": _integer_rule(0, 2**24),
    "SOS": _integer_rule(0, 2**24),
    "RNNT_MAX_SYMBOLS": _COUNT,
    "PRED_RNN_LAYERS": _COUNT,
    "PRED_RNN_HIDDEN_DIM": _WIDTH,
    # generation_config.json, and config.json
    "eos_token_id": Rule(
        "a whole number of at least 0, or a list of them",
        lambda value: _is_id(value) or (isinstance(value, list) and all(map(_is_id, value))),
    ),
    # model.safetensors.index.json
    "weight_map": Rule(
        "an object that names a file for each tensor",
        lambda value: isinstance(value, dict) and bool(value) and _is_text_list(list(value.values())),
    ),
    # tokenizer_config.json and tokenizer.json
    "eos_token": Rule("text, or an object with a text as its content", _is_token),
    "added_tokens_decoder": Rule("an object of tokens by their ids, each with its content", _is_token_dict),
    "added_tokens": Rule("a list of tokens, each with its id and content", _is_token_list),
}


class Fields:
    """A JSON object of a checkpoint. Fields are checked by RULES when they are read. A null field counts as absent."""

    def __init__(self, values: Mapping[str, Any], file: str = "config.json", prefix: str = "") -> None:
        """Wrap the object `values`.

        For errors, `prefix` is the path to this object in `file`, with a dot at its end.
        """
        self._values, self._file, self._prefix = values, file, prefix

    def optional(self, name: str, default: Any = None) -> Any:
        """Return a field, or `default` if the field is absent.

        Raises ConfigError if the value breaks the field's rule.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not RULES[name].is_valid(value):
            raise self.rule_error(name, RULES[name].requirement)
        return value

    def optional_not_null(self, name: str, default: Any) -> Any:
        """Return a field, or `default` if the field is absent.

        Raises ConfigError if the value is null or breaks the field's rule.
        """
        if name in self._values and self._values[name] is None:
            raise self.rule_error(name, RULES[name].requirement)
        return self.optional(name, default)

    def required(self, *names: str) -> dict[str, Any]:
        """Return fields by name.

        Raises ConfigError that lists all missing fields, or if a value breaks its field's rule.
        """
        missing = [self._prefix + name for name in names if self._values.get(name) is None]
        if missing:
            raise ConfigError(f"{self._file} lacks {', '.join(missing)}")
        return {name: self.optional(name) for name in names}

    def nested_fields(self, name: str) -> Fields:
        """Return the object in a field, or an empty object if the field is absent."""
        return Fields(self.optional(name, {}), self._file, f"{self._prefix}{name}.")

    def entry(self, name: str) -> Fields:
        """Return the object under a name that has no rule, such as a group's name."""
        return Fields(self._values[name], self._file, f"{self._prefix}{name}.")

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def with_values(self, **values: Any) -> Fields:
        """Return a copy of the object with new values in the named fields."""
        return Fields({**self._values, **values}, self._file, self._prefix)

    def with_defaults(self, **defaults: Any) -> Fields:
        """Return a copy of the object in which absent fields have the value of `defaults`."""
        return self.with_values(**{name: value for name, value in defaults.items() if not self.has(name)})

    def rule_error(self, name: str, requirement: str) -> ConfigError:
        """Return the error for a field whose value does not meet `requirement`."""
        return self.field_error(name, f"must be {requirement}; got {short_json(self._values.get(name))}")

    def field_error(self, name: str, reason: str) -> ConfigError:
        """Return the error for a field that cannot be used. In its text `reason` follows the field's name."""
        return ConfigError(f"{self._file}: {self._prefix}{name} {reason}")

    def unsupported_field(self, name: str, family: str = "this decoder") -> ConfigError:
        """Return the error for a field whose value `family` does not support."""
        value = short_json(self._values.get(name))
        return ConfigError(f"{self._file} sets {self._prefix}{name} to {value}, which {family} does not compute")


def short_json(value: Any) -> str:
    """Return the value as one line of JSON, cut after _MAX_SHOWN_CHARS characters."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
