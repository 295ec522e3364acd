"""GGUF files that `meltcore quantize` writes: bytes of the published layout, and what has none refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_tools as tools
import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf_tools import config_of, finish, load_dequantized, write_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import BUNDLED_HYBRID, open_checkpoint
from meltcore.models.checkpoints.gguf.gguf_config import read_config
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.models.decoders.decoder_families import DECODER_CONFIGS
from meltcore.models.loader import build_model, load_weights
from meltcore.models.quantized.quantization import weight_dtypes
from meltcore.models.writers import gguf_writer
from meltcore.models.writers.gguf_writer import GGUF_FORMATS, write_gguf

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 64},
    "gemma3_text": {"tie_word_embeddings": True},
    "granite": {"tie_word_embeddings": True},
    "olmo2": {},
    "phi3": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None, "tie_word_embeddings": True},
}
NOT_READ_BY_TRANSFORMERS = ("granite", "mistral", "olmo2", "smollm3")
NOTICED = 1e-3  # a mutation's error


def save(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    reference = tools.make_reference(3, family, **(FAMILIES[family] | changes))
    reference.tie_weights()
    reference.save_pretrained(folder)
    return reference


def vocabulary(num_rows: int) -> dict[str, Any]:
    tokens = [f"t{index}" for index in range(num_rows)]
    values = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": [], "eos_token_id": 1}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def write(folder: Path, to: str = "q8_0", name: str = "written.gguf", **settings: Any) -> Path:
    checkpoint = open_checkpoint(str(folder), files="all")
    path = folder.parent / name
    settings = {"check_header": lambda written: None, "progress": lambda stage, fraction: None} | settings
    write_gguf(checkpoint, path, GGUF_FORMATS[to], vocabulary, **settings)
    return path


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    model = GGUFModel(path)
    return {
        name: (tensor.type.name, tensor.shape, model.file_by_tensor[name].blocks(name).tobytes())
        for name, tensor in model.tensors.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_file_is_that_of_the_independent_writer(tmp_path: Path, family: str) -> None:
    """Names, types, shapes and bytes of all tensors, and the configuration."""
    reference = save(tmp_path / "source", family)
    ours, theirs = write(tmp_path / "source"), write_model(tmp_path / "theirs.gguf", reference, "Q8_0")
    written, expected = contents(ours), contents(theirs)
    assert written.keys() == expected.keys()
    for name, content in expected.items():
        if name == "rope_freqs.weight":  # computed, so equal up to rounding
            np.testing.assert_allclose(*(np.frombuffer(each[name][2], "<f4") for each in (written, expected)))
        else:
            assert written[name] == content, name
    assert config_of(ours) == config_of(tmp_path / "source")
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("store", ["q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "phi3"])
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, family: str, store: str) -> None:
    reference = save(tmp_path / "source", family)
    file = write(tmp_path / "source", store)
    assert load_dequantized(reference, file) > (13 if family == "phi3" else 15)  # which merges some
    assert tools.error_against(reference, file, max_model_len=512) <= 1e-4
    head = "token_embd.weight" if family == "gemma3_text" else "output.weight"
    assert GGUFModel(file).tensors[head].type == GGMLQuantizationType.Q8_0


@pytest.mark.parametrize(
    ("family", "function", "value"),
    [("llama", "has_permuted_rows", False), ("gemma3_text", "includes_one", False), ("qwen3", "includes_one", True)],
)
def test_wrong_layout_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, function: str, value: bool
) -> None:
    reference = save(tmp_path / "source", family)
    load_dequantized(reference, write(tmp_path / "source"))
    monkeypatch.setattr(gguf_writer, function, lambda name, model_type: value)
    assert tools.error_against(reference, write(tmp_path / "source", name="wrong.gguf"), max_model_len=512) > NOTICED


@pytest.mark.parametrize(
    "name",
    [
        "HuggingFaceTB/SmolLM3-3B",
        "allenai/OLMo-2-0425-1B-Instruct",
        "ibm-granite/granite-3.3-2b-instruct",
        "microsoft/Phi-3-mini-4k-instruct",
        "microsoft/Phi-4-mini-instruct",
        "microsoft/phi-4",
    ],
)
def test_published_configuration_is_read_back(tmp_path: Path, name: str) -> None:
    """Factors in single precision, partial rotation, windows and multipliers. Only the vocabulary is smaller."""
    published = open_checkpoint(name, files="config").config | {"vocab_size": 300}
    architecture = published["architectures"][0]
    config, family = DECODER_CONFIGS[architecture](published), gguf_writer._ARCHITECTURE_NAMES[architecture]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", family)
    gguf_writer.add_metadata(writer, gguf_writer.config_metadata(name, config, family) | vocabulary(300))
    for tensor_name, values in gguf_writer.rope_factors(config).items():
        writer.add_tensor(tensor_name, values)
    shapes = {"token_embd.weight": (300, config.hidden_size)} | (
        {} if config.tie_word_embeddings else {"output.weight": (1, 1)}
    )
    shapes |= {f"blk.{layer}.ffn_norm.weight": (1, 1) for layer in range(config.num_hidden_layers)}
    for tensor_name, shape in shapes.items():
        writer.add_tensor(tensor_name, np.zeros(shape, dtype=np.float32))
    read = read_config(GGUFModel(finish(writer, tmp_path / "model.gguf")))
    assert DECODER_CONFIGS[architecture](read) == config


def test_narrow_experts_of_a_layer_stay_as_they_are_together(tmp_path: Path) -> None:
    """down_proj has 48 columns, which are no whole blocks; gate_proj and up_proj have 64."""
    reference = save(tmp_path / "source", "qwen3_moe", moe_intermediate_size=48)
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16()
    reference.save_pretrained(tmp_path / "source")
    file = write(tmp_path / "source")
    stored = {name.split(".")[2]: tensor.type.name for name, tensor in GGUFModel(file).tensors.items() if "blk" in name}
    assert {stored[f"ffn_{name}_exps"] for name in ("gate", "up", "down")} == {"BF16"}
    assert (stored["attn_q"], stored["ffn_gate_inp"], stored["attn_norm"]) == ("Q8_0", "F32", "F32")
    for weight in reference.parameters():
        weight.data = weight.data.float()
    load_dequantized(reference, file)
    assert tools.error_against(reference, file, max_model_len=512) <= 1e-4


def test_stacked_experts_and_a_nested_text_model_are_read(tmp_path: Path) -> None:
    """The layouts of transformers 5 and of multimodal checkpoints give the file of the usual ones."""
    save(tmp_path / "source", "qwen3_moe")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    expected = contents(write(tmp_path / "source"))
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            matrix: torch.stack([tensors.pop(f"{prefix}{expert}.{matrix}_proj.weight") for expert in range(8)])
            for matrix in ("gate", "up", "down")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{prefix}down_proj"] = parts["down"]
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    assert contents(write(tmp_path / "source", name="stacked.gguf")) == expected

    for family, architecture in (
        ("gemma3_text", "Gemma3ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
    ):
        save(tmp_path / family, family)
        expected = contents(write(tmp_path / family, name=f"{family} text.gguf"))
        config = json.loads((tmp_path / family / "config.json").read_text())
        nested = {"architectures": [architecture], "text_config": config}
        (tmp_path / family / "config.json").write_text(json.dumps(nested))
        tensors = load_file(tmp_path / family / "model.safetensors")
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        tensors["vision_tower.patch.weight"] = torch.zeros(4, 4)
        save_file(tensors, tmp_path / family / "model.safetensors")
        assert contents(write(tmp_path / family, name=f"{family}.gguf")) == expected


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"rope_parameters": YARN}),
        ("qwen3", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
        ("gemma3_text", {"num_hidden_layers": 36, "layer_types": None, "rope_parameters": None}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_configuration_is_stated(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    save(tmp_path / "source", family, **small, **changes)
    assert config_of(write(tmp_path / "source")) == config_of(tmp_path / "source")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "rope_scaling is Yarn.*cannot state it"),
        ("qwen3", {"rope_parameters": YARN | {"truncate": False}}, "rope_scaling is Yarn.*cannot state it"),
        (
            "smollm3",
            {"no_rope_layers": [1, 0, 1, 1]},
            r"nope_layers is frozenset\(\{1\}\); a GGUF file cannot state it",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [1]},
            r"layers \[1\] have no experts; in a GGUF file of qwen3moe all layers have",
        ),
    ],
)
def test_what_gguf_cannot_express_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    save(tmp_path / "source", family, **changes)
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "source")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_llama3_scaling_with_other_bounds_is_refused_by_the_name_of_the_output(tmp_path: Path) -> None:
    rope = tools.FAMILIES["llama"]["rope_parameters"] | {"high_freq_factor": 9.0}  # type: ignore[operator]
    save(tmp_path / "source", "llama", rope_parameters=rope, hidden_size=256, num_attention_heads=2, head_dim=128)
    with pytest.raises(ConfigError, match=r"source cannot be written as GGUF: .*written\.gguf: rope_freqs\.weight"):
        write(tmp_path / "source")


def test_other_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    hybrid = open_checkpoint(BUNDLED_HYBRID, files="all")
    with pytest.raises(ConfigError, match=r"Qwen3_5MoeForCond.*, which is not written as GGUF; these are: .*--to fp8"):
        write_gguf(hybrid, tmp_path / "m.gguf", GGUF_FORMATS["q8_0"], vocabulary, lambda _: None, lambda *_: None)
    save(tmp_path / "source", "qwen3")
    file = write(tmp_path / "source")
    with pytest.raises(
        ConfigError, match=r"written\.gguf is a GGUF file; a folder with safetensors files is read here"
    ):
        write_gguf(
            open_checkpoint(str(file), files="all"),
            tmp_path / "m.gguf",
            GGUF_FORMATS["q8_0"],
            vocabulary,
            lambda _: None,
            lambda *_: None,
        )
    with pytest.raises(ConfigError, match=r"written\.gguf exists already; --overwrite replaces it"):
        write(tmp_path / "source")
    before = file.read_bytes()
    write(tmp_path / "source", "q4_0", overwrite=True)
    assert len(file.read_bytes()) < len(before)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ConfigError, match=r"source is quantized already: config\.json has a quantization_config"):
        write(tmp_path / "source", name="other.gguf")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "q_proj.weight has values that are not finite"),
        (float("inf"), "q_proj.weight has values that are not finite"),
        (1e9, r"magnitude 1e\+09; Q8_0 holds up to 8\.3"),
    ],
)
def test_values_that_blocks_cannot_hold_are_refused(tmp_path: Path, value: float, message: str) -> None:
    save(tmp_path / "source", "qwen3")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][5, 7] = value
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "source")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "source", "qwen3_moe")
    whole = contents(write(tmp_path / "source"))
    monkeypatch.setattr("meltcore.models.writers.source_tensors._PART_VALUES", 1000)
    assert contents(write(tmp_path / "source", name="parts.gguf")) == whole


def test_full_disk_and_interruption_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "source", "qwen3")

    def interrupt(stage: str, fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "source", progress=interrupt)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(
        ConfigError, match=r"written\.gguf takes [\d.]*[1-9][\d.]* [MK]iB; the disk of .* has 1000 B free"
    ):
        write(tmp_path / "source")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_served_weights_are_quantized(tmp_path: Path) -> None:
    save(tmp_path / "source", "qwen3")
    checkpoint = open_checkpoint(str(write(tmp_path / "source", "q4_0")), files="all")
    model = build_model(checkpoint, torch.float32, CPU)
    load_weights(model, checkpoint, lambda stage, fraction: None)
    assert weight_dtypes(model) == ["float32", "q4_0", "q8_0"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_READ_BY_TRANSFORMERS])
def test_transformers_reads_the_dequantized_weights(tmp_path: Path, family: str) -> None:
    """By its own names and permutations, which are independent of this reader's."""
    reference = save(tmp_path / "source", family)
    file = write(tmp_path / "source")
    load_dequantized(reference, file)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=reference)["tensors"]
    expected = reference.state_dict()
    if reference.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(read[name], tensor, rtol=1e-6, atol=1e-6)
