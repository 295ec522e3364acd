"""A published quantization_config is read into one typed object; what is not computed is refused by name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meltcore.common.errors import ConfigError
from meltcore.models.configs.quantization_config import (
    AwqConfig,
    BlockFp8Config,
    CompressedFp8Config,
    Fp8Group,
    GptqConfig,
    read_quantization_config,
)

# As published: Qwen3-30B-A3B-FP8 and Qwen3.5-35B-A3B-FP8, "FP8-dynamic" of llm-compressor, AutoAWQ, GPTQModel.
BLOCK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "visual", "mlp.shared_expert_gate"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}
INPUTS = WEIGHTS | {"dynamic": True, "observer": None, "strategy": "token"}
GROUP = {"input_activations": INPUTS, "output_activations": None, "targets": ["Linear"], "weights": WEIGHTS}
COMPRESSED = {
    "config_groups": {"group_0": GROUP},
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "GEMM",
    "zero_point": True,
}
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": True,
    "group_size": 128,
    "lm_head": False,
    "quant_method": "gptq",
    "sym": True,
    "true_sequential": True,
}


def read(settings: dict[str, Any]) -> Any:
    config = read_quantization_config({"quantization_config": settings})
    assert read_quantization_config({"text_config": {"quantization_config": settings}}) == config
    return config


def test_checkpoint_without_it_is_unquantized() -> None:
    assert read_quantization_config({"text_config": {}}) is None
    assert read_quantization_config({"quantization_config": None}) is None


def test_published_settings_are_read() -> None:
    assert read(BLOCK) == BlockFp8Config(("lm_head", "model.layers.0.mlp.gate", "visual", "mlp.shared_expert_gate"))
    assert read(COMPRESSED) == CompressedFp8Config((Fp8Group(("Linear",), "channel"),), ("lm_head", "re:.*mlp.gate$"))
    assert read(AWQ) == AwqConfig(4, 128, zero_point=True, version="gemm")
    assert read(GPTQ) == GptqConfig(4, 128, desc_act=True, sym=True, checkpoint_format="gptq", lm_head=False)


@pytest.mark.parametrize("settings", [BLOCK, AWQ | {"modules_to_not_convert": BLOCK["modules_to_not_convert"]}])
def test_names_exclude_whole_modules(settings: dict[str, Any]) -> None:
    """A name is a module, a part of its path or its end: not the beginning of another name."""
    config = read(settings)
    for module in ("lm_head", "model.layers.0.mlp.gate", "model.visual.blocks.0.qkv", "m.1.mlp.shared_expert_gate"):
        assert not config.quantizes(module)
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate", "m.1.mlp.shared_expert.gate_proj"):
        assert config.quantizes(module)


def test_groups_and_regular_expressions_select_modules() -> None:
    down = GROUP | {"targets": ["re:.*down_proj$"], "weights": WEIGHTS | {"strategy": "tensor"}}
    config = read(COMPRESSED | {"config_groups": {"a": down, "b": GROUP}})
    assert config.strategy("model.layers.0.mlp.down_proj") == "tensor"
    assert config.strategy("model.layers.0.mlp.gate_proj") == "channel"
    assert config.strategy("model.layers.0.mlp.gate") is None
    assert not config.quantizes("lm_head")
    only_down = read(COMPRESSED | {"config_groups": {"a": down}})
    assert not only_down.quantizes("model.layers.0.mlp.gate_proj")


def test_block_scales_of_compressed_tensors_are_read() -> None:
    weights = WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}
    inputs = INPUTS | {"strategy": "group", "group_size": 128}
    config = read(COMPRESSED | {"config_groups": {"a": GROUP | {"weights": weights, "input_activations": inputs}}})
    assert config.groups == (Fp8Group(("Linear",), "block"),)


def test_gptq_excludes_by_regular_expression() -> None:
    config = read(GPTQ | {"dynamic": {r"-:.*\.shared_expert\..*": {}}})
    assert not config.quantizes("model.layers.3.mlp.shared_expert.up_proj")
    assert config.quantizes("model.layers.3.mlp.experts.0.up_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        "(.+)+X$",
        "(?:a|a)*X",
        "(a+){2,}X",
        "(?x)(a+) +X",
        "(a+)(?#x)*X",
        "(?P<g>a+)X",
        ".*.*.*.*.*.*X",
        "(.|.)" * 30 + "X",
        "((.|.)?|.)" * 12 + "X",
        ".?" * 40 + "X",
        "a{99999999999}",
        "(" * 5000 + ")" * 5000,
    ],
)
def test_slow_regular_expression_is_refused_by_name(pattern: str) -> None:
    """Python would try an exponential number of ways to match the first module's name."""
    for settings in (
        COMPRESSED | {"ignore": [f"re:{pattern}", "lm_head"]},
        group(targets=[f"re:{pattern}"]),
        GPTQ | {"dynamic": {f"-:{pattern}": {}}},
    ):
        started_s = time.thread_time()
        with pytest.raises(ConfigError) as raised:
            read(settings)
        assert time.thread_time() - started_s < 2
        assert f'has the regular expression "{pattern[:40]}' in str(raised.value)


