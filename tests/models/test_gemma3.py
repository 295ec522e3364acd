"""Gemma 3: fields in their older and newer form, defaults of transformers, both layouts of names, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.gemma3 import Gemma3
from meltcore.models.decoders.rope import apply_overrides

TOLERANCE = 1e-4
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12}
LINEAR = {"rope_type": "linear", "factor": 8.0}
VISION = {
    "hidden_size": 32,
    "image_size": 8,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
}


def config_of(**changes: Any) -> DecoderConfig:
    return Gemma3(SIZES | changes).config


@pytest.mark.parametrize("form", ["absent", "older", "newer"])
def test_fields_are_read_as_transformers_reads_them(form: str) -> None:
    forms: dict[str, dict[str, Any]] = {
        "absent": {},
        "older": {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR, "sliding_window_pattern": 4},
        "newer": {
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "layer_types": ["full_attention", "sliding_attention"] * 6,
        },
    }
    ours, theirs = config_of(**forms[form]), AutoConfig.for_model("gemma3_text", **SIZES, **forms[form])
    for name in (
        *("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "sliding_window", "tie_word_embeddings"),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["full_attention"]["rope_theta"]
    assert ours.rope_local_theta == rope["sliding_attention"]["rope_theta"]
    assert (ours.rope_scaling is None) == (form == "absent")
    assert rope["full_attention"].get("factor", 1.0) == (ours.rope_scaling.factor if ours.rope_scaling else 1.0)
    layer_types = ["sliding_attention" if layer in ours.sliding_layers else "full_attention" for layer in range(12)]
    assert layer_types == theirs.layer_types
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert ours.max_context == theirs.max_position_embeddings  # which is the extended length


def test_published_sizes() -> None:
    """One layer of six has full attention; scales are those of the published fields."""
    for name, layers, scalar in (("1b", 26, 256), ("4b", 34, 256), ("27b", 62, 168)):
        config = Gemma3(open_checkpoint(f"google/gemma-3-{name}-it", files="config").config).config
        assert [layer for layer in range(layers) if layer not in config.sliding_layers] == list(range(5, layers, 6))
        assert config.attention_scale == scalar**-0.5
        assert config.max_context == (32_768 if name == "1b" else 131_072)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "sets attention_bias to true, which gemma3 here does not compute"),
        ({"use_bidirectional_attention": True}, "sets use_bidirectional_attention to true"),
        ({"attn_logit_softcapping": 50.0}, "sets attn_logit_softcapping to 50.0"),
        ({"final_logit_softcapping": 30.0}, "sets final_logit_softcapping to 30.0"),
        ({"hidden_activation": "gelu"}, 'sets hidden_activation to "gelu"'),
        ({"sliding_window": 0}, "sliding_window must be a whole number from 1 to 16777216; got 0"),
        ({"sliding_window": None}, "sliding_window must be a whole number from 1 to 16777216; got null"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number from 1"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0"),
        ({"layer_types": ["full_attention"]}, "layer_types must be full_attention or sliding_attention for each of 12"),
        ({"layer_types": ["chunked_attention"] * 12}, "layer_types must be full_attention or sliding_attention"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "rope_parameters.sliding_attention to"),
        ({"rope_parameters": {"full_attention": LINEAR | {"factor": 0}}}, "factor must be a number from 1 to 1e6"),
        ({"rope_parameters": {"full_attention": 7}}, "full_attention must be an object; got 7"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)


def test_override_is_for_full_attention() -> None:
    own = {
        "full_attention": LINEAR | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131_072}
    for stated in ({"rope_parameters": own}, {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}):
        checkpoint = Checkpoint("small", Path(), SIZES | stated, {})
        config = Gemma3(apply_overrides(checkpoint.config, {"rope_parameters": yarn})).config
        assert config.rope_scaling is not None
        assert config.rope_scaling.rope_type == "yarn"
        assert (config.rope_theta, config.rope_local_theta) == (5e5, 2e4)
        assert config.max_context == 262_144


@pytest.mark.parametrize("layout", ["newer", "published"])
def test_text_half_of_the_whole_model(tmp_path: Path, layout: str) -> None:
    """Names as transformers 5 has them, and as the published files do."""
    text = tools.FAMILIES["gemma3_text"] | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "vocab_size": tools.VOCAB,
        "max_position_embeddings": 1024,
    }
    config = Gemma3Config(text_config=text, vision_config=VISION, image_token_index=317, eos_token_id=1)
    reference = Gemma3ForConditionalGeneration(config).float().eval()
    tools.randomise(reference.model.language_model, 1)
    reference.tie_weights()
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefixes = ("language_model.model.", "model.language_model.")
    wanted, other = prefixes if layout == "published" else prefixes[::-1]
    assert any(name.startswith(prefixes) for name in tensors)
    renamed = {
        (wanted + name.removeprefix(other)) if name.startswith(other) else name: value
        for name, value in tensors.items()
    }
    if layout == "published":
        renamed = {name.removeprefix("model.") if "vision" in name else name: value for name, value in renamed.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert tools.error_against(reference, tmp_path, max_model_len=512, vocab=300) <= TOLERANCE
    duplicate = tmp_path / "duplicate"
    shutil.copytree(tmp_path, duplicate, ignore=shutil.ignore_patterns("duplicate"))
    twice = f"{prefixes[0]}norm.weight", f"{prefixes[1]}norm.weight"
    save_file(renamed | {name: torch.zeros(64) for name in twice}, duplicate / "model.safetensors")
    with pytest.raises(ConfigError, match=r"norm\.weight of model\.safetensors is in model\.safetensors too"):
        tools.open_engine(duplicate)


def test_published_form_of_the_config_is_enough(tmp_path: Path) -> None:
    """The fields that Gemma 3 27B publishes, at a small size."""
    published = open_checkpoint("google/gemma-3-27b-it", files="config").config
    sizes = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320}
    changed = published | {"text_config": published["text_config"] | sizes | {"sliding_window": 70}}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    seen = tools.open_engine(tmp_path, load_format="dummy", max_model_len=256)
    assert seen.engine.scheduler.layout.column_pages == 6
