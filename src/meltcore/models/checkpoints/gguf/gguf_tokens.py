"""Reads which tokens of a GGUF vocabulary begin and end turns, and the type of each token.

This module does not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import TokenType

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel, describe_value
from meltcore.models.configs.turn_tokens import END_TOKENS, TURN_TOKENS

# Their type is USER_DEFINED in files that have types: text, but whole tokens.
_REASONING_TOKENS = ("<think>", "</think>")
_STATED_KEYS = ("bos", "eos", "eot", "eom")
_SPECIAL_KEYS = (*_STATED_KEYS, "unknown", "padding")
# What llama.cpp takes for an id beyond the vocabulary. For byte-level BPE it takes 11, Falcon's end token, and we none.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def read_token_ids(model: GGUFModel, tokens: list[str]) -> dict[str, Any]:
    """Return bos_token_id and eos_token_id.

    End tokens are the tokens that the file names as such, and control tokens whose text ends a turn.
    """
    ids = {name: special_id(model, name, len(tokens)) for name in _STATED_KEYS}
    types, _ = token_types(model, tokens)
    ids_by_text = (i for i in np.flatnonzero(types == TokenType.CONTROL).tolist() if tokens[i] in END_TOKENS)
    end_ids = [*(ids[name] for name in _STATED_KEYS[1:] if ids[name] is not None), *ids_by_text]
    return {"bos_token_id": ids["bos"], "eos_token_id": list(dict.fromkeys(end_ids))}


def token_types(model: GGUFModel, tokens: list[str]) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Return the type of each token (gguf.TokenType), and the tokens whose type differs from the type in the file.

    In a file without types all tokens are normal tokens. Tokens that begin or end turns, and the file's end tokens in
    brackets, become control tokens. As normal tokens they would be split into letters, and no turn would end. Tokens
    around reasoning would be split too, but they are not control tokens.
    """
    key = "tokenizer.ggml.token_type"
    if key in model.metadata:
        types = model.numbers(key)
        if types.dtype.kind not in "iu":
            raise ConfigError(f"{model.path}: {key} must be whole numbers; got {describe_value(model.metadata[key])}")
    else:
        types = np.full(len(tokens), int(TokenType.NORMAL))
    if len(types) != len(tokens):
        raise ConfigError(f"{model.path}: {key} has {len(types)} values for {len(tokens)} tokens")
    reasoning = [i for i, token in enumerate(tokens) if token in _REASONING_TOKENS and types[i] == TokenType.NORMAL]
    types[reasoning] = TokenType.USER_DEFINED
    candidates = {token_id for token_id, token in enumerate(tokens) if token in TURN_TOKENS}
    stated_ids = [token_id for name in _STATED_KEYS if (token_id := special_id(model, name, len(tokens))) is not None]
    candidates |= {i for i in stated_ids if _is_in_brackets(tokens[i]) and types[i] != TokenType.UNKNOWN}
    retyped = [i for i in sorted(candidates) if types[i] != TokenType.CONTROL]
    types[retyped] = TokenType.CONTROL
    if (unknown := np.flatnonzero(~np.isin(types, list(TokenType)))).size:
        first = int(unknown[0])
        raise ConfigError(
            f"{model.path}: {key} must be from {min(TokenType)} to {max(TokenType)}; "
            f"got {types[first]} for token {first}"
        )
    return types, [tokens[i] for i in retyped]


def special_id(model: GGUFModel, name: str, num_tokens: int) -> int | None:
    """Return the id of a special token. Returns None if the file does not state the token.

    If the stated id is beyond the vocabulary, a SentencePiece vocabulary gets llama.cpp's default, and byte-level BPE
    gets None. Raises ConfigError if the value is not an id.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = model.metadata.get(key)
    if token_id is not None and type(token_id) is not int:
        raise ConfigError(f"{model.path}: {key} must be from 0 to {num_tokens - 1}; got {describe_value(token_id)}")
    if token_id is None or 0 <= token_id < num_tokens:
        return token_id
    default = _SENTENCEPIECE_IDS.get(name) if model.metadata.get("tokenizer.ggml.model") == "llama" else None
    return None if default is None or default >= num_tokens else default


def read_flag(model: GGUFModel, name: str, *, default: bool) -> bool:
    """Return a setting of the tokenizer, or `default` if the file does not state the setting.

    Raises ConfigError if the value has another type.
    """
    key = f"tokenizer.ggml.{name}"
    value = model.metadata.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{model.path}: {key} must be true or false; got {describe_value(value)}")
    return value


def missing_id_lines(model: GGUFModel, num_tokens: int) -> list[str]:
    """Return a line for each special token whose id is beyond the vocabulary.

    The line says which id is used instead.
    """
    found = ((name, model.metadata.get(f"tokenizer.ggml.{name}_token_id")) for name in _SPECIAL_KEYS)
    outside_ids = {name: value for name, value in found if type(value) is int and not 0 <= value < num_tokens}
    taken = {name: special_id(model, name, num_tokens) for name in outside_ids}
    return [f"{name}_token_id {value} (taken: {taken[name]})" for name, value in outside_ids.items()]


def _is_in_brackets(token: str) -> bool:
    return token.startswith(("<", "[")) and token.endswith((">", "]")) and len(token) > len("<>")
