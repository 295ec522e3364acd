"""Small checkpoints with sliding windows, and their references in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import engine_tools as tools
from sliding_model import ARCHITECTURE
from transformers import PreTrainedModel


class Network(NamedTuple):
    """The layers of a network: `s` for a sliding window, `f` for full attention."""

    layers: str
    window: int

    def sub_groups(self) -> int:
        return {"sfs": 3, "ssff": 2, "sss": 1}[self.layers]


# Sub-groups of one layer; of two layers, with a window of whole pages; one group, as in Mistral 7B v0.1.
NETWORKS = {"mixed": Network("sfs", 96), "pairs": Network("ssff", 64), "all sliding": Network("sss", 65)}


def make_reference(network: Network) -> PreTrainedModel:
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    return tools.make_reference(
        num_hidden_layers=len(network.layers),
        layer_types=[kinds[layer] for layer in network.layers],
        use_sliding_window=True,
        sliding_window=network.window,
    )


def save(reference: PreTrainedModel, folder: Path) -> Path:
    """Write a checkpoint that Meltcore opens as SlidingQwen3."""
    reference.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [ARCHITECTURE]}))
    return folder
