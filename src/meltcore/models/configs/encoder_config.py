"""Reads the configuration of a text encoder of BERT's kind.

This module does not import torch, since plans of memory read configurations too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.pooling_config import (
    Pooling,
    PoolingConfig,
    read_cut_sizes,
    read_modules,
    read_pooling,
    trained_tokens,
)

EMBEDDING_ARCHITECTURES = ("BertModel", "XLMRobertaModel")
RERANKING_ARCHITECTURES = ("BertForSequenceClassification", "XLMRobertaForSequenceClassification")
ENCODER_ACTIVATIONS = ("gelu", "relu")
_FAMILY = "this encoder"
_KNOWN_MODULES = "an encoder here has Transformer, Pooling and Normalize"
_POOLING_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_cls": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean": "mean",
}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(PoolingConfig):
    """Holds the sizes and variants of a BERT-class encoder.

    Args:
        first_position: the position of the first token; XLM-RoBERTa counts from the padding token's id on.
        has_pooler: whether a dense layer with tanh precedes a reranker's head, as in BERT.
    """

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_types: int
    first_position: int
    norm_eps: float
    activation: str
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
        # A folder without modules pools the first token and normalizes, as vLLM does.
        pooling: Pooling = "cls"
        modules = {} if is_reranker else read_modules(folder, _KNOWN_MODULES, frozenset({"Pooling"}))
        if modules:
            pooling = read_pooling(folder, modules["Pooling"], _POOLING_MODES)
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
            most_tokens=most_tokens,
            max_tokens=trained_tokens(folder, most_tokens),
            pooling=pooling,
            is_normalized=not is_reranker and (not modules or "Normalize" in modules),
            is_reranker=is_reranker,
            cut_sizes=read_cut_sizes(config, sizes["hidden_size"]),
            has_pooler=name == "BertForSequenceClassification",
        )


def _check_variants(config: Fields) -> None:
    """Raise ConfigError for a variant of the network that is not supported."""
    if config.optional("hidden_act", "gelu") not in ENCODER_ACTIVATIONS:
        raise config.unsupported_field("hidden_act", _FAMILY)
    if config.optional("position_embedding_type", "absolute") != "absolute":
        raise config.unsupported_field("position_embedding_type", _FAMILY)
    for name in ("is_decoder", "add_cross_attention"):
        if config.optional(name, False):
            raise config.unsupported_field(name, _FAMILY)
