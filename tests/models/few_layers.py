"""Published configurations with a few of their layers: the first ones, with one of each kind."""

from __future__ import annotations

import dataclasses

from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint

FEW_LAYERS = 4  # of Qwen3.5, three are recurrent and the fourth has full attention


def open_few_layers(name: str) -> Checkpoint:
    """Building all layers on the meta device takes seconds of a core; those left out repeat these."""
    checkpoint = open_checkpoint(name, files="config")
    config = dict(checkpoint.config)
    if "text_config" in config:
        config["text_config"] = config["text_config"] | {"num_hidden_layers": FEW_LAYERS}
    else:
        config["num_hidden_layers"] = FEW_LAYERS
    return dataclasses.replace(checkpoint, config=config)
