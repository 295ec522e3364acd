"""What a server says of a model beyond OpenAI's fields. A result of random weights must show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FACTS = ("weights", "tokenizer", "device", "dtype", "replicas", "max_model_len", "debug")


def model_facts(listing: Any, model: str) -> dict[str, Any]:
    """The facts about `model` in a parsed /v1/models answer; empty where the server tells none (most do not)."""
    entries = listing.get("data") if isinstance(listing, Mapping) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and entry.get("id") == model:
            return {name: entry[name] for name in _FACTS if entry.get(name)}
    return {}


def model_notes(facts: Mapping[str, Any]) -> list[str]:
    """What a reader of a result must know about the model behind it."""
    notes = []
    if facts.get("weights") == "dummy":
        notes.append("The server ran random weights: its speed is that of the real ones, its answers mean nothing.")
    if facts.get("tokenizer") == "synthetic":
        notes.append(
            "The server's tokenizer is synthetic (a token a byte): texts are longer in tokens than with a real one."
        )
    if facts.get("debug"):
        notes.append(
            f"The server ran with debug switches ({', '.join(facts['debug'])}): this run compares with nothing."
        )
    return notes
