"""What the cache of a model should take, by arithmetic, and what a server says it has. Set beside what search finds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from meltcore.errors import ConfigError

# What servers print of their cache: ours counts pages, vLLM tokens.
_PAGES = re.compile(r"([\d,]+) KV pages of (\d+) tokens")
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_FULL = "full_attention"


def cache_bytes_per_token(config: dict[str, Any], element_bytes: int) -> int:
    """Keys and values of one token over all layers that keep them: 2 x layers x KV heads x head size x bytes.

    `config` is a checkpoint's config.json. Layers of recurrent state or another kind than full attention, where
    `layer_types` names them, keep no page. Raises ConfigError where a needed number is missing.
    """
    inner = config.get("text_config", config)
    try:
        layers = inner["num_hidden_layers"]
        kinds = inner.get("layer_types") or [_FULL] * layers
        heads = inner.get("num_key_value_heads") or inner["num_attention_heads"]
        head_dim = inner.get("head_dim") or inner["hidden_size"] // inner["num_attention_heads"]
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}, so the cache cannot be reckoned") from error
    return 2 * sum(kind == _FULL for kind in kinds) * heads * head_dim * element_bytes


def read_config(path: Path) -> dict[str, Any]:
    """A config.json or its folder. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no object")
    return found


def reported_capacity(log: str) -> tuple[int, int] | None:
    """(tokens the cache holds, tokens a page) as the server's log tells; None where it does not."""
    if pages := _PAGES.search(log):
        return int(pages[1].replace(",", "")) * int(pages[2]), int(pages[2])
    if tokens := _TOKENS.search(log):
        return int(tokens[1].replace(",", "")), 1
    return None


def sequences_that_fit(capacity: int, length: int, page: int) -> int:
    """Sequences of `length` tokens in a cache of `capacity` tokens, whole pages each."""
    return capacity // (-(-length // page) * page)