@pytest.mark.parametrize("ending", ["X", "(.|.|.)X", "([a-z.]|.)?(?:[^*+]|\\S)X"])
def test_slowest_accepted_regular_expression_takes_milliseconds(ending: str) -> None:
    config = read(COMPRESSED | {"ignore": [f"re:.*[.\\w]+.*{ending}"]})
    started_s = time.thread_time()
    assert config.quantizes("model.language_model.layers.47.mlp.shared_experts.127.gate_proj")
    assert time.thread_time() - started_s < 2


@pytest.mark.parametrize(
    "pattern",
    [
        r".*layers\.(0|1|2|3|45|46|47)\..*",
        r"^model\.layers\.\d+\.mlp\.(?:gate|up|down)_proj$",
        r".*layers\.(3|7)\..*(gate|up|down)_proj.*",
        r"(?!.*experts).*_proj",
        r"model\.layers\.[0-9]{1,2}\.mlp\.down_proj(\.linear)?$",
    ],
)
def test_patterns_as_published_are_read(pattern: str) -> None:
    config = read(GPTQ | {"dynamic": {f"-:{pattern}": {}}})
    assert not config.quantizes("model.layers.3.mlp.down_proj")
    assert config.quantizes("visual.merger")


def group(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | changes}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 4}, "config.json lacks quantization_config.quant_method"),
        (BLOCK | {"quant_method": "bitsandbytes"}, 'one of fp8, compressed-tensors, awq, gptq; got "bitsandbytes"'),
        (BLOCK | {"quant_method": 8}, "quant_method must be text; got 8"),
        (BLOCK | {"weight_block_size": None}, "weight_block_size must be [128, 128]; got null"),
        (BLOCK | {"weight_block_size": [64, 128]}, "weight_block_size must be [128, 128]; got [64, 128]"),
        (BLOCK | {"activation_scheme": "static"}, 'activation_scheme must be dynamic; got "static"'),
        (BLOCK | {"fmt": "e5m2"}, 'fmt must be e4m3; got "e5m2"'),
        (BLOCK | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of texts"),
        (COMPRESSED | {"format": "pack-quantized"}, 'format must be float-quantized or naive-quantized; got "pack-q'),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "sets quantization_config.kv_cache_scheme to"),
        (COMPRESSED | {"config_groups": {}}, "config_groups must be an object with one group at least"),
        (COMPRESSED | {"config_groups": {"a": 3}}, "config_groups must be an object of objects"),
        (COMPRESSED | {"ignore": ["re:("]}, 'ignore has the regular expression "(", which is invalid: missing )'),
        (group(targets=[]), "config_groups.group_0.targets must be a list of module names"),
        (group(weights=WEIGHTS | {"num_bits": 4}), "group_0.weights.num_bits must be 8; got 4"),
        (group(weights=WEIGHTS | {"type": "int"}), 'group_0.weights.type must be float; got "int"'),
        (group(weights=WEIGHTS | {"symmetric": False}), "group_0.weights.symmetric must be true; got false"),
        (group(weights=WEIGHTS | {"strategy": "group"}), 'strategy must be channel or tensor or block; got "group"'),
        (group(input_activations=None), "group_0.input_activations.type must be float; got null"),
        (group(input_activations=INPUTS | {"dynamic": False}), "group_0.input_activations.dynamic must be true"),
        (group(input_activations=INPUTS | {"strategy": "tensor"}), 'strategy must be token; got "tensor"'),
        (AWQ | {"bits": 8}, "bits must be 4; got 8"),
        (AWQ | {"group_size": -1.0}, "group_size must be a whole number of at least 1, or -1; got -1.0"),
        (AWQ | {"group_size": 0}, "group_size must be a whole number of at least 1, or -1; got 0"),
        (AWQ | {"version": "marlin"}, 'version must be gemm; got "marlin"'),
        (GPTQ | {"bits": 3}, "bits must be 4; got 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format must be gptq or gptq_v2; got "marlin"'),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic must be an object of"),
        (GPTQ | {"desc_act": 1}, "desc_act must be true or false; got 1"),
    ],
)
def test_other_settings_are_refused_with_field_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(settings)
    assert message in str(raised.value)
    assert "quantization_config" in str(raised.value)
