"""Reads the configuration of a text encoder: sizes, and how its hidden states become an embedding or a score.

This module does not import torch, since plans of memory read configurations too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meltcore.common.errors import ConfigError
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.json_file import read_json, read_json_value

Pooling = Literal["cls", "mean"]
EMBEDDING_ARCHITECTURES = ("BertModel", "XLMRobertaModel")
RERANKING_ARCHITECTURES = ("BertForSequenceClassification", "XLMRobertaForSequenceClassification")
ENCODER_ACTIVATIONS = ("gelu", "relu")
_FAMILY = "this encoder"
_MODULES, _LIMITS = "modules.json", "sentence_bert_config.json"
_FIRST: Pooling = "cls"
_POOLING_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_cls_tokens": "cls",
    "pooling_mode_mean_tokens": "mean",
}


@dataclass(frozen=True)
class EncoderConfig:
    """Holds the sizes and variants of a BERT-class encoder.

    Args:
        first_position: the position of the first token; XLM-RoBERTa counts from the padding token's id on.
        max_tokens: the tokens of the longest input, including special tokens.
        pooling: the hidden state of the first token, or the mean over all tokens.
        is_normalized: whether embeddings have the length 1.
        is_reranker: whether a head computes one score of a pair of texts, instead of an embedding.
        has_pooler: whether a dense layer with tanh precedes a reranker's head, as in BERT.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    num_positions: int
    num_types: int
    first_position: int
    norm_eps: float
    activation: str
    max_tokens: int
    pooling: Pooling
    is_normalized: bool
    is_reranker: bool
    has_pooler: bool

    @classmethod
    def read(cls, values: Mapping[str, Any], folder: Path) -> EncoderConfig:
        """Read config.json, given as `values`, and the files of sentence-transformers in `folder`.

        Raises ConfigError for missing fields and unsupported values.
        """
        config = Fields(values)
        names = config.optional("architectures", [])
        known = (*EMBEDDING_ARCHITECTURES, *RERANKING_ARCHITECTURES)
        name = next((each for each in names if each in known), None)
        if name is None:
            raise ConfigError(f"config.json names {', '.join(names) or 'nothing'}; encoders are {', '.join(known)}")
        _check_variants(config)
        sizes = config.required(
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("vocab_size", "max_position_embeddings", "type_vocab_size"),
        )
        if sizes["hidden_size"] % sizes["num_attention_heads"]:
            raise config.field_error("hidden_size", "must be a multiple of num_attention_heads")
        first_position = config.optional("pad_token_id", 1) + 1 if name.startswith("XLMRoberta") else 0
        most_tokens = sizes["max_position_embeddings"] - first_position
        is_reranker = name in RERANKING_ARCHITECTURES
        if is_reranker and len(config.optional("id2label", {"0": ""})) != 1:
            raise config.field_error("id2label", "must name one label: rerankers have one score")
        pooling, is_normalized = (_FIRST, False) if is_reranker else _read_pooling(folder)
        return cls(
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_layers=sizes["num_hidden_layers"],
            num_heads=sizes["num_attention_heads"],
            vocab_size=sizes["vocab_size"],
            num_positions=sizes["max_position_embeddings"],
            num_types=sizes["type_vocab_size"],
            first_position=first_position,
            norm_eps=config.optional("layer_norm_eps", 1e-12),
            activation=config.optional("hidden_act", "gelu"),
            max_tokens=min(most_tokens, _trained_tokens(folder) or most_tokens),
            pooling=pooling,
            is_normalized=is_normalized,
            is_reranker=is_reranker,
            has_pooler=name == "BertForSequenceClassification",
        )

    def input_limit(self, max_model_len: int | None) -> int:
        """Return the maximum tokens of an input: `max_model_len` if it is given, else the checkpoint's limit.

        Raises ConfigError if `max_model_len` is more than the number of the model's positions.
        """
        if max_model_len is None:
            return self.max_tokens
        most_tokens = self.num_positions - self.first_position
        if not 2 <= max_model_len <= most_tokens:
            raise ConfigError(f"--max-model-len must be from 2 to the model's {most_tokens}; got {max_model_len}")
        return max_model_len


def _check_variants(config: Fields) -> None:
    """Raise ConfigError for a variant of the network that is not supported."""
    if config.optional("hidden_act", "gelu") not in ENCODER_ACTIVATIONS:
        raise config.unsupported_field("hidden_act", _FAMILY)
    if config.optional("position_embedding_type", "absolute") != "absolute":
        raise config.unsupported_field("position_embedding_type", _FAMILY)
    for name in ("is_decoder", "add_cross_attention"):
        if config.optional(name, False):
            raise config.unsupported_field(name, _FAMILY)


def _trained_tokens(folder: Path) -> int | None:
    """Return the maximum tokens of an input in the files of sentence-transformers, or None without a limit."""
    path = folder / _LIMITS
    tokens: int | None = Fields(read_json(path) if path.exists() else {}, _LIMITS).optional("max_seq_length")
    return tokens


def _read_pooling(folder: Path) -> tuple[Pooling, bool]:
    """Return the pooling and whether embeddings are normalized, from the files of sentence-transformers.

    A folder without these files pools the first token and normalizes, as vLLM does.
    """
    path = folder / _MODULES
    if not path.exists():
        return _FIRST, True
    listed = read_json_value(path)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError(f"{path} must be a list of objects")
    modules = [Fields(each, _MODULES) for each in listed]
    types = [module.required("type")["type"].rpartition(".")[2] for module in modules]
    unknown = [each for each in types if each not in ("Transformer", "Pooling", "Normalize")]
    if unknown or types.count("Pooling") != 1:
        raise ConfigError(f"{path} lists {', '.join(types)}; an encoder here has Transformer, Pooling and Normalize")
    pooling_path = folder / modules[types.index("Pooling")].optional("path", "") / "config.json"
    if not pooling_path.resolve().is_relative_to(folder.resolve()) or not pooling_path.exists():
        raise ConfigError(f"{path} names {pooling_path}, which the checkpoint lacks")
    values = read_json(pooling_path)
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    modes += [f"pooling_mode_{values['pooling_mode']}_tokens"] if isinstance(values.get("pooling_mode"), str) else []
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise ConfigError(f"{pooling_path} sets {', '.join(modes) or 'no mode'}; known are {', '.join(_POOLING_MODES)}")
    return _POOLING_MODES[modes[0]], "Normalize" in types
