"""Quantized folders that are quantized again: they become what a folder of their exact values becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from fp8_tools import write_fp8 as write_published_fp8
from gguf_tools import config_of
from int4_tools import write_int4
from safetensors.torch import load_file, save_file
from test_fp8_writer import write as write_folder
from test_gguf_writer import contents
from test_gguf_writer import write as write_file

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.sizes import size_text

INT4: dict[str, Any] = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
INT4 |= {"mlp_only_layers": []}
ALLOWED: dict[str, Any] = {"allow_requantize": True}


def exact_values(folder: Path, reference: Any) -> Path:
    """Write the folder of a quantized one's values, in float32."""
    (folder.parent / "exact").mkdir()
    reference.save_pretrained(folder.parent / "exact" / folder.name)
    return folder.parent / "exact" / folder.name


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", "awq", {}),
        ("qwen2", "gptq", {"sym": True}),
        ("qwen3", "gptq_v2", {"desc_act": True, "group_size": 64}),
        ("qwen3_moe", "awq", {"group_size": 64}),
    ],
    ids=str,
)
@torch.no_grad()
def test_int4_folder_becomes_the_file_of_its_values(
    tmp_path: Path, family: str, layout: str, settings: dict[str, Any]
) -> None:
    """Also with biases of the model, and with inputs in activation order."""
    reference = tools.make_reference(3, family, **INT4)
    write_int4(tmp_path / "m", reference, layout, {"group_size": 32} | settings)
    file, exact = write_file(tmp_path / "m", **ALLOWED), exact_values(tmp_path / "m", reference)
    assert contents(file) == contents(write_file(exact))
    assert config_of(file) == config_of(exact)


def merge_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Stack the experts of each layer, as some published folders do."""
    for layer in {name.partition(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name}:
        prefix = f"{layer}.mlp.experts."
        count = 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in tensors if name.startswith(prefix))
        for end in ("weight", "weight_scale_inv"):
            gate, up, down = (
                [tensors.pop(f"{prefix}{expert}.{part}_proj.{end}") for expert in range(count)]
                for part in ("gate", "up", "down")
            )
            suffix = end.removeprefix("weight")
            tensors[f"{prefix}gate_up_proj{suffix}"] = torch.stack(
                [torch.cat(pair) for pair in zip(gate, up, strict=True)]
            )
            tensors[f"{prefix}down_proj{suffix}"] = torch.stack(down)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "strategy", "change"),
    [
        ("qwen3", "block", None),
        ("qwen3", "tensor", None),
        ("qwen3_moe", "channel", None),
        ("qwen3_moe", "block", merge_experts),
    ],
)
def test_fp8_folder_becomes_the_file_of_its_values(tmp_path: Path, family: str, strategy: str, change: Any) -> None:
    sizes = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    reference = write_published_fp8(tmp_path / "m", family, strategy, change, **sizes)
    file, exact = write_file(tmp_path / "m", "q4_0", **ALLOWED), exact_values(tmp_path / "m", reference)
    assert contents(file) == contents(write_file(exact, "q4_0"))


@pytest.mark.slow
@torch.no_grad()
def test_quantized_folders_become_the_fp8_folder_of_their_values(tmp_path: Path) -> None:
    """Embedding, norms and head keep their type."""
    for name in ("awq", "hybrid"):
        if name == "awq":
            reference = tools.make_reference(3, "qwen3_moe", **INT4)
            write_int4(tmp_path / name, reference, name, {"group_size": 32})
        else:
            reference = write_published_fp8(tmp_path / name, "qwen3_5_moe_text", "block")
        reference.save_pretrained(tmp_path / f"{name} exact")
        written = write_folder(tmp_path / name, tmp_path / f"{name} fp8", **ALLOWED)
        expected = write_folder(tmp_path / f"{name} exact", tmp_path / f"{name} exact fp8")
        assert written.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(written[key].float(), tensor.float()), key
        settings = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in (f"{name} fp8", name)]
        assert settings[0]["quantization_config"]["quant_method"] == "compressed-tensors"
        assert settings[0]["hidden_size"] == settings[1]["hidden_size"]


@torch.no_grad()
def test_command_needs_the_flag_and_tells_bytes_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = tools.make_reference(3, "qwen3", **INT4)
    write_int4(tmp_path / "m", reference, "gptq", {"group_size": 32})
    arguments = ["quantize", str(tmp_path / "m"), "--to", "fp8", "--out", str(tmp_path / "new")]
    assert main(arguments) == 2
    assert "is quantized already: config.json has a quantization_config" in (refused := capsys.readouterr().err)
    assert "--allow-requantize does it nevertheless" in refused
    assert main([*arguments, "--allow-requantize"]) == 0
    said, stored = capsys.readouterr().out, (tmp_path / "m" / "model.safetensors").stat().st_size
    made = sum(file.stat().st_size for file in (tmp_path / "new").iterdir())
    assert f"new: {size_text(made)}, from weights of {size_text(stored)}, whose values moved by " in said
    written, error, size = load_file(tmp_path / "new" / "model.safetensors"), 0.0, 0.0
    for name, weight in reference.named_parameters():
        if f"{name}_scale" in written:
            rounded = written[name].float() * written[f"{name}_scale"]
            error, size = error + float((rounded - weight).square().sum()), size + float(weight.square().sum())
    assert f"moved by {(error / size) ** 0.5:.2%} (RMS)" in said


@torch.no_grad()
@pytest.mark.parametrize(
    ("end", "value", "message"),
    [
        ("scales", torch.nan, r"down_proj\.scales has a scale that is not finite"),
        ("bias", 1.0, r"down_proj\.bias is not zero, and the model has no bias there"),
    ],
)
def test_bad_tensors_of_a_quantized_folder_are_refused_by_name(
    tmp_path: Path, end: str, value: float, message: str
) -> None:
    write_int4(tmp_path / "m", tools.make_reference(3, "llama", **INT4), "gptq", {"group_size": 32})
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    scales = tensors["model.layers.0.mlp.down_proj.scales"]
    changed = scales if end == "scales" else torch.zeros(scales.shape[1])
    tensors[f"model.layers.0.mlp.down_proj.{end}"] = torch.full_like(changed, value)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        write_file(tmp_path / "m", **ALLOWED)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
