"""Small networks with sliding windows (Gemma 3, Mistral), as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import engine_tools as tools
from transformers import PreTrainedModel


class Network(NamedTuple):
    """The layers of a network: `s` for a sliding window, `f` for full attention."""

    family: str
    layers: str
    window: int

    def sub_groups(self) -> int:
        return {"sfs": 3, "ssff": 2, "sss": 1}[self.layers]


# Sub-groups of one layer; of two layers, with a window of whole pages; one group, as in Mistral 7B v0.1.
NETWORKS = {
    "mixed": Network("gemma3_text", "sfs", 96),
    "pairs": Network("gemma3_text", "ssff", 64),
    "all sliding": Network("mistral", "sss", 65),
}


def make_reference(network: Network, window: int | None = None) -> PreTrainedModel:
    layer_types = {"s": "sliding_attention", "f": "full_attention"}
    typed = {"layer_types": [layer_types[layer] for layer in network.layers]} if network.family != "mistral" else {}
    sizes = {"num_hidden_layers": len(network.layers), "sliding_window": window or network.window}
    return tools.make_reference(family=network.family, **sizes, **typed)


def save(reference: PreTrainedModel, folder: Path) -> Path:
    reference.save_pretrained(folder)
    return folder
