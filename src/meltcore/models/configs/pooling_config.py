"""Reads how hidden states become an embedding or a score, from the files of sentence-transformers.

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

Pooling = Literal["cls", "mean", "lasttoken"]
MODULES = "modules.json"
_LIMITS = "sentence_bert_config.json"


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """Holds what all models have that compute embeddings or scores of texts.

    Args:
        most_tokens: the number of positions that an input may have.
        max_tokens: the tokens of the longest input, including special tokens, unless a setting says another number.
        pooling: the hidden state of the first token, the mean over all tokens, or the last token's hidden state.
        is_normalized: whether embeddings have the length 1.
        is_reranker: whether the model computes one score of a pair of texts, instead of an embedding.
        cut_sizes: the numbers of values to which an embedding may be cut. Empty allows any, and None allows no cut.
    """

    hidden_size: int
    vocab_size: int
    most_tokens: int
    max_tokens: int
    pooling: Pooling
    is_normalized: bool
    is_reranker: bool
    cut_sizes: tuple[int, ...] | None

    def input_limit(self, max_model_len: int | None) -> int:
        """Return the maximum tokens of an input: `max_model_len` if it is given, else the checkpoint's limit.

        Raises ConfigError if `max_model_len` is more than the number of the model's positions.
        """
        if max_model_len is None:
            return self.max_tokens
        if not 2 <= max_model_len <= self.most_tokens:
            raise ConfigError(f"--max-model-len must be from 2 to the model's {self.most_tokens}; got {max_model_len}")
        return max_model_len


def trained_tokens(folder: Path, most_tokens: int) -> int:
    """Return the maximum tokens of an input in the files of sentence-transformers, at most `most_tokens`."""
    path = folder / _LIMITS
    tokens: int | None = Fields(read_json(path) if path.exists() else {}, _LIMITS).optional("max_seq_length")
    return min(most_tokens, tokens or most_tokens)


def read_cut_sizes(config: Fields, hidden_size: int, *, is_matryoshka: bool = False) -> tuple[int, ...] | None:
    """Return the numbers of values to which an embedding may be cut, from the fields of config.json that vLLM reads.

    `is_matryoshka` says whether the model is known to be trained for shorter embeddings. Empty allows any number, and
    None allows no cut. Raises ConfigError for a number that is not from 1 to `hidden_size`.
    """
    sizes: list[int] = config.optional("matryoshka_dimensions", [])
    if not all(1 <= size <= hidden_size for size in sizes):
        raise config.field_error("matryoshka_dimensions", f"must have numbers from 1 to hidden_size, {hidden_size}")
    return tuple(sizes) if sizes or config.optional("is_matryoshka", is_matryoshka) else None


def read_modules(folder: Path, known: str, *kinds: frozenset[str]) -> dict[str, Path]:
    """Return the path of the configuration of each module that modules.json lists, by the module's type.

    The types must be one of `kinds`, beside Transformer and Normalize. `known` describes these in an error. Without
    modules.json there are no modules.
    """
    path = folder / MODULES
    if not path.exists():
        return {}
    listed = read_json_value(path)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError(f"{path} must be a list of objects")
    modules = [Fields(each, MODULES) for each in listed]
    types = [module.required("type")["type"].rpartition(".")[2] for module in modules]
    own = [each for each in types if each not in ("Transformer", "Normalize")]
    if frozenset(own) not in kinds or len(own) > 1:
        raise ConfigError(f"{path} lists {', '.join(types)}; {known}")
    paths = (folder / module.optional("path", "") / "config.json" for module in modules)
    return dict(zip(types, paths, strict=True))


def read_module(folder: Path, path: Path) -> dict[str, Any]:
    """Return the configuration of a module. Raises ConfigError if it is missing, or is not in `folder`."""
    if not path.resolve().is_relative_to(folder.resolve()) or not path.exists():
        raise ConfigError(f"{folder / MODULES} names {path}, which the checkpoint lacks")
    return read_json(path)


def read_pooling(folder: Path, path: Path, known: Mapping[str, Pooling]) -> Pooling:
    """Return the pooling that the configuration of a module names. `known` are the modes that the model computes."""
    values = read_module(folder, path)
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    modes += [f"pooling_mode_{values['pooling_mode']}"] if isinstance(values.get("pooling_mode"), str) else []
    if len(modes) != 1 or modes[0] not in known:
        raise ConfigError(f"{path} sets {', '.join(modes) or 'no mode'}; known are {', '.join(known)}")
    return known[modes[0]]
