"""Llama and Mistral: what config.json leaves out has the default of transformers, what is not computed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.llama import Llama, Mistral

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 320,
}
CLASSES = {"llama": Llama, "mistral": Mistral}


def config_of(model_type: str, **changes: Any) -> Any:
    return CLASSES[model_type](SIZES | changes).config


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("absent", ["absent", "null"])
def test_absent_fields_have_the_defaults_of_transformers(model_type: str, absent: str) -> None:
    theirs = AutoConfig.for_model(model_type, **SIZES)
    names = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "head_dim", "rope_theta")
    ours = config_of(model_type, **(dict.fromkeys(names) if absent == "null" else {}))
    for name in names[:3]:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == 256 // 8
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


def test_window_of_mistral_holds_for_all_layers_and_null_stands_for_none() -> None:
    assert AutoConfig.for_model("mistral", **SIZES).sliding_window == 4096
    for changes, window in (({}, 4096), ({"sliding_window": 64}, 64), ({"sliding_window": None}, None)):
        config = config_of("mistral", **changes)
        assert config.sliding_window == window
        assert config.sliding_layers == frozenset(range(3) if window else ())


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "sets attention_bias to true, which llama here does not compute"),
        ("llama", {"mlp_bias": True}, "sets mlp_bias to true"),
        ("llama", {"is_causal": False}, "sets is_causal to false"),
        ("llama", {"rope_interleaved": True}, "sets rope_interleaved to true"),
        ("llama", {"hidden_act": "gelu"}, 'sets hidden_act to "gelu"'),
        ("llama", {"hidden_size": 100}, "hidden_size must be a multiple of num_attention_heads, 8, without head_dim"),
        ("llama", {"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number from 1 to 16777216; got 0"),
        ("mistral", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type must be one of default"),
        ("mistral", {"layer_types": ["chunked_attention"] * 3}, "sets layer_types"),
    ],
)
def test_what_is_not_computed_is_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(model_type, **changes)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B-Instruct", "mistralai/Mistral-7B-Instruct-v0.1"])
def test_published_folder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    """The published fields, with a small network's sizes."""
    published = open_checkpoint(name, files="config").config
    sizes = SIZES | {"head_dim": 32, "num_key_value_heads": 2, "torch_dtype": "float32"}
    config = AutoConfig.for_model(**published | sizes)
    reference = AutoModelForCausalLM.from_config(config).float().eval()
    tools.randomise(reference, 3)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published | sizes))
    seen = tools.open_engine(tmp_path, max_model_len=512)
    prompt = tools.random_prompt(300, 1)
    seen.add("one", prompt, max_tokens=5)
    generated = seen.run()["one"]
    theirs = tools.reference_logits(reference, prompt, generated)
    assert tools.relative_error(torch.stack(seen.logits["one"]), theirs) <= 1e-4
