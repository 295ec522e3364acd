"""Routed experts from a checkpoint: a tensor for each expert's matrix or all in one, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_config import SMALL

from meltcore.common.errors import ConfigError
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.layers import quantization
from meltcore.layers.feed_forward import GatedMLP, SparseMoeBlock
from meltcore.layers.residual import ResidualStream
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.loader import build_model, load_weights
from meltcore.settings.config import DebugSwitch, EngineConfig, Quantization

LAYERS, EXPERTS, WIDTH, HIDDEN = 3, 4, 24, 32
CONFIG = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": LAYERS,
}


def build(folder: Path, quantization: Quantization = "none", **changes: Any) -> Decoder:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    checkpoint = open_checkpoint(str(folder), files="text")
    return build_model(checkpoint, torch.float32, torch.device("cpu"), quantization)


def load(folder: Path) -> Decoder:
    model = build(folder)
    load_weights(model, open_checkpoint(str(folder), files="all"), lambda stage, fraction: None)
    return model


def assert_equal(model: Decoder, tensors: dict[str, torch.Tensor]) -> None:
    held = model.checkpoint_tensors()
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(held[name], tensor), name  # type: ignore[arg-type]


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    table = build(tmp_path).checkpoint_tensors()
    return {name: torch.randn(tensor.shape) for name, tensor in table.items()}


def fused(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """The same with all experts of a layer in two tensors."""
    prefix = f"model.layers.{layer}.mlp.experts"

    def every(matrix: str) -> torch.Tensor:
        return torch.stack([tensors[f"{prefix}.{expert}.{matrix}.weight"] for expert in range(EXPERTS)])

    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    gate_up = torch.cat([every("gate_proj"), every("up_proj")], 1)
    return kept | {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": every("down_proj")}


def test_tensors_of_each_expert_are_loaded(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), tensors)


def test_fused_expert_tensors_are_loaded_the_same(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    whole = fused(fused(tensors, 0), 2)  # layer 1 stays as it is
    assert whole["model.layers.0.mlp.experts.gate_up_proj"].shape == (EXPERTS, 2 * WIDTH, HIDDEN)
    save_file(whole, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), tensors)


def test_missing_expert_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing tensors: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        load(tmp_path)


def test_missing_fused_tensor_is_named_by_its_experts(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    whole = fused(tensors, 1)
    del whole["model.layers.1.mlp.experts.down_proj"]
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"4 missing tensors: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"):
        load(tmp_path)


def test_fused_tensor_of_another_shape_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    whole = fused(tensors, 0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(whole | {name: whole[name].transpose(1, 2).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gate_up_proj has shape \[4, 32, 48\].*asks for \[4, 48, 32\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "routed"),
    [
        ({}, [True, True, True]),
        ({"mlp_only_layers": [0]}, [False, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False]),
    ],
)
def test_configuration_selects_dense_layers(tmp_path: Path, changes: dict, routed: list[bool]) -> None:
    kinds = [type(block.mlp) for block in build(tmp_path, **changes).blocks]
    assert kinds == [SparseMoeBlock if is_routed else GatedMLP for is_routed in routed]


def test_number_of_experts_has_two_names(tmp_path: Path) -> None:
    experts = build(tmp_path, num_experts=None, num_local_experts=6).config.experts
    assert experts is not None
    assert experts.num_experts == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"num_experts_per_tok": 5}, "from 1 to num_experts, 4; got 5"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization": "fp8"}, r"--quantization fp8 needs sizes .* of 16; .*\.experts\.0\.gate_proj.* \[24, 32\]"),
    ],
)
def test_unsupported_value_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)


def test_dummy_weights_differ_between_experts(tmp_path: Path) -> None:
    build(tmp_path)
    engine = GenerationEngine(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", memory_bytes=2**26))
    mlp = engine.runner.model.blocks[0].mlp
    assert isinstance(mlp, SparseMoeBlock)
    assert len({float(matrix.sum()) for matrix in mlp.experts.down_proj}) == EXPERTS
    assert mlp.experts.gate_up_proj.std() == pytest.approx(0.02, rel=0.1)


def experts_read(model: Path, monkeypatch: pytest.MonkeyPatch, *debug: DebugSwitch) -> int:
    """The number of experts of a layer that 64 nearly equal tokens use."""
    engine = GenerationEngine(
        EngineConfig(model=str(model), load_format="dummy", device="cpu", memory_bytes=2**26, debug=debug)
    )
    mlp = engine.runner.model.blocks[0].mlp
    assert isinstance(mlp, SparseMoeBlock)
    chosen: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(quantization, "expert_outputs", lambda hidden, routing, *_: chosen.append(routing.topk_ids))
        alike = torch.ones(64, HIDDEN) + torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(0)) / 100
        mlp(ResidualStream(alike))
    return len(chosen[0].unique())


def test_uniform_routing_uses_more_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 experts, 8 for each of 64 tokens: 256 (1 - (1 - 8 / 256)^64) of them are read."""
    build(tmp_path, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=16)
    assert experts_read(tmp_path, monkeypatch, "uniform-routing") == pytest.approx(222.4, rel=0.05)
    assert experts_read(tmp_path, monkeypatch) < 30, "dummy weights send tokens that are alike to the same experts"
