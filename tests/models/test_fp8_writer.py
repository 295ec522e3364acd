"""FP8 folders that `meltcore quantize` writes: the published layout and formula, shards, and what is copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from mtp_tools import EXPERTS, build
from safetensors.torch import load_file, save_file

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import BUNDLED_HYBRID, BUNDLED_MODEL, open_checkpoint
from meltcore.models.configs.quantization_config import CompressedFp8Config, read_quantization_config
from meltcore.models.loader import build_model, load_weights
from meltcore.models.writers import fp8_writer
from meltcore.models.writers.fp8_writer import write_fp8

FP8, LARGEST = torch.float8_e4m3fn, 448.0
PARTS = ("gate", "up", "down")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR += ("in_proj_qkv", "in_proj_z", "out_proj")


def save(folder: Path, family: str, **changes: Any) -> Path:
    reference = tools.make_reference(3, family, **changes)
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16()
    reference.save_pretrained(folder)
    return folder


def write(source: Path | str, path: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Quantize a checkpoint and return the tensors of the new folder."""
    settings = {"progress": lambda stage, fraction: None} | settings
    write_fp8(open_checkpoint(str(source), files="all"), path, **settings)
    return stored(path)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def single_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give stacked experts the names that they have one by one."""
    single: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for expert, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                single |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
        elif part == "down_proj":
            single |= {f"{prefix}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            single[name] = tensor
    return single


def check_formula(source: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> None:
    """Every matrix of a linear layer by the published formula, all others unchanged."""
    expected_names = set(source)
    for name, tensor in source.items():
        if name.split(".")[-2] not in LINEAR or tensor.dim() != 2:
            assert torch.equal(written[name], tensor), name
            assert written[name].dtype == tensor.dtype
            continue
        expected_names.add(f"{name}_scale")
        values, scales = written[name], written[f"{name}_scale"]
        assert (values.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (len(tensor), 1))
        torch.testing.assert_close(scales, tensor.float().abs().amax(1, keepdim=True) / LARGEST)
        rounded = (tensor.float() / scales).to(FP8).float()
        assert float((values.float() != rounded).float().mean()) < 0.01  # a product by the inverse rounds once more
        torch.testing.assert_close(
            values.float() * scales, tensor.float(), rtol=2**-4, atol=float(scales.max()) * 2**-9
        )
    assert set(written) == expected_names


def quantization_of(folder: Path) -> CompressedFp8Config:
    config = read_quantization_config(json.loads((folder / "config.json").read_text()))
    assert isinstance(config, CompressedFp8Config)
    return config


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {}),
        ("qwen3_5_moe_text", {}),
        ("gemma3_text", {"tie_word_embeddings": True}),
    ],
)
def test_folder_has_the_published_layout(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Of every family; a layer of the routed one is dense."""
    source = save(tmp_path / "source", family, **changes)
    written = write(source, tmp_path / "fp8")
    check_formula(single_experts(stored(source)), written)
    config = quantization_of(tmp_path / "fp8")
    assert config.groups[0].strategy == "channel"
    modules = {name.removesuffix(".weight"): tensor.dtype for name, tensor in written.items() if tensor.dim() == 2}
    modules = {name: dtype for name, dtype in modules.items() if not name.endswith(("embed_tokens", "_scale"))}
    assert {name for name in modules if config.quantizes(name)} == {
        name for name, dtype in modules.items() if dtype == FP8
    }
    assert not config.quantizes("lm_head")
    assert "quantization_config" not in json.loads((source / "config.json").read_text())


def test_bundled_models_keep_their_text(tmp_path: Path) -> None:
    for model in (BUNDLED_MODEL, BUNDLED_HYBRID):
        source = open_checkpoint(model, files="all").folder
        written = write(model, tmp_path / source.name)
        check_formula(single_experts(stored(source)), written)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (tmp_path / source.name / name).read_bytes() == (source / name).read_bytes()
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / source.name).iterdir()} == {0o644}


def test_large_checkpoints_become_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "source", "qwen3")
    whole = write(source, tmp_path / "whole")
    monkeypatch.setattr(fp8_writer, "_SHARD_BYTES", 40_000)
    written = write(source, tmp_path / "fp8")
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name].view(torch.uint8), whole[name].view(torch.uint8)) for name in whole)
    files = open_checkpoint(str(tmp_path / "fp8"), files="text").weight_files
    assert [file.name for file in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, 8)]
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(written)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "fp8" / file)


