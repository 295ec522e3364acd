"""Dense families beside Llama's and Qwen's: logits and defaults are those of transformers, the rest is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.decoder_families import DECODER_CONFIGS

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "vocab_size": 320,
}
# Factors of single precision, as GGUF files have them too.
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1 + pair / 8 for pair in range(16)],
    "long_factor": [1 + pair for pair in range(16)],
}
# The class of each family, by its model_type.
CLASSES = {
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
PUBLISHED = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM3-3B",
    "allenai/OLMo-2-0425-1B-Instruct",
    "ibm-granite/granite-3.3-2b-instruct",
    "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/phi-4",
    "mistralai/Mistral-Small-24B-Instruct-2501",
)


def config_of(model_type: str, **changes: Any) -> DecoderConfig:
    return DECODER_CONFIGS[CLASSES[model_type]](SIZES | changes)


@pytest.mark.slow
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


@pytest.mark.slow
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


def longrope_model(folder: Path, **factors: list[float]) -> PreTrainedModel:
    """Save a network with Phi-4-mini's published fields and every fourth of its factors, for the sizes of `SIZES`."""
    published = open_checkpoint("microsoft/Phi-4-mini-instruct", files="config").config
    every_fourth = {name: published["rope_scaling"][name][::4] for name in ("short_factor", "long_factor")}
    every_fourth["short_factor"] = [1.5] * 12  # the published ones are 1
    sizes = SIZES | {"num_key_value_heads": 2, "torch_dtype": "float32", "pad_token_id": None}
    lengths = {"original_max_position_embeddings": 128, "max_position_embeddings": 1024}
    config = published | sizes | lengths | {"rope_scaling": {"type": "longrope"} | every_fourth | factors}
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config))).float().eval()
    tools.randomise(reference, 3)
    reference.tie_weights()
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return reference


@pytest.mark.parametrize(("context", "length"), [(128, 100), (128, 5), (129, 125), (512, 200)])
def test_longrope_has_the_factors_of_the_served_context(tmp_path: Path, context: int, length: int) -> None:
    """Beyond the original length transformers has the long factors. Here a longer context has them for all texts."""
    reference = longrope_model(tmp_path)
    scaling = DECODER_CONFIGS["Phi3ForCausalLM"](json.loads((tmp_path / "config.json").read_text())).rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == reference.model.rotary_emb.attention_scaling == pytest.approx(1.1952, abs=1e-4)
    seen = tools.open_engine(tmp_path, max_model_len=context)
    prompt = tools.random_prompt(length, 1)
    seen.add("one", prompt, max_tokens=4)
    tokens = seen.run()["one"]
    expected = reference
    if length + 4 <= 128 < context or length < 128 < length + 4:
        long = reference.config.rope_parameters["long_factor"]
        expected = longrope_model(tmp_path / "long", short_factor=long)
    error = tools.relative_error(torch.stack(seen.logits["one"]), tools.reference_logits(expected, prompt, tokens))
    assert error <= TOLERANCE
    if expected is not reference:
        theirs = tools.reference_logits(reference, prompt[:60], [1])
        assert tools.relative_error(tools.reference_logits(expected, prompt[:60], [1]), theirs) > 0.1


def test_window_of_phi_is_that_of_transformers_and_none_where_no_text_exceeds_it() -> None:
    for window, found in ((2047, 2047), (4095, 4095), (4096, None), (262_144, None), (None, None)):
        config = config_of("phi3", sliding_window=window)
        assert config.sliding_window == found
        assert config.sliding_layers == frozenset(range(5) if found else ())


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_older_names_of_longrope_are_read(old_name: str) -> None:
    scaling = config_of("phi3", rope_scaling=LONGROPE, max_position_embeddings=8192).rope_scaling
    for key in ("type", "rope_type"):
        rope = {name: value for name, value in LONGROPE.items() if name != "rope_type"} | {key: old_name}
        assert config_of("phi3", rope_scaling=rope, max_position_embeddings=8192).rope_scaling == scaling


@pytest.mark.parametrize("layout", ["newer", "published"])
def test_text_half_of_mistral_small_is_that_of_transformers(tmp_path: Path, layout: str) -> None:
    """The fields of Mistral Small 3.1, heads wider than hidden_size / num_attention_heads, both forms of names."""
    published = open_checkpoint("mistralai/Mistral-Small-3.1-24B-Instruct-2503", files="config").config
    text = published["text_config"] | SIZES | {"num_key_value_heads": 2, "head_dim": 48, "pad_token_id": None}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "head_dim": 16, "model_type": "pixtral"}
    changed = published | {"text_config": text, "vision_config": vision, "torch_dtype": "float32"}
    config = AutoConfig.for_model(**copy.deepcopy(changed | {"tie_word_embeddings": False}))
    reference = AutoModelForImageTextToText.from_config(config).float().eval()
    tools.randomise(reference.model.language_model, 1)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(changed))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name.partition(".")[0] for name in tensors} == {"language_model", "vision_tower", "multi_modal_projector"}
    if layout == "newer":
        tensors = {f"model.{name}": values for name, values in tensors.items()}
        tensors = {name.replace("model.language_model.lm_head", "lm_head"): values for name, values in tensors.items()}
        tensors = {name.replace("language_model.model.", "language_model."): values for name, values in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    assert tools.error_against(reference, tmp_path, max_model_len=512, vocab=300) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "ministral3"}, 'text_config.model_type to "ministral3", which mistral here does not compute'),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "text_config.rope_parameters.llama_4_scaling_beta to 0.1",
        ),
        ({"head_dim": 31}, "head_dim must be even"),
    ],
)
def test_other_text_parts_of_mistral_are_refused(changes: dict[str, Any], message: str) -> None:
    read = DECODER_CONFIGS["Mistral3ForConditionalGeneration"]
    assert read({"text_config": SIZES}).sliding_window == 4096
    assert not read({"text_config": SIZES | {"sliding_window": None}}).sliding_layers
    assert read({"text_config": SIZES, "tie_word_embeddings": True}).tie_word_embeddings
    with pytest.raises(ConfigError, match=message):
        read({"text_config": SIZES | changes})


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
        ("granite", {"is_causal": False}, "sets is_causal to false"),
        ("phi3", {"is_causal": 0}, "is_causal must be true or false"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier must be a number from 1e-4 to 1e4; got 0.0"),
        ("granite", {"logits_scaling": None}, "logits_scaling must be a number from 1e-4 to 1e4; got null"),
        ("granite", {"embedding_multiplier": "12"}, 'embedding_multiplier must be .*; got "12"'),
        ("granite", {"attention_multiplier": float("inf")}, "attention_multiplier must be a number"),
        ("olmo2", {"attention_bias": True}, "sets attention_bias to true, which olmo2 here does not compute"),
        ("olmo2", {"hidden_act": "gelu"}, 'sets hidden_act to "gelu"'),
        ("olmo2", {"layer_types": ["sliding_attention"] * 5}, "sets layer_types"),
        ("phi3", {"attention_bias": True}, "sets attention_bias to true, which phi3 here does not compute"),
        ("phi3", {"lm_head_bias": True}, "sets lm_head_bias to true"),
        ("phi3", {"partial_rotary_factor": 0.1}, "head_dim must be even, and so must be its rotary part, 0.1 of it"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_type": "su"}}, "type must be the same as"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "lacks rope_scaling.short_factor"),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 3}},
            "long_factor must have a factor for each of 16",
        ),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"short_factor": [0.0] * 16}},
            "short_factor must be a list of numbers from",
        ),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": "1"}}, "short_factor must be a list of numbers"),
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
