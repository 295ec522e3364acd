"""Parts of the docs that are computed from the code: request fields that are not supported, definitions of metrics."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from meltcore.api import protocol
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


TABLES = {"unsupported fields": unsupported_fields, "load metrics": load_metrics}
