"""Reads the configuration of a decoder that embeds texts (Qwen3-Embedding) or scores pairs of texts (Qwen3-Reranker).

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
    read_module,
    read_modules,
    read_pooling,
    trained_tokens,
)
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.decoder_families import qwen3_config

_SCORED = "Qwen3ForSequenceClassification"
# The second is the name that sentence-transformers writes when it saves a trained model.
POOLED_ARCHITECTURES = frozenset(("Qwen3ForCausalLM", "Qwen3Model", _SCORED))
PAGE_SIZE = 64  # tokens; an input begins at a page of the step's cache
GROUP_QUERIES = 512  # for which the reference attention makes a mask together, of one long row or of equally long rows
_POOLING_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "lasttoken"}
_KNOWN = "a decoder here has Transformer, Pooling and Normalize, or Transformer and LogitScore"
_ANSWERS = "false_token_id", "true_token_id"


@dataclass(frozen=True, kw_only=True)
class PooledDecoderConfig(PoolingConfig):
    """Holds the configuration of a decoder, and how the hidden state of an input's last token is used.

    Args:
        decoder: the configuration of the network. If the output head is not used, the head is tied.
        values: config.json, as the network is built from it.
        answer_ids: the tokens "no" and "yes", of which a reranker compares the logits. None for other models.
        has_score_head: whether a reranker has a head of one score instead, in a checkpoint converted to sequence
            classification.
    """

    decoder: DecoderConfig
    values: Mapping[str, Any]
    answer_ids: tuple[int, int] | None
    has_score_head: bool

    @classmethod
    def read(cls, values: Mapping[str, Any], folder: Path) -> PooledDecoderConfig:
        """Read config.json, given as `values`, and the files of sentence-transformers in `folder`.

        Raises ConfigError for missing fields and unsupported values.
        """
        config = Fields(values)
        names = config.optional("architectures", [])
        has_score_head = _SCORED in names
        if has_score_head and len(config.optional("id2label", {})) != 1:
            raise config.field_error("id2label", "must name one label: rerankers have one score")
        kinds = frozenset({"Pooling"}), frozenset({"LogitScore"})
        modules = {} if has_score_head else read_modules(folder, _KNOWN, *kinds)
        values, answers = {**values, "architectures": ["Qwen3ForCausalLM"]}, None
        if "LogitScore" in modules:
            found = Fields(read_module(folder, modules["LogitScore"]), str(modules["LogitScore"])).required(*_ANSWERS)
            answers = found["false_token_id"], found["true_token_id"]
        else:
            values["tie_word_embeddings"] = True
        if not modules and not has_score_head:
            raise ConfigError(f"{folder} has no modules.json; {_KNOWN}")
        if "Pooling" in modules:
            read_pooling(folder, modules["Pooling"], _POOLING_MODES)
        decoder = qwen3_config(values)
        if answers is not None and max(answers) >= decoder.vocab_size:
            raise ConfigError(f"{modules['LogitScore']} names token {max(answers)} of {decoder.vocab_size} tokens")
        return cls(
            hidden_size=decoder.hidden_size,
            vocab_size=decoder.vocab_size,
            most_tokens=decoder.max_context,
            max_tokens=trained_tokens(folder, decoder.max_context),
            pooling="lasttoken",
            is_normalized="Normalize" in modules,
            is_reranker=has_score_head or answers is not None,
            # The published Qwen3-Embedding, whose config.json does not say it. A model trained from it may be another.
            cut_sizes=read_cut_sizes(config, decoder.hidden_size, is_matryoshka="Qwen3ForCausalLM" in names),
            decoder=decoder,
            values=values,
            answer_ids=answers,
            has_score_head=has_score_head,
        )
