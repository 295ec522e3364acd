"""Configurations that can be read in more than one way: ours computes what transformers does from the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

TOLERANCE = 1e-4
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "num_position_embeddings": 16,
}
IMAGE_TOKENS = {"image_token_id": 316, "video_token_id": 317, "vision_start_token_id": 318, "vision_end_token_id": 319}


def save_model(folder: Path, *, outer_tied: bool = False, inner_tied: bool = False) -> PreTrainedModel:
    """A small random model of text and vision, saved as transformers saves it."""
    text = tools.FAMILIES["qwen3_5_moe_text"] | {
        "num_hidden_layers": 3,
        "vocab_size": tools.VOCAB,
        "max_position_embeddings": 1024,
        "eos_token_id": 1,
        "tie_word_embeddings": inner_tied,
    }
    config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=outer_tied, **IMAGE_TOKENS)
    model = Qwen3_5MoeForConditionalGeneration(config).float().eval()
    tools.randomise(model, 1)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_whole_model_decides_whether_the_head_is_tied(tmp_path: Path, outer: bool, inner: bool) -> None:
    reference = save_model(tmp_path, outer_tied=outer, inner_tied=inner)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (outer, inner)
    assert tools.error_against(reference, tmp_path, vocab=min(IMAGE_TOKENS.values())) <= TOLERANCE


@pytest.mark.parametrize("family", ["olmo2", "qwen3_moe", "gemma3_text"])
def test_base_model_with_a_tied_head_is_served(tmp_path: Path, family: str) -> None:
    """Its names lack the prefix of a model with a head, which transformers' AutoModelForCausalLM adds."""
    reference = tools.make_reference(family=family, tie_word_embeddings=True)
    reference.tie_weights()
    reference.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [type(reference).__name__]}))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "layers.0.self_attn.q_proj.weight" in file.keys()  # noqa: SIM118 - the file is no mapping
    assert tools.error_against(reference, tmp_path) <= TOLERANCE


def no_share(text: dict[str, Any]) -> None:
    del text["rope_parameters"]["partial_rotary_factor"]
    text.pop("partial_rotary_factor", None)


def share_outside(text: dict[str, Any]) -> None:
    no_share(text)
    text["partial_rotary_factor"] = 0.5


def two_shares(text: dict[str, Any]) -> None:
    text["partial_rotary_factor"] = 0.5


def two_thetas(text: dict[str, Any]) -> None:
    text["rope_theta"] = 5e5


def theta_outside(text: dict[str, Any]) -> None:
    del text["rope_parameters"]
    text["rope_theta"] = 5e5


def older_name(text: dict[str, Any]) -> None:
    text["rope_scaling"] = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.slow
@pytest.mark.parametrize("change", [no_share, share_outside, two_shares, two_thetas, theta_outside, older_name])
def test_rotary_settings_are_read_as_transformers_does(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    save_model(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config["text_config"])
    path.write_text(json.dumps(config))
    reference = Qwen3_5MoeForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert tools.error_against(reference, tmp_path, vocab=min(IMAGE_TOKENS.values())) <= TOLERANCE