def test_tensors_that_are_not_of_the_text_model_are_copied(tmp_path: Path) -> None:
    """In the older layout of Gemma 3, whose names stay."""
    save(tmp_path / "gemma", "gemma3_text", tie_word_embeddings=True)
    config = json.loads((tmp_path / "gemma" / "config.json").read_text())
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(nested))
    tensors = {f"language_model.{name}": tensor for name, tensor in stored(tmp_path / "gemma").items()}
    tensors["vision_tower.blocks.0.fc.weight"] = torch.randn(4, 4)
    tensors["vision_tower.position_ids"] = torch.arange(4)
    save_file(tensors, tmp_path / "gemma" / "model.safetensors")
    written = write(tmp_path / "gemma", tmp_path / "fp8")
    assert torch.equal(written["vision_tower.blocks.0.fc.weight"], tensors["vision_tower.blocks.0.fc.weight"])
    assert torch.equal(written.pop("vision_tower.position_ids"), tensors.pop("vision_tower.position_ids"))
    check_formula(tensors, written)
    assert "vision_tower.blocks.0.fc" in quantization_of(tmp_path / "fp8").ignore


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj", "layers.0.input_layernorm", "embed_tokens"])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: float) -> None:
    """Also of tensors that keep their type."""
    source = save(tmp_path / "source", "qwen3")
    tensors = stored(source)
    tensors[f"model.{name}.weight"].view(-1)[5] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"source.*{name}\.weight has values that are not finite"):
        write(source, tmp_path / "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("is_stacked", [True, False])
def test_layer_for_multi_token_prediction_is_copied(tmp_path: Path, is_stacked: bool) -> None:
    """A folder that is written can draft, whether the experts of the layer were stacked or had a tensor each."""
    source, target = tmp_path / "source", tmp_path / "fp8"
    source.mkdir()
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_value_head_dim": 16}
    table = build(source, **sizes).checkpoint_tensors()
    tensors = {name: torch.randn(each.shape).bfloat16() for name, each in table.items()}
    prefix = "mtp.layers.0.mlp.experts"
    if is_stacked:
        single = {
            part: [tensors.pop(f"{prefix}.{index}.{part}_proj.weight") for index in range(EXPERTS)] for part in PARTS
        }
        gate_up = [torch.cat(pair) for pair in zip(single["gate"], single["up"], strict=True)]
        tensors |= {f"{prefix}.gate_up_proj": torch.stack(gate_up), f"{prefix}.down_proj": torch.stack(single["down"])}
    save_file(tensors, source / "model.safetensors")
    written = write(source, target)
    assert all(torch.equal(written[name], each) for name, each in tensors.items() if name.startswith("mtp."))
    checkpoint = open_checkpoint(str(target), files="all")
    model = build_model(checkpoint, torch.float32, torch.device("cpu"), has_mtp=True)
    load_weights(model, checkpoint, lambda stage, fraction: None)
    assert "mtp.layers.0.self_attn.q_proj.weight_scale" not in model.checkpoint_tensors()
    assert quantization_of(target).quantizes("model.layers.1.self_attn.q_proj")


def test_sizes_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "qwen3", intermediate_size=40)
    with pytest.raises(ConfigError, match=r"sizes that are multiples of 16; .*mlp.* has"):
        write(source, tmp_path / "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_refusals_leave_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "source", "qwen3")
    write(source, tmp_path / "fp8")
    with pytest.raises(ConfigError, match=r"fp8 is quantized already: config\.json has a quantization_config"):
        write(tmp_path / "fp8", tmp_path / "again")
    with pytest.raises(ConfigError, match="fp8 exists already; --overwrite replaces it"):
        write(source, tmp_path / "fp8")
    with pytest.raises(ConfigError, match="source is the source, so it is not replaced"):
        write(source, source, overwrite=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note").write_text("mine")
    with pytest.raises(ConfigError, match="notes is no checkpoint folder, so it is not replaced"):
        write(source, tmp_path / "notes", overwrite=True)
    before = (tmp_path / "fp8" / "model.safetensors").read_bytes()

    def interrupt(stage: str, fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(source, tmp_path / "fp8", overwrite=True, progress=interrupt)
    assert (tmp_path / "fp8" / "model.safetensors").read_bytes() == before
    (tmp_path / "fp8" / "extra").write_text("")
    write(source, tmp_path / "fp8", overwrite=True)
    assert not (tmp_path / "fp8" / "extra").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigError, match=r"new takes [\d.]*[1-9][\d.]* [MK]iB; the disk of .* has 1000 B free"):
        write(source, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "fp8", "notes"}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_moe_text"])
def test_served_weights_are_those_of_quantization_at_load(tmp_path: Path, family: str) -> None:
    """Values and scales of a folder equal those of the source with --quantization fp8, bit by bit."""
    source = save(tmp_path / "source", family, **({"mlp_only_layers": []} if family == "qwen3_moe" else {}))
    write(source, tmp_path / "fp8")
    models = []
    for folder, quantization in ((source, "fp8"), (tmp_path / "fp8", "none")):
        checkpoint = open_checkpoint(str(folder), files="all")
        models.append(build_model(checkpoint, torch.bfloat16, torch.device("cpu"), quantization))
        load_weights(models[-1], checkpoint, lambda stage, fraction: None)
    at_load, stored_weights = (dict(model.named_parameters()) for model in models)
    assert at_load.keys() == stored_weights.keys()
    assert sum(weight.dtype == FP8 for weight in at_load.values()) >= 6
    for name, weight in at_load.items():
        assert torch.equal(weight.view(torch.uint8), stored_weights[name].view(torch.uint8)), name
