"""Weights counted from configurations are those of the models that engines build, byte for byte."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoint import (
    PUBLISHED_CONFIG_FOLDERS,
    PUBLISHED_RECOGNIZERS,
    PUBLISHED_SYNTHESIS_FOLDERS,
    PUBLISHED_TRANSLATION_FOLDERS,
    open_checkpoint,
)
from meltcore.models.decoder_families import DECODER_CONFIGS
from meltcore.models.indicconformer import IndicConformer
from meltcore.models.indicf5 import IndicF5
from meltcore.models.indictrans2 import IndicTrans2
from meltcore.models.kv_cache_specs import group_layers
from meltcore.models.loader import build_meta_model
from meltcore.models.nemo_config import read_config
from meltcore.models.registry import ARCHITECTURES
from meltcore.models.task_configs import IndicF5Config, IndicTrans2Config
from meltcore.models.weight_sizes import (
    decoder_cache_specs,
    decoder_weight_bytes,
    recognition_weight_bytes,
    synthesis_weight_bytes,
    translation_weight_bytes,
)

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


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "google/gemma-3-27b-it", "Qwen/Qwen3.5-35B-A3B"])
def test_shard_and_fp8_weigh_what_the_model_does(name: str) -> None:
    checkpoint = open_checkpoint(name, files="config")
    config = DECODER_CONFIGS[checkpoint.config["architectures"][0]](checkpoint.config)
    shard = build_meta_model(checkpoint, torch.bfloat16, META, group=TensorParallelGroup(0, 2))
    assert decoder_weight_bytes(config, element_size=2, ranks=2) == parameter_bytes(shard)
    assert group_layers(decoder_cache_specs(config, 2)) == group_layers(shard.kv_cache_specs())
    fp8 = build_meta_model(checkpoint, torch.bfloat16, META, "fp8")
    assert decoder_weight_bytes(config, element_size=2, weight_format="fp8") == parameter_bytes(fp8)


def test_quantized_files_have_their_published_sizes() -> None:
    gemma = open_checkpoint("google/gemma-3-27b-it", files="config").config
    qwen = open_checkpoint("Qwen/Qwen3-30B-A3B", files="config").config
    sizes = [
        decoder_weight_bytes(DECODER_CONFIGS[config["architectures"][0]](config), element_size=2, weight_format=format_)
        for config, format_ in ((gemma, "q4_0"), (qwen, "q8_0"))
    ]
    assert sizes == [pytest.approx(17.2e9, rel=0.01), pytest.approx(32.5e9, rel=0.01)]


@pytest.mark.parametrize("name", PUBLISHED_TRANSLATION_FOLDERS)
def test_translation_weighs_what_its_model_does(name: str) -> None:
    values = json.loads((PUBLISHED_TRANSLATION_FOLDERS[name] / "config.json").read_text())
    with META:
        model = IndicTrans2(values).half()
    assert translation_weight_bytes(IndicTrans2Config.read(values), 2) == parameter_bytes(model)


def test_recognition_weighs_what_its_model_does() -> None:
    [folder] = PUBLISHED_RECOGNIZERS.values()
    config = read_config(yaml.safe_load((folder / "model_config.yaml").read_text()))
    with META:
        model = IndicConformer(config).half()
    assert recognition_weight_bytes(config, 2) == parameter_bytes(model)


def test_synthesis_weighs_what_its_prepared_model_does() -> None:
    [folder] = PUBLISHED_SYNTHESIS_FOLDERS.values()
    config = IndicF5Config.read(json.loads((folder / "config.json").read_text()), 2545)
    with META:
        model = IndicF5(config).to(torch.bfloat16)
        model.vocoder.float()
    modulations = [model.final_modulation, *(layer.modulation for layer in model.layers)]
    removed = sum(parameter_bytes(each) for each in modulations)
    kept = 2 * 56 * (6 * config.num_layers + 2) * config.hidden_size
    assert synthesis_weight_bytes(config, 2) == parameter_bytes(model) - removed + kept
