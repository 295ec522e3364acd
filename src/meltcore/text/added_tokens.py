"""Adds to a tokenizer the tokens that a checkpoint lists beside tokenizer.json, as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from meltcore.common.errors import ConfigError
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.json_file import read_json
from meltcore.text.chat_template import named_special_tokens

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_listed_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Add the tokens of a folder's tokenizer_config.json, added_tokens.json and special_tokens_map.json.

    A token that is listed with an id keeps its listed flags. A named special token without an id in any file stays
    text, since the model has no row for it. Raises ConfigError if a file cannot be read, or gives a token another id
    than the tokenizer does.
    """
    special = named_special_tokens(folder)
    listed = _listed_tokens(folder, {_token_text(value) for value in special}, _added_texts(backend))
    backend.add_tokens([token for _, token, _ in listed])
    for token_id, token, source in listed:
        if (found := backend.token_to_id(token.content)) != token_id:
            raise ConfigError(
                f"{source} gives token {token.content!r} the id {token_id}, but after tokenizer.json it gets {found}; "
                "list the token in tokenizer.json, or name another tokenizer by --tokenizer"
            )
    known = _added_texts(backend)
    named = [_to_added_token(value) for value in special if _token_text(value) not in known]
    backend.add_special_tokens([token for token in named if backend.token_to_id(token.content) is not None])


def _added_texts(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _listed_tokens(folder: Path, special: set[str], known: set[str]) -> list[tuple[int, AddedToken, Path]]:
    """Return the tokens that are listed with ids, sorted by id, and the file of each token.

    An entry of tokenizer_config.json replaces a known token. An entry of added_tokens.json does not.
    """
    path = folder / "tokenizer_config.json"
    listed = Fields(read_json(path) if path.exists() else {}, path.name).optional("added_tokens_decoder")
    if listed is not None:
        tokens = [
            (int(token_id), _to_added_token(value), path) for token_id, value in listed.items() if value["content"]
        ]
        return sorted(tokens, key=lambda token: token[0])
    path = folder / "added_tokens.json"
    ids = read_json(path) if path.exists() else {}
    wrong = next((text for text, token_id in ids.items() if type(token_id) is not int), None)
    if wrong is not None:
        raise ConfigError(f"{path}: the id of {wrong!r} must be an integer, not {ids[wrong]!r}")
    return [
        (token_id, AddedToken(text, normalized=text not in special, special=text in special), path)
        for text, token_id in sorted(ids.items(), key=lambda item: item[1])
        if text not in known
    ]


def _token_text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])


def _to_added_token(value: str | dict[str, Any]) -> AddedToken:
    """Return a token as a file describes it."""
    if isinstance(value, str):
        return AddedToken(value, normalized=False)
    return AddedToken(_token_text(value), **{name: bool(value[name]) for name in _FLAGS if name in value})
