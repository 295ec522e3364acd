"""Reads the fields of /v1/models beyond OpenAI's, such as random weights, which results must state."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

_FACTS = ("weights", "tokenizer", "output_lengths", "device", "dtype", "weight_dtypes", "kv_cache_dtype",
          "speculative_decoding", "replicas", "max_model_len", "vocab_size", "debug", "hf_overrides")  # fmt: skip


def model_facts(listing: Any, model: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields beyond OpenAI's about `model` in a parsed /v1/models response, also the fields `more`.

    Returns an empty dict if the server reports none, as most servers do.
    """
    entries = listing.get("data") if isinstance(listing, Mapping) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and entry.get("id") == model:
            return {name: entry[name] for name in (*_FACTS, *more) if entry.get(name)}
    return {}


def public_name(model: str) -> str:
    """Return the name of a model for published results: the last part of a local path, else the name itself."""
    return Path(model).name if model.startswith(("/", "~", ".")) else model


def model_text(settings: Mapping[str, Any]) -> str:
    """Return the name of a run's model, marked if the weights are random. Returns "" if the settings say neither."""
    name, weights = settings.get("model"), "random weights" * (settings.get("weights") == "dummy")
    return f"{name} ({weights})" if name and weights else str(name or weights)


def command_model(command: str) -> str:
    """Return the model of a `serve MODEL` command as `model_text` does. Returns "" if the command names no model."""
    args = shlex.split(command)
    position = args.index("serve") + 1 if "serve" in args else len(args)
    if position >= len(args) or args[position].startswith(("-", "{")):
        return ""
    weights = "dummy" if "--load-format=dummy" in {*args, *map("=".join, pairwise(args))} else ""
    return model_text({"model": public_name(args[position]), "weights": weights})


def model_notes(facts: Mapping[str, Any]) -> list[str]:
    """Return notes about the served model that every result must carry."""
    notes = []
    if facts.get("weights") == "dummy":
        notes.append(
            "The server ran with random weights: the speed is that of real weights, the answers are meaningless."
        )
    if facts.get("tokenizer") == "synthetic":
        notes.append("The server's tokenizer is synthetic: a text does not have the tokens that a real one would make.")
    if facts.get("output_lengths") == "synthetic":
        notes.append(
            "Random weights do not end an answer: a translation has 5 tokens more than its source (at least 8), "
            "an RNN-T transcript about 4 tokens per second of its clip."
        )
    if facts.get("debug"):
        notes.append(f"The server ran with debug options ({', '.join(facts['debug'])}): this run is not comparable.")
    if facts.get("hf_overrides"):
        overrides_json = json.dumps(facts["hf_overrides"], sort_keys=True)
        notes.append(f"The server replaced fields of the checkpoint's config.json (--hf-overrides {overrides_json}).")
    return notes
