"""The type and range of every field of a configuration are checked before use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_config import SMALL

from meltcore.common.errors import ConfigError
from meltcore.engine.worker.loading import _choose_dtype
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.configs.config_fields import RULES
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.loader import build_model
from meltcore.settings.config import EngineConfig

ROUTED = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
HYBRID = ROUTED | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 24,
}
WHOLE = ("192", 192.0, True, [192], {"size": 192}, -1, 10**12, 10**400)
FLAGS = ("false", 0, 1, [], {})
BAD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "full_attention_interval",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        ),
        (0, *WHOLE),
    ),
    "shared_expert_intermediate_size": WHOLE,
    "max_position_embeddings": (0, 1, *WHOLE),
    "rms_norm_eps": ("1e-06", 0, -1e-6, 2, True, [1e-6], float("nan"), float("inf")),
    "rope_theta": ("1e4", 0, -1.0, 0.5, True, 1e13, 10**400, float("nan"), float("inf")),
    "partial_rotary_factor": ("0.25", 0, -0.25, 1.5, True, None, float("nan")),
    "rope_parameters": ("x", [], 7, True),
    "rope_scaling": ("x", [], 7, True),
    "tie_word_embeddings": FLAGS,
    "use_sliding_window": FLAGS,
    "is_causal": (*FLAGS, None),
    "mlp_bias": FLAGS,
    "attention_bias": (*FLAGS, None),
    "attn_output_gate": (*FLAGS, None),
    "hidden_act": (None, 7, ["silu"]),
    "layer_types": (5, "full_attention", [1, 2], {"0": "full_attention"}),
    "architectures": ("Qwen3ForCausalLM", 7, [1], {"a": 1}),
    "text_config": ("x", 7, [1]),
    "eos_token_id": ("</s>", -1),
}
CASES = [pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name, values in BAD.items() for value in values]


def build(folder: Path, config: dict[str, Any]) -> Decoder:
    (folder / "config.json").write_text(json.dumps(config))
    return build_model(open_checkpoint(str(folder), files="text"), torch.float32, torch.device("meta"))


def refusal(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        build(folder, config)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 400
    # Errors of the model's shapes name the folder; those of opening the checkpoint do not.
    return text.removeprefix(f"{folder}: ")


@pytest.mark.parametrize("config", [SMALL, ROUTED, HYBRID], ids=["dense", "routed", "hybrid"])
def test_unmodified_configurations_are_valid(tmp_path: Path, config: dict[str, Any]) -> None:
    build(tmp_path, config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), CASES)
def test_wrong_value_is_refused_with_file_field_and_rule(tmp_path: Path, name: str, value: Any) -> None:
    text = refusal(tmp_path, HYBRID | {name: value})
    assert text.startswith(f"config.json: {name} must be {RULES[name].requirement}; got {json.dumps(value)[:100]}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intermediate_size", 0),
        ("intermediate_size", "48"),
        ("attention_bias", "false"),
        ("norm_topk_prob", "true"),
        ("norm_topk_prob", 1),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", "1"),
        ("mlp_only_layers", "x"),
        ("mlp_only_layers", [1, "2"]),
        ("mlp_only_layers", [-1]),
        ("mlp_only_layers", {"1": True}),
    ],
)
def test_wrong_value_is_refused_with_dense_layers(tmp_path: Path, name: str, value: Any) -> None:
    assert refusal(tmp_path, ROUTED | {name: value}).startswith(
        f"config.json: {name} must be {RULES[name].requirement}; got "
    )


@pytest.mark.parametrize("value", ["4", 0, 2.0])
def test_wrong_value_is_refused_under_the_other_name(tmp_path: Path, value: Any) -> None:
    config = ROUTED | {"num_experts": None, "num_local_experts": value}
    assert "num_local_experts must be a whole number" in refusal(tmp_path, config)


def test_nested_field_is_named_with_its_path(tmp_path: Path) -> None:
    text = {name: value for name, value in HYBRID.items() if name != "architectures"}
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    rope = {"rope_parameters": {"rope_theta": "x"}}
    build(tmp_path, whole | {"text_config": text})
    wrong = refusal(tmp_path, whole | {"text_config": text | {"hidden_size": "32"}})
    assert wrong.startswith("config.json: text_config.hidden_size must be a whole number from 1 to")
    assert refusal(tmp_path, whole | {"text_config": text | {"hidden_size": None}}).endswith("text_config.hidden_size")
    assert ": text_config.rope_parameters.rope_theta must be" in refusal(tmp_path, whole | {"text_config": text | rope})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "a multiple of num_key_value_heads, 2; got 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor to 0.5, which this decoder does not compute"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor to 0.5"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 'layer_types to ["sliding_attention"'),
        ({"hidden_size": None, "rope_theta": None}, "lacks hidden_size, rope_theta"),
    ],
)
def test_inconsistent_values_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    assert message in refusal(tmp_path, SMALL | changes)


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_rotary_dimension_is_even(tmp_path: Path, share: float) -> None:
    assert "head_dim must be even" in refusal(tmp_path, HYBRID | {"partial_rotary_factor": share})


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("beside", [{}, {"rope_type": "default", "rope_theta": 10000.0}])
@pytest.mark.parametrize(
    ("said", "field"),
    [
        (DYNAMIC, 'rope_type must be one of default, linear, llama3, longrope, yarn; got "dynamic"'),
        ({"type": "ntk", "factor": 2.0}, 'type must be one of default, linear, llama3, longrope, yarn; got "ntk"'),
        (
            {"rope_type": "default", "type": "dynamic"},
            'type must be one of default, linear, llama3, longrope, yarn; got "dynamic"',
        ),
        (
            {"rope_type": "yarn", "type": "linear", "factor": 2},
            'type must be the same as rope_type, "yarn"; got "linear"',
        ),
        ({"rope_type": ["yarn"]}, 'rope_type must be text; got ["yarn"]'),
        ({"full_attention": DYNAMIC, "rope_theta": 1e4}, "full_attention to {"),
    ],
)
def test_unsupported_rotary_angles_are_refused_in_any_field(
    tmp_path: Path, name: str, beside: dict, said: dict, field: str
) -> None:
    """A wrong value is found under both names, in the text part and in the whole configuration."""
    [other] = {"rope_parameters", "rope_scaling"} - {name}
    spoilt = {name: said, other: beside}
    text = {name: value for name, value in HYBRID.items() if name != "architectures"}
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    assert f" {name}.{field}" in refusal(tmp_path, SMALL | spoilt)
    assert f" text_config.{name}.{field}" in refusal(tmp_path, whole | {"text_config": text | spoilt})
    assert f"config.json sets {name}." in refusal(tmp_path, whole | spoilt)


def test_qwen2_divides_its_hidden_size_without_head_dim(tmp_path: Path) -> None:
    config = SMALL | {"architectures": ["Qwen2ForCausalLM"], "head_dim": None}
    assert build(tmp_path, config).config.head_dim == 16
    assert "num_attention_heads must be" in refusal(tmp_path, config | {"num_attention_heads": 0})
    assert "hidden_size must be a multiple of" in refusal(tmp_path, config | {"num_attention_heads": 64})


def test_hybrid_routes_every_layer(tmp_path: Path) -> None:
    """As transformers does, whose Qwen3.5 has no such fields."""
    experts = build(tmp_path, HYBRID | {"decoder_sparse_step": 2, "norm_topk_prob": False}).config.experts
    assert experts is not None
    assert experts.norm_topk_prob
    assert not experts.dense_layers


@pytest.mark.parametrize("dtype", [["bfloat16"], 16, {"torch": "float16"}, "int8"])
def test_invalid_stored_type_is_refused(tmp_path: Path, dtype: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"dtype": dtype}))
    checkpoint = open_checkpoint(str(tmp_path), files="text")
    with pytest.raises(ConfigError, match=r"name one of float32, bfloat16, float16 with --dtype"):
        _choose_dtype(checkpoint, EngineConfig(model=str(tmp_path)), torch.device("cuda"))
