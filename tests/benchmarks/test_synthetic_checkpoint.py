"""The checkpoint that benchmarks/load_checkpoint.py makes is one that loads, in either form, whole or as a share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from load_checkpoint import fit, load_once, shorten, size_of, tensors_of, write_checkpoint

from meltcore.models.checkpoints.checkpoint import open_checkpoint

HYBRID = "meltcore/sums-hybrid"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B"])
def test_as_many_layers_as_fit_in_whole_rounds_of_their_kinds(model: str) -> None:
    config = open_checkpoint(model, files="config").config
    text = config.get("text_config", config)
    shorter = fit(config, 10e9, fused=True)
    layers = shorter.get("text_config", shorter)["num_hidden_layers"]
    a_round = text.get("full_attention_interval", 1)
    assert layers % a_round == 0
    assert size_of(tensors_of(shorter, fused=True)) <= 10e9
    if layers < text["num_hidden_layers"]:
        assert size_of(tensors_of(shorten(config, layers + a_round), fused=True)) > 10e9


@pytest.mark.parametrize("fused", [False, True])
def test_it_loads_and_a_rank_holds_its_part(tmp_path: Path, fused: bool) -> None:
    config = open_checkpoint(HYBRID, files="config").config
    size = write_checkpoint(tmp_path, config, fused, shard_bytes=2e6)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    whole, share = (load_once(tmp_path, torch.device("cpu"), ranks) for ranks in (1, 2))
    assert size <= whole["weight_bytes"] < 1.01 * size  # what stays float32 takes twice the room
    assert 0.5 * size < share["weight_bytes"] < 0.6 * size


def test_model_of_which_not_one_round_fits_is_refused() -> None:
    with pytest.raises(SystemExit, match="give a larger --size-gb"):
        fit(open_checkpoint(HYBRID, files="config").config, 1e6, fused=False)
