"""Weights counted from configurations are those of the models that engines build, byte for byte."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import pytest
import torch
import yaml
from few_layers import open_few_layers

from meltcore.engine.memory.workspace import plan_workspace
from meltcore.engine.synthesis.memory import synthesis_weight_bytes
from meltcore.engine.transcription.memory import transcription_weight_bytes
from meltcore.engine.translation.memory import translation_weight_bytes
from meltcore.kernels.moe.grouped_gemm_tma import BLOCK_M
from meltcore.kernels.quant import ggml_experts
from meltcore.kernels.quant.ggml import empty
from meltcore.kernels.quant.ggml_experts import experts_scratch_values
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import (
    PUBLISHED_CONFIG_FOLDERS,
    PUBLISHED_TASK_FOLDERS,
    PUBLISHED_TRANSCRIBERS,
    open_checkpoint,
)
from meltcore.models.configs.nemo_config import read_config
from meltcore.models.configs.quantization_config import read_quantization_config
from meltcore.models.configs.task_configs import IndicF5Config, IndicTrans2Config
from meltcore.models.decoders.decoder_families import DECODER_CONFIGS
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.loader import build_meta_model
from meltcore.models.quantized.quantized_sizes import quantized_weight_bytes
from meltcore.models.quantized.step_sizes import MIN_DEQUANTIZED_PAIRS, decoder_step
from meltcore.models.quantized.weight_sizes import (
    decoder_cache_specs,
    decoder_weight_bytes,
    largest_expert_slice,
)
from meltcore.models.registry import ARCHITECTURES
from meltcore.models.tasks.indicconformer import IndicConformer
from meltcore.models.tasks.indicf5 import IndicF5
from meltcore.models.tasks.indictrans2 import IndicTrans2

META = torch.device("meta")
DECODERS = [name for name in PUBLISHED_CONFIG_FOLDERS if not name.endswith(("AWQ", "FP8"))]
DECODERS += ["meltcore/sums", "meltcore/sums-hybrid", "meltcore/sums-gemma"]


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(values.nbytes for values in model.parameters())


def test_every_architecture_has_a_configuration() -> None:
    assert set(DECODER_CONFIGS) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_weighs_and_caches_what_its_model_does(name: str) -> None:
    checkpoint = open_checkpoint(name, files="config")
    config = DECODER_CONFIGS[checkpoint.config["architectures"][0]](checkpoint.config)
    model = build_meta_model(checkpoint, torch.bfloat16, META)
    assert decoder_weight_bytes(config, element_size=2) == parameter_bytes(model)
    assert group_layers(decoder_cache_specs(config)) == group_layers(model.kv_cache_specs())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "google/gemma-3-27b-it", "Qwen/Qwen3.5-35B-A3B"])
def test_shard_and_fp8_weigh_what_the_model_does(name: str) -> None:
    checkpoint = open_checkpoint(name, files="config")
    config = DECODER_CONFIGS[checkpoint.config["architectures"][0]](checkpoint.config)
    shard = build_meta_model(checkpoint, torch.bfloat16, META, group=TensorParallelGroup(0, 2))
    assert decoder_weight_bytes(config, element_size=2, ranks=2) == parameter_bytes(shard)
    assert group_layers(decoder_cache_specs(config, 2)) == group_layers(shard.kv_cache_specs())
    fp8 = build_meta_model(checkpoint, torch.bfloat16, META, "fp8")
    assert decoder_weight_bytes(config, element_size=2, weight_format="fp8") == parameter_bytes(fp8)


FP8_CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*down_proj"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "type": "float",
                "num_bits": 8,
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "lm_head": True, "desc_act": False}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("Qwen/Qwen3-8B-AWQ", None),
        ("Qwen/Qwen3-30B-A3B-FP8", None),
        ("Qwen/Qwen3.5-35B-A3B-FP8", None),
        ("Qwen/Qwen3-30B-A3B", {"quant_method": "awq", "bits": 4, "group_size": 128}),
        ("Qwen/Qwen3-0.6B", FP8_CHANNELS),
        ("meta-llama/Llama-3.1-8B-Instruct", GPTQ),
    ],
)
def test_published_quantized_checkpoint_weighs_what_its_model_does(
    name: str, stored: dict[str, Any] | None, ranks: int
) -> None:
    checkpoint = open_few_layers(name)
    if stored is not None:
        checkpoint = dataclasses.replace(checkpoint, config=checkpoint.config | {"quantization_config": stored})
    values = checkpoint.config
    config, published = DECODER_CONFIGS[values["architectures"][0]](values), read_quantization_config(values)
    assert published is not None
    group = TensorParallelGroup(0, ranks) if ranks > 1 else None
    model = build_meta_model(checkpoint, torch.bfloat16, META, group=group)
    assert quantized_weight_bytes(config, values, published, element_size=2, ranks=ranks) == parameter_bytes(model)


def test_quantized_files_have_their_published_sizes() -> None:
    gemma = open_checkpoint("google/gemma-3-27b-it", files="config").config
    qwen = open_checkpoint("Qwen/Qwen3-30B-A3B", files="config").config
    sizes = [
        decoder_weight_bytes(DECODER_CONFIGS[config["architectures"][0]](config), element_size=2, weight_format=format_)
        for config, format_ in ((gemma, "q4_0"), (qwen, "q8_0"))
    ]
    assert sizes == [pytest.approx(17.2e9, rel=0.01), pytest.approx(32.5e9, rel=0.01)]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B"])
def test_slices_of_experts_are_those_that_kernels_dequantize(name: str) -> None:
    """Only steps that reach the kernels' limit need them; a step of a fleet's default has fewer tokens."""
    values = open_checkpoint(name, files="config").config
    config = DECODER_CONFIGS[values["architectures"][0]](values)
    assert config.experts is not None
    count, width = config.experts.num_experts + config.experts.shared_expert, config.experts.moe_intermediate_size
    shapes = (count, 2 * width, config.hidden_size), (count, config.hidden_size, width)
    gate_up, down = (empty(GgmlType.Q8_0, shape, META) for shape in shapes)
    assert largest_expert_slice(config) == experts_scratch_values([gate_up], down)
    assert MIN_DEQUANTIZED_PAIRS == ggml_experts.MIN_DEQUANTIZED_PAIRS
    step = decoder_step(config, 2, is_packed=True)
    needed = partial(plan_workspace, step, vocab_size=1, max_num_seqs=1, max_model_len=64, logit_rows=1)
    below, at = (
        needed(max_num_batched_tokens=tokens, penalty_slots=1, has_graphs=False).step
        for tokens in (step.expert_tokens - 1, step.expert_tokens)
    )
    assert at - below > step.expert_bytes > 2 * BLOCK_M * count * (config.hidden_size + width)
    assert step.expert_tokens > 2048


@pytest.mark.parametrize("name", [name for name in PUBLISHED_TASK_FOLDERS if "indictrans2" in name])
def test_translation_weighs_what_its_model_does(name: str) -> None:
    values = json.loads((PUBLISHED_TASK_FOLDERS[name] / "config.json").read_text())
    with META:
        model = IndicTrans2(values).half()
    assert translation_weight_bytes(IndicTrans2Config.read(values), 2) == parameter_bytes(model)


def test_transcription_weighs_what_its_model_does() -> None:
    [folder] = PUBLISHED_TRANSCRIBERS.values()
    config = read_config(yaml.safe_load((folder / "model_config.yaml").read_text()))
    with META:
        model = IndicConformer(config).half()
    assert transcription_weight_bytes(config, 2) == parameter_bytes(model)


def test_synthesis_weighs_what_its_prepared_model_does() -> None:
    folder = PUBLISHED_TASK_FOLDERS["ai4bharat/IndicF5"]
    config = IndicF5Config.read(json.loads((folder / "config.json").read_text()), 2545)
    with META:
        model = IndicF5(config).to(torch.bfloat16)
        model.vocoder.float()
    modulations = [model.final_modulation, *(layer.modulation for layer in model.layers)]
    removed = sum(parameter_bytes(each) for each in modulations)
    kept = 2 * 56 * (6 * config.num_layers + 2) * config.hidden_size
    assert synthesis_weight_bytes(config, 2) == parameter_bytes(model) - removed + kept
