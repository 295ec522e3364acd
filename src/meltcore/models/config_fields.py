"""What the JSON files of a checkpoint may hold: the type and range of every field that is read, in one table. No torch.

A value of another type would else go into the network as it stands and fail in some later kernel, or in none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meltcore.errors import ConfigError

_SHOWN_CHARS = 120


class Rule(NamedTuple):
    """must: what a value has to be, in the words of an error."""

    must: str
    holds: Callable[[Any], bool]


def _whole(least: int, most: int) -> Rule:
    # type() and not isinstance: true and false are ints to Python.
    return Rule(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_tokens(value: Any) -> bool:
    """Of an object: tokenizer_config.json's tokens by their ids."""
    return isinstance(value, dict) and all(
        key.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        for key, token in value.items()
    )


def _is_token_list(value: Any) -> bool:
    """tokenizer.json's tokens, each with its id."""
    return isinstance(value, list) and all(
        isinstance(token, dict) and _is_id(token.get("id")) and isinstance(token.get("content"), str) for token in value
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


_FLAG = Rule("true or false", lambda value: isinstance(value, bool))
_OBJECT = Rule("an object", lambda value: isinstance(value, dict))
_TEXT = Rule("text", lambda value: isinstance(value, str))
_TEXTS = Rule("a list of texts", _is_texts)
_SHARE = Rule("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
# The largest numbers are far beyond any network, and small enough that no product of them overflows.
_COUNT = _whole(1, 2**14)
_WIDTH = _whole(1, 2**20)

RULES: dict[str, Rule] = {
    # config.json
    "architectures": _TEXTS,
    "text_config": _OBJECT,
    "quantization_config": _OBJECT,
    "quant_method": _TEXT,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": _COUNT,
    "vocab_size": _whole(1, 2**24),
    # A prompt's token and an answer's; and float32, of which the rotary table is made, counts no further.
    "max_position_embeddings": _whole(2, 2**24),
    "rms_norm_eps": _SHARE,
    "rope_theta": Rule("a number from 1 to 1e12", lambda value: type(value) in (int, float) and 1 <= value <= 1e12),
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "partial_rotary_factor": _SHARE,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "attn_output_gate": _FLAG,
    "use_sliding_window": _FLAG,
    "hidden_act": _TEXT,
    "layer_types": _TEXTS,
    "full_attention_interval": _COUNT,
    "linear_num_key_heads": _COUNT,
    "linear_num_value_heads": _COUNT,
    "linear_key_head_dim": _COUNT,
    "linear_value_head_dim": _COUNT,
    "linear_conv_kernel_dim": _COUNT,
    "num_experts": _COUNT,
    "num_local_experts": _COUNT,
    "num_experts_per_tok": _COUNT,
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _whole(0, 2**20),
    "norm_topk_prob": _FLAG,
    "decoder_sparse_step": _COUNT,
    "mlp_only_layers": Rule(
        "a list of whole numbers of at least 0", lambda value: isinstance(value, list) and all(map(_is_id, value))
    ),
    # generation_config.json, and config.json
    "eos_token_id": Rule(
        "a whole number of at least 0, or a list of them",
        lambda value: _is_id(value) or (isinstance(value, list) and all(map(_is_id, value))),
    ),
    # model.safetensors.index.json
    "weight_map": Rule(
        "an object that names a file for each tensor",
        lambda value: isinstance(value, dict) and bool(value) and _is_texts(list(value.values())),
    ),
    # tokenizer_config.json and tokenizer.json
    "eos_token": Rule("text, or an object with a text as its content", _is_token),
    "added_tokens_decoder": Rule("an object of tokens by their ids, each with its content", _is_tokens),
    "added_tokens": Rule("a list of tokens, each with its id and content", _is_token_list),
}


class Fields:
    """A JSON object of a checkpoint, whose fields are checked by RULES as they are read. null stands for no field."""

    def __init__(self, values: Mapping[str, Any], file: str = "config.json", prefix: str = "") -> None:
        """prefix: the way to this object in the file, dots and all."""
        self._values, self._file, self._prefix = values, file, prefix

    def optional(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where there is none. Raises ConfigError where it breaks its rule."""
        value = self._values.get(name)
        if value is None:
            return default
        if not RULES[name].holds(value):
            raise self.wrong(name, RULES[name].must)
        return value

    def not_null(self, name: str, default: Any) -> Any:
        """The same for a field where null would mean another thing than its absence: it is refused."""
        if name in self._values and self._values[name] is None:
            raise self.wrong(name, RULES[name].must)
        return self.optional(name, default)

    def required(self, *names: str) -> dict[str, Any]:
        """Fields by their names. Raises ConfigError that lists all that are missing, or where one breaks its rule."""
        missing = [self._prefix + name for name in names if self._values.get(name) is None]
        if missing:
            raise ConfigError(f"{self._file} lacks {', '.join(missing)}")
        return {name: self.optional(name) for name in names}

    def part(self, name: str) -> Fields:
        """The object in a field, empty where there is none."""
        return Fields(self.optional(name, {}), self._file, f"{self._prefix}{name}.")

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def replaced(self, **values: Any) -> Fields:
        """The same with other values in some fields."""
        return Fields({**self._values, **values}, self._file, self._prefix)

    def wrong(self, name: str, must: str) -> ConfigError:
        """For a field whose value is not what it must be."""
        return self.refused(name, f"must be {must}; got {_shown(self._values.get(name))}")

    def refused(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{self._file}: {self._prefix}{name} {why}")

    def not_computed(self, name: str, family: str = "this decoder") -> ConfigError:
        """For a field that asks for a variant which we do not have."""
        value = _shown(self._values.get(name))
        return ConfigError(f"{self._file} sets {self._prefix}{name} to {value}, which {family} does not compute")


def _shown(value: Any) -> str:
    """As it stands in the file, in one line; of a long one its beginning."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
