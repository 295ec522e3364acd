"""Dense families beside Llama's and Qwen's: logits and defaults are those of transformers, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meltcore.errors import ConfigError
from meltcore.models.checkpoint import open_checkpoint
from meltcore.models.decoder_config import DecoderConfig
from meltcore.models.decoder_families import DECODER_CONFIGS

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "vocab_size": 320,
}
# The class of each family, by its model_type.
CLASSES = {"granite": "GraniteForCausalLM", "olmo2": "Olmo2ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
PUBLISHED = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM3-3B",
    "allenai/OLMo-2-0425-1B-Instruct",
    "ibm-granite/granite-3.3-2b-instruct",
)


def config_of(model_type: str, **changes: Any) -> DecoderConfig:
    return DECODER_CONFIGS[CLASSES[model_type]](SIZES | changes)


@pytest.mark.parametrize("family", CLASSES)
def test_logits_of_mixed_batches_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Prompts of several lengths in chunks, then decode steps, and one from the prefix cache."""
    reference = tools.make_reference(family=family)
    assert tools.attention_peak(reference, tools.random_prompt(200, 0)) > 0.2
    reference.save_pretrained(tmp_path)
    seen = tools.open_engine(tmp_path, max_num_batched_tokens=96)
    prompts = {f"r{length}": tools.random_prompt(length, length) for length in (1, 63, 64, 65, 200)}
    for name, prompt in prompts.items():
        seen.add(name, prompt, max_tokens=20)
    tokens = seen.run()
    prompts["again"] = [*prompts["r200"][:130], 5, 6]
    seen.add("again", prompts["again"])
    tokens |= seen.run()
    assert seen.engine.stats().prefix_hit_tokens_total == 128
    for name, prompt in prompts.items():
        theirs = tools.reference_logits(reference, prompt, tokens[name])
        assert tools.relative_error(torch.stack(seen.logits[name]), theirs) <= TOLERANCE, name


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    """The published fields, with a small network's sizes."""
    published = open_checkpoint(name, files="config").config
    sizes = SIZES | {"num_key_value_heads": 2, "torch_dtype": "float32", "pad_token_id": None}
    config = AutoConfig.for_model(**published | sizes)
    reference = AutoModelForCausalLM.from_config(config).float().eval()
    tools.randomise(reference, 3)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published | sizes))
    assert tools.error_against(reference, tmp_path, max_model_len=512) <= TOLERANCE


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("absent", ["absent", "null"])
def test_absent_fields_have_the_defaults_of_transformers(family: str, absent: str) -> None:
    theirs = AutoConfig.for_model(family, **SIZES)
    names = ("rms_norm_eps", "max_position_embeddings", "head_dim", "rope_theta", "tie_word_embeddings")
    ours = config_of(family, **(dict.fromkeys(names) if absent == "null" else {}))
    for name in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "num_key_value_heads"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == 256 // 8
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    nulled = AutoConfig.for_model(family, **SIZES, num_key_value_heads=None).num_key_value_heads
    assert config_of(family, num_key_value_heads=None).num_key_value_heads == nulled


@pytest.mark.parametrize(
    ("changes", "nope_layers"),
    [
        ({}, {3}),
        ({"no_rope_layer_interval": 2}, {1, 3}),
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, {0, 3}),
        ({"no_rope_layers": [1, 1, 1, 1, 1, 0], "no_rope_layer_interval": 1}, set()),
    ],
)
def test_layers_without_rotary_embeddings_are_those_of_transformers(
    changes: dict[str, Any], nope_layers: set[int]
) -> None:
    theirs = AutoConfig.for_model("smollm3", **SIZES, **changes).no_rope_layers
    assert {layer for layer in range(5) if not theirs[layer]} == nope_layers
    assert config_of("smollm3", **changes).nope_layers == nope_layers


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("granite", {"attention_bias": True}, "sets attention_bias to true, which granite here does not compute"),
        ("granite", {"mlp_bias": True}, "sets mlp_bias to true"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier must be a number from 1e-4 to 1e4; got 0.0"),
        ("granite", {"logits_scaling": None}, "logits_scaling must be a number from 1e-4 to 1e4; got null"),
        ("granite", {"embedding_multiplier": "12"}, 'embedding_multiplier must be .*; got "12"'),
        ("granite", {"attention_multiplier": float("inf")}, "attention_multiplier must be a number"),
        ("olmo2", {"attention_bias": True}, "sets attention_bias to true, which olmo2 here does not compute"),
        ("olmo2", {"hidden_act": "gelu"}, 'sets hidden_act to "gelu"'),
        ("olmo2", {"layer_types": ["sliding_attention"] * 5}, "sets layer_types"),
        ("smollm3", {"attention_bias": True}, "sets attention_bias to true, which smollm3 here does not compute"),
        ("smollm3", {"mlp_bias": True}, "sets mlp_bias to true"),
        ("smollm3", {"hidden_act": "gelu"}, 'sets hidden_act to "gelu"'),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 64}, "sets use_sliding_window to true"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 5}, "sets layer_types"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers must be 0 or 1 for each of 5 layers; got \[1, 0\]"),
        ("smollm3", {"no_rope_layers": [1, 2, 0, 1, 1]}, "no_rope_layers must be a list of 0 and 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a whole number from 1"),
        ("smollm3", {"num_hidden_layers": None}, "lacks num_hidden_layers"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(family, **changes)
