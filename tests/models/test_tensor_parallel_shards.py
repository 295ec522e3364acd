"""Shards of a model: together they hold every number of a checkpoint, each at its position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meltcore.common.errors import ConfigError
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import ShardLoader
from meltcore.models.checkpoints import tensor_file
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.checkpoints.safetensors_file import SafetensorsFile
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, RecurrentStateSpec
from meltcore.models.loader import build_model, fill_dummy_weights, load_weights

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
SLIDING = {"sliding_window": 96, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CPU, META = torch.device("cpu"), torch.device("meta")


def config_of(family: str) -> dict[str, Any]:
    if family == "Qwen3_5MoeForCausalLM":
        published = open_checkpoint("Qwen/Qwen3.5-35B-A3B", files="config").config["text_config"]
        return published | SIZES | HYBRID | {"architectures": [family]}
    if family == "Gemma3ForCausalLM":
        return SIZES | SLIDING | {"architectures": [family], "model_type": "gemma3_text"}
    return SIZES | {"architectures": [family]}


FAMILIES = (
    "Gemma3ForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "SmolLM3ForCausalLM",
)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_of(request.param)))
    return tmp_path


def build(folder: Path, group: TensorParallelGroup | None = None, device: torch.device = CPU) -> Decoder:
    checkpoint = open_checkpoint(str(folder), files="text")
    has_mtp = "mtp_num_hidden_layers" in checkpoint.config
    return build_model(checkpoint, torch.float32, device, group=group, has_mtp=has_mtp)


def loaded(folder: Path, group: TensorParallelGroup) -> Decoder:
    model = build(folder, group)
    load_weights(model, open_checkpoint(str(folder), files="all"), lambda stage, fraction: None)
    return model


def random_tensors(folder: Path, *, fused: bool) -> dict[str, torch.Tensor]:
    model = build(folder, device=META)
    shapes = {name: target.shape for name, target in model.checkpoint_tensors().items()}
    for name, (target, checkpoint_names) in (model.fused_tensors() if fused else {}).items():
        shapes[name] = target.shape
        for part in checkpoint_names:
            del shapes[part]
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "fused"), [(2, True), (4, False), (4, True)])
def test_shards_hold_every_slice_of_a_checkpoint_and_the_last_reads_only_its_own_bytes(
    folder: Path, ranks: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(ranks)
    read: list[int] = []
    read_into = SafetensorsFile._read_into

    def counting(shard: SafetensorsFile, buffer: memoryview, offset: int) -> None:
        read.append(len(buffer))
        read_into(shard, buffer, offset)

    tensors = random_tensors(folder, fused=fused)
    save_file(tensors, folder / "model.safetensors")
    held = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    compared = 0
    for rank in range(ranks):
        if rank == ranks - 1:
            monkeypatch.setattr(SafetensorsFile, "_read_into", counting)
            monkeypatch.setattr(tensor_file, "_MIN_RANGE_BYTES", 1)  # short runs would be read with what lies between
        model = loaded(folder, TensorParallelGroup(rank, ranks))
        table = model.checkpoint_tensors() | {name: each.tensor for name, each in model.fused_tensors().items()}
        for name, tensor in tensors.items():
            target = table[name]
            for index, piece in target.slices if isinstance(target, ShardLoader) else [((), target)]:
                held[name][index] = True
                if isinstance(piece, torch.Tensor):
                    assert torch.equal(piece, tensor[index]), name
                    compared += 1
    assert all(bool(each.all()) for each in held.values())
    assert compared > len(tensors)
    assert sum(read) == sum(weight.nbytes for weight in model.parameters())


def test_shards_have_about_the_same_size(folder: Path) -> None:
    whole = sum(each.numel() for each in build(folder, device=META).parameters())
    sizes = [
        sum(each.numel() for each in build(folder, TensorParallelGroup(rank, 2), META).parameters())
        for rank in range(2)
    ]
    assert sizes[0] == sizes[1]
    assert whole / 2 <= sizes[0] < 0.54 * whole  # norms, the router and the shared expert's gate are on every rank


def test_dummy_weights_of_ranks_equal_those_of_one_device(folder: Path) -> None:
    whole, checkpoint = build(folder), open_checkpoint(str(folder), files="config")
    fill_dummy_weights(whole, checkpoint, 3)
    expected = whole.checkpoint_tensors()
    for rank in range(2):
        share = build(folder, TensorParallelGroup(rank, 2))
        fill_dummy_weights(share, checkpoint, 3)
        for name, target in share.checkpoint_tensors().items():
            for index, piece in target.slices if isinstance(target, ShardLoader) else [((), target)]:
                if isinstance(piece, torch.Tensor) and isinstance(expected[name], torch.Tensor):
                    assert torch.equal(piece, expected[name][index]), name  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_kv_cache_specs_are_those_of_one_rank(ranks: int) -> None:
    """Qwen3.5-35B-A3B: of two key heads of attention a rank holds one, however many ranks there are."""
    checkpoint = open_checkpoint("Qwen/Qwen3.5-35B-A3B", files="config")
    model = build_model(checkpoint, torch.bfloat16, META, group=TensorParallelGroup(ranks - 1, ranks))
    attention = FullAttentionSpec(kv_heads=1, head_dim=256)
    recurrent = RecurrentStateSpec(8192 // ranks, conv_width=4, heads=32 // ranks, key_dim=128, value_dim=128)
    assert model.kv_cache_specs() == [recurrent, recurrent, recurrent, attention] * 10


def test_size_that_cannot_be_sharded_is_named(folder: Path) -> None:
    message = "size 3 does not divide this model's 320 tokens of the vocabulary .*; the largest size .* can have is 2$"
    with pytest.raises(ConfigError, match=message):
        build(folder, TensorParallelGroup(0, 3), META)
