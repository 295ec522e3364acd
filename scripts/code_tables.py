"""Parts of the docs that are computed from the code: request fields, definitions of metrics, published models."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import torch

from meltcore.api import protocol
from meltcore.models.checkpoint import PUBLISHED_CONFIG_FOLDERS, open_checkpoint
from meltcore.models.kv_cache_specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from meltcore.models.loader import build_model
from meltcore.results.definitions import DEFINITIONS

_PLACES = {
    protocol.ChatRequest: "chat",
    protocol.CompletionRequest: "completions",
    protocol.ChatMessage: "`messages[]`",
}


def unsupported_fields() -> list[str]:
    """Lines of a table: each known field that is not supported, its values that are accepted, where it occurs."""
    places: dict[str, list[str]] = defaultdict(list)
    for struct, place in _PLACES.items():
        for name in protocol._UNSUPPORTED[struct]:
            places[name].append(place)
    lines = ["| field | accepted besides `null` | in |", "|---|---|---|"]
    for name in sorted(places):
        accepted = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in protocol._NEUTRAL[name])
        lines.append(f"| `{name}` | {accepted or 'nothing'} | {', '.join(places[name])} |")
    return lines


def load_metrics() -> list[str]:
    """Lines of a list: the definitions of the load generator's metrics, word for word."""
    return [f"- **{each.name}** ({each.unit}): {each.text}" for each in DEFINITIONS]


def published_shapes() -> list[str]:
    """Lines of a table: the models whose config.json is in the package, with what their layers cache."""
    lines = ["| model | architecture | parameters | context | layers |", "|---|---|--:|--:|---|"]
    for model_id in PUBLISHED_CONFIG_FOLDERS:
        checkpoint = open_checkpoint(model_id, files="config")
        model = build_model(checkpoint, torch.bfloat16, torch.device("meta"))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        architecture = checkpoint.config["architectures"][0]
        layers = _layers(model.kv_cache_specs())
        lines.append(f"| `{model_id}` | `{architecture}` | {parameters:,} | {model.config.max_context:,} | {layers} |")
    return lines


def _layers(specs: list[KVCacheSpec]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for spec in specs:
        if isinstance(spec, SlidingWindowSpec):
            counts[f"a window of {spec.window:,} tokens"] += 1
        else:
            counts["full attention" if isinstance(spec, FullAttentionSpec) else "recurrent states"] += 1
    return ", ".join(f"{count} with {kind}" for kind, count in sorted(counts.items()))


TABLES = {"unsupported fields": unsupported_fields, "load metrics": load_metrics, "published shapes": published_shapes}
