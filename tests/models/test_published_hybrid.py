"""Qwen3.5-35B-A3B as it is published: its tensors, counted and in each of their forms, and what is left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from few_layers import open_few_layers
from safetensors.torch import save_file

from meltcore.common.errors import ConfigError
from meltcore.engine.worker.loading import _shape
from meltcore.kernels.rotary import half_split_order
from meltcore.layers.attention import Attention
from meltcore.layers.feed_forward import SparseMoeBlock
from meltcore.layers.gated_delta_net import GatedDeltaNet
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, RecurrentStateSpec
from meltcore.models.decoders.qwen3_5 import Qwen3_5
from meltcore.models.loader import build_model, load_weights

MODEL = "Qwen/Qwen3.5-35B-A3B"
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CPU = torch.device("cpu")


def published_config(**changes: Any) -> dict[str, Any]:
    config = dict(open_checkpoint(MODEL, files="config").config)
    return config | {"text_config": config["text_config"] | changes}


def published_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every text tensor of the published files, listed independently of the model."""
    hidden, head, width, experts = (
        text[n] for n in ("hidden_size", "head_dim", "moe_intermediate_size", "num_experts")
    )
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    heads, values = text["linear_num_value_heads"], text["linear_num_value_heads"] * text["linear_value_head_dim"]
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    every = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
        "mlp.shared_expert.gate_proj.weight": (width, hidden),
        "mlp.shared_expert.up_proj.weight": (width, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, width),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }
    linear = {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (text["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }
    full = {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (text["vocab_size"], hidden),
        "model.language_model.embed_tokens.weight": (text["vocab_size"], hidden),
        "model.language_model.norm.weight": (hidden,),
    }
    for layer in range(text["num_hidden_layers"]):
        own = every | (full if (layer + 1) % text["full_attention_interval"] == 0 else linear)
        shapes |= {f"model.language_model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def mtp_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the layer for multi-token prediction, whose experts are stacked as in Qwen3.6's files."""
    hidden, prefix = text["hidden_size"], "model.language_model.layers.0."
    layer = published_shapes(text | {"num_hidden_layers": 1, "full_attention_interval": 1})
    norms = {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    block = {
        f"mtp.layers.0.{name.removeprefix(prefix)}": shape for name, shape in layer.items() if name.startswith(prefix)
    }
    return {"mtp.fc.weight": (hidden, 2 * hidden), **norms, **block}


def each_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with a tensor for every matrix of every expert."""
    table: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, matrix = name.partition(".experts.")
        if not matrix:
            table[name] = tensor
        for expert, own in enumerate(tensor if matrix else ()):
            parts = own.chunk(2) if matrix == "gate_up_proj" else (own,)
            for part, kind in zip(parts, ("gate", "up") if len(parts) == 2 else ("down",), strict=True):
                table[f"{prefix}.experts.{expert}.{kind}_proj.weight"] = part.clone()
    return table


def small_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = published_shapes(published_config(**SMALL)["text_config"])
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def build(folder: Path, dtype: torch.dtype = torch.float32, *, has_mtp: bool = False, **changes: Any) -> Decoder:
    (folder / "config.json").write_text(json.dumps(published_config(**SMALL | changes)))
    return build_model(open_checkpoint(str(folder), files="config"), dtype, CPU, has_mtp=has_mtp)


def load(
    folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, *, has_mtp: bool = False
) -> Decoder:
    model = build(folder, dtype, has_mtp=has_mtp)
    save_file(tensors, folder / "model.safetensors")
    load_weights(model, open_checkpoint(str(folder), files="all"), lambda stage, fraction: None)
    return model


@pytest.mark.slow
def test_published_text_part_has_every_tensor() -> None:
    """693 tensors and 34,660,610,688 parameters: what loading the published files has reported."""
    model = build_model(open_checkpoint(MODEL, files="config"), torch.bfloat16, torch.device("meta"))
    shapes = published_shapes(published_config()["text_config"])
    table = dict(model.checkpoint_tensors())
    for name, (tensor, checkpoint_names) in model.fused_tensors().items():
        if ".experts." not in name:  # merged queries, keys and values are another family's layout
            continue
        table[name] = tensor
        for part in checkpoint_names:
            del table[part]
    assert {name: tuple(tensor.shape) for name, tensor in table.items()} == shapes
    assert len(table) == 693
    assert sum(math.prod(shape) for shape in shapes.values()) == 34_660_610_688
    assert sum(parameter.numel() for parameter in model.parameters()) == 34_660_610_688


def test_published_model_has_expected_kv_cache_specs() -> None:
    model = build_model(open_checkpoint(MODEL, files="config"), torch.bfloat16, torch.device("meta"))
    attention = FullAttentionSpec(kv_heads=2, head_dim=256)
    recurrent = RecurrentStateSpec(conv_channels=8192, conv_width=4, heads=32, key_dim=128, value_dim=128)
    assert model.kv_cache_specs() == [recurrent, recurrent, recurrent, attention] * 10


def test_published_mtp_layer_has_every_tensor() -> None:
    """785 tensors in Qwen3.5's files, where each expert has its own, and 19 in Qwen3.6's."""
    checkpoint, meta = open_few_layers(MODEL), torch.device("meta")
    models = [build_model(checkpoint, torch.bfloat16, meta, has_mtp=has_mtp) for has_mtp in (False, True)]
    tables = [model.checkpoint_tensors() for model in models]
    added = {name: tuple(tensor.shape) for name, tensor in tables[1].items() if name not in tables[0]}
    stacked = mtp_shapes(published_config()["text_config"])
    assert len(stacked) == 19
    single = each_expert({name: torch.empty(shape, device=meta) for name, shape in stacked.items()})
    assert len(added) == 785
    assert added == {name: tuple(tensor.shape) for name, tensor in single.items()}
    fused = models[1].fused_tensors()
    assert {name for name in fused if name.startswith("mtp.") and ".experts." in name} <= stacked.keys()
    before, after = (sum(each.numel() for each in model.parameters()) for model in models)
    assert after - before == sum(math.prod(shape) for shape in stacked.values())
    assert models[1].kv_cache_specs() == [*models[0].kv_cache_specs(), FullAttentionSpec(kv_heads=2, head_dim=256)]
    before, after = (_shape(model, torch.device("cuda"), torch.bfloat16, 1, None) for model in models)
    assert after.weight_bytes - before.weight_bytes == sum(each.nbytes for each in models[1].mtp.parameters())
    assert after.caches.page_bytes(64, 2) - before.caches.page_bytes(64, 2) == 2 * 64 * 2 * 256 * 2
    assert (after.step.layers, before.step.layers) == (5, 4)
    assert after.step.token_bytes - before.step.token_bytes >= 2048 * 2  # the target's hidden states


@pytest.mark.parametrize("form", [dict, each_expert])
def test_mtp_tensors_are_loaded_from_each_published_form(tmp_path: Path, form: Any) -> None:
    stored = mtp_shapes(published_config(**SMALL)["text_config"])
    torch.manual_seed(1)
    tensors = small_tensors() | {name: torch.randn(shape).bfloat16() for name, shape in stored.items()}
    model = load(tmp_path, form(tensors), has_mtp=True)
    table = model.checkpoint_tensors()
    for name, tensor in each_expert(tensors).items():
        target = table[name]
        if isinstance(target, torch.Tensor):
            assert torch.equal(target, tensor.float()), name
    assert isinstance(model, Qwen3_5)
    assert model.mtp is not None
    assert torch.equal(next(model.mtp.fc.parameters()), tensors["mtp.fc.weight"].float())
    assert torch.equal(model.mtp.norm.weight, tensors["mtp.norm.weight"].float() + 1)
    assert torch.equal(model.mtp.hidden_norm.weight, tensors["mtp.pre_fc_norm_hidden.weight"].float() + 1)
    del tensors["mtp.norm.weight"]
    with pytest.raises(ConfigError, match=r"1 missing tensors: mtp\.norm\.weight"):
        load(tmp_path, form(tensors), has_mtp=True)


@pytest.mark.parametrize("form", [dict, each_expert])
def test_every_tensor_is_loaded_from_each_published_form(tmp_path: Path, form: Any) -> None:
    tensors = small_tensors()
    model = load(tmp_path, form(tensors))
    delta, attention, mlp = model.blocks[0].attention, model.blocks[3].attention, model.blocks[3].mlp
    assert isinstance(delta, GatedDeltaNet)
    assert isinstance(attention, Attention)
    assert isinstance(mlp, SparseMoeBlock)
    first, last = "model.language_model.layers.0.linear_attn.", "model.language_model.layers.3."
    in_proj = torch.cat([tensors[f"{first}in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")])
    experts, shared = last + "mlp.experts.", last + "mlp.shared_expert."
    gate_up = torch.cat([tensors[f"{shared}gate_proj.weight"], tensors[f"{shared}up_proj.weight"]])
    for ours, theirs in (
        (delta.in_proj.weight.values, in_proj),
        (delta.conv, tensors[first + "conv1d.weight"][:, 0]),
        (delta.a_log, tensors[first + "A_log"]),
        (delta.value_norm, tensors[first + "norm.weight"]),
        (mlp.experts.gate_up_proj, torch.cat([tensors[experts + "gate_up_proj"], gate_up[None]])),
        (mlp.experts.down_proj[:-1], tensors[experts + "down_proj"]),
        (mlp.experts.down_proj[-1], tensors[shared + "down_proj.weight"]),
        (mlp.router[-1:], tensors[last + "mlp.shared_expert_gate.weight"]),
        (attention.o_proj.weight.values, tensors[last + "self_attn.o_proj.weight"]),
        (model.norm.weight, 1 + tensors["model.language_model.norm.weight"].float()),
    ):
        assert torch.equal(ours, theirs.float())


def test_queries_gates_and_keys_have_the_order_of_the_kernels(tmp_path: Path) -> None:
    tensors = small_tensors()
    attention = load(tmp_path, tensors).blocks[3].attention
    assert isinstance(attention, Attention)
    order = half_split_order(16, 4)
    published = tensors["model.language_model.layers.3.self_attn.q_proj.weight"].float().view(2, 2, 16, 32)
    gates, queries, keys, _ = attention.qkv_proj.weight.values.split([32, 32, 16, 16])
    assert torch.equal(gates.view(2, 16, 32), published[:, 1])
    assert torch.equal(queries.view(2, 16, 32), published[:, 0, order])
    assert torch.equal(keys, tensors["model.language_model.layers.3.self_attn.k_proj.weight"].float()[order])
    assert attention.k_norm is not None
    norm = tensors["model.language_model.layers.3.self_attn.k_norm.weight"].float()
    assert torch.equal(attention.k_norm.weight, 1 + norm[order])


def test_scales_decays_and_time_steps_stay_float32_in_a_16_bit_model(tmp_path: Path) -> None:
    model = load(tmp_path, small_tensors(), torch.bfloat16)
    wide = {name.rpartition(".blocks.")[2] for name, held in model.named_parameters() if held.dtype == torch.float32}
    kinds = {name.split(".", 2)[-1] for name in wide}
    assert kinds == {
        "weight",  # the last norm's
        "attention.a_log",
        "attention.dt_bias",
        "attention.norm.weight",
        "attention.q_norm.weight",
        "attention.k_norm.weight",
        "mlp.norm.weight",
    }
    assert torch.get_default_dtype() == torch.float32


def test_vision_and_mtp_tensors_are_ignored(tmp_path: Path) -> None:
    others = {
        "mtp.fc.weight": torch.zeros(4, 8),
        "mtp.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(4, 4),
        "model.visual.blocks.0.attn.qkv.bias": torch.zeros(4),
    }
    load(tmp_path, small_tensors() | others)


@pytest.mark.parametrize("name", ["model.language_model.layers.0.linear_attn.extra", "model.layers.0.mlp.gate.weight"])
def test_other_tensors_are_unexpected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="1 unexpected tensors"):
        load(tmp_path, small_tensors() | {name: torch.zeros(1)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, r"text_config\.attention_bias to true"),
        ({"attn_output_gate": False}, "attn_output_gate to false"),
        ({"linear_num_value_heads": None}, r"lacks text_config\.linear_num_value_heads"),
        ({"full_attention_interval": None}, r"lacks text_config\.full_attention_interval"),
        ({"full_attention_interval": 5}, "full_attention_interval must be from 1 to num_hidden_layers, 4; got 5"),
        ({"shared_expert_intermediate_size": None}, r"lacks text_config\.shared_expert_intermediate_size"),
        ({"layer_types": ["linear_attention"] * 4}, "full_attention for one at least"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, r'got \["sliding_attention", "full'),
        ({"linear_num_key_heads": 4}, "linear_num_value_heads must be a multiple of linear_num_key_heads, 4; got 2"),
        (
            {"shared_expert_intermediate_size": 48},
            "shared_expert_intermediate_size must be 0 or moe_intermediate_size, 24; got 48",
        ),
    ],
)
def test_unsupported_value_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)
