"""Loading checkpoints: errors name what is wrong, dummy weights need no files."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_config import SMALL

from meltcore.common.errors import ConfigError
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.host import device
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models import loader
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.checkpoints.safetensors_file import SafetensorsFile
from meltcore.models.loader import build_model, load_weights
from meltcore.settings.config import EngineConfig

CONFIG = SMALL | {
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

HYBRID = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def write_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    model = build_model(open_checkpoint(str(tmp_path), files="text"), torch.float32, torch.device("cpu"))
    tensors = {name: torch.randn(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def load(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), files="all")
    model = build_model(checkpoint, torch.float32, torch.device("cpu"))
    load_weights(model, checkpoint, lambda stage, fraction: None)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.checkpoint_tensors()[name], tensor), name


def change(folder: Path, edit: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors")


def test_every_tensor_is_loaded(folder: Path) -> None:
    load(folder)


def test_progress_is_reported_per_file(folder: Path) -> None:
    tensors = list(load_file(folder / "model.safetensors").items())
    for shard in range(3):
        save_file(dict(tensors[shard::3]), folder / f"model-{shard}.safetensors")
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(folder), files="all")
    reported: list[tuple[str, float]] = []
    load_weights(
        build_model(checkpoint, torch.float32, torch.device("cpu")), checkpoint, lambda *of: reported.append(of)
    )
    assert reported == [("loading weights", pytest.approx(share)) for share in (1 / 3, 2 / 3, 1)]


def test_unconverted_tensors_are_read_in_place_on_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        raise AssertionError("copied")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", refused)
        load(folder)
        change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}))
        with pytest.raises(AssertionError, match="copied"):
            load(folder)
    load(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"1 missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def without_prefix(folder: Path) -> list[str]:
    """Save the tensors under the names that transformers gives a model without a head, in two files of an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    for name, tensor in tensors.items():
        shards["norm" in name][name.removeprefix("model.")] = tensor
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"{index}.safetensors")
    places = {name: f"{index}.safetensors" for index, shard in enumerate(shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return list(places)


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"] * 2, "sliding_window": 64}
BASE_MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "phi": {"architectures": ["Phi3ForCausalLM"], "head_dim": None, "num_key_value_heads": 2},
    "gemma": GEMMA,
    "gemma with vision": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": CONFIG | GEMMA | {"model_type": "gemma3_text"},
    },
    "hybrid": HYBRID,
}


@pytest.mark.parametrize("name", BASE_MODELS)
def test_tied_model_may_be_saved_without_its_head(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, **BASE_MODELS[name], tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(tmp_path), files="text")
    model = build_model(checkpoint, torch.float32, torch.device("cpu"))
    tensors = {name: torch.randn(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert not any(stored.startswith("model.") for stored in without_prefix(tmp_path))
    load_weights(model, checkpoint, lambda stage, fraction: None)
    loaded = {each: target for each, target in model.checkpoint_tensors().items() if isinstance(target, torch.Tensor)}
    assert "mlp" in " ".join(loaded)
    for each, target in loaded.items():
        assert torch.equal(target, tensors[each]), each


def test_model_without_head_is_refused_by_the_names_of_its_files(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    without_prefix(folder)
    with pytest.raises(ConfigError, match=r": 1 missing tensors: lm_head\.weight$"):
        load(folder)
    tensors = load_file(folder / "0.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "0.safetensors")  # of some names that have the prefix, none is completed
    with pytest.raises(ConfigError, match=r"24 missing .* 23 unexpected tensors: embed_tokens\.weight, layers\.0\."):
        load(folder)


def test_unexpected_tensor_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.2.extra.bias": torch.zeros(3)}))
    with pytest.raises(ConfigError, match=r"1 unexpected tensors: model\.layers\.2\.extra\.bias"):
        load(folder)


def test_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[31\].*asks for \[32\]"):
        load(folder)


def test_broken_file_of_a_checkpoint_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load(folder)


def rename_weights(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def test_missing_file_of_an_index_is_named(folder: Path) -> None:
    rename_weights(folder, "model-00001-of-00002.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"missing: model-00002-of-00002\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, r"index\.json lacks weight_map"),
        ([], r"index\.json must hold a JSON object; it begins with \[\]"),
        ({"weight_map": ["a"]}, r'weight_map must be an object that names a file for each tensor; got \["a"\]'),
        ({"weight_map": {"a": None}}, r'got {"a": null}'),
        ({"weight_map": {"a": ["model.safetensors"]}}, "weight_map must be"),
        ({"weight_map": {}}, "weight_map must be .*; got {}"),
    ],
)
def test_index_without_files_is_refused(folder: Path, index: object, message: str) -> None:
    rename_weights(folder, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("indexed", [False, True])
def test_tensor_in_two_files_is_named_with_both(folder: Path, indexed: bool) -> None:
    rename_weights(folder, "part.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "zz-old.safetensors")
    if indexed:
        files = {"model.norm.weight": "part.safetensors", "lm_head.weight": "zz-old.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    message = r"model\.norm\.weight of zz-old\.safetensors is in part\.safetensors too$"
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_a_narrow_type_are_named_with_it(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ConfigError, match=r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight is stored as"):
        load(folder)


def test_unknown_type_of_an_ignored_tensor_is_accepted(folder: Path) -> None:
    write_config(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(300, 32, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    assert content.count(b'"U8"') == 1
    (folder / "model.safetensors").write_bytes(content.replace(b'"U8"', b'"Q7"'))
    checkpoint = open_checkpoint(str(folder), files="all")
    load_weights(build_model(checkpoint, torch.float32, torch.device("cpu")), checkpoint, lambda *_: None)


@pytest.mark.parametrize("row", [0, 299])
def test_tied_head_with_values_of_its_own_is_refused(folder: Path, row: int) -> None:
    write_config(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder), files="all")
    load_weights(build_model(checkpoint, torch.float32, torch.device("cpu")), checkpoint, lambda *_: None)
    head[row] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but"):
        load_weights(build_model(checkpoint, torch.float32, torch.device("cpu")), checkpoint, lambda *_: None)


def refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsFile, "read", read)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"model.extra.weight": torch.zeros(3)}, "1 unexpected tensors"),
        ({}, "1 missing tensors"),
        ({"lm_head.weight": torch.zeros(3)}, "has shape"),
        ({"lm_head.weight": torch.zeros(300, 32, dtype=torch.int8)}, "is stored as I8"),
        (None, "cannot be read"),
    ],
)
def test_all_files_are_checked_before_any_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, last: dict[str, torch.Tensor] | None, message: str
) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    rename_weights(folder, "part.safetensors")
    if last is None:
        (folder / "zz-last.safetensors").write_bytes(b"cut off")
    else:
        save_file(last, folder / "zz-last.safetensors")
    refuse_to_read(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "--max-model-len must be from 2 to the model's 256; got 257"),
        ({"max_model_len": 1}, "--max-model-len must be from 2 to the model's 256; got 1$"),
        ({"memory_bytes": 1000}, r"Raise --memory\."),
        ({"memory_bytes": None}, r"Raise --memory\."),
    ],
)
def test_settings_that_cannot_work_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict, message: str
) -> None:
    refuse_to_read(monkeypatch)
    monkeypatch.setattr(device, "host_available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=message):
        GenerationEngine(EngineConfig(**({"model": str(folder), "device": "cpu", "memory_bytes": 2**26} | settings)))


def test_too_many_sequences_for_the_memory_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, **HYBRID)
    model = build_model(open_checkpoint(str(tmp_path), files="text"), torch.float32, torch.device("cpu"))
    tensors = {name: torch.randn(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    refuse_to_read(monkeypatch)
    with pytest.raises(ConfigError, match=r"Set --max-num-seqs \d+ or less"):
        GenerationEngine(EngineConfig(model=str(tmp_path), device="cpu", memory_bytes=2**24, max_num_seqs=10**6))


def test_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ConfigError, match="no \\*\\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Gemma2ForCausalLM"]},
            "names Gemma2ForCausalLM; we have .*, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_unsupported_configuration_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        build_model(open_checkpoint(str(tmp_path), files="text"), torch.float32, torch.device("cpu"))


def test_rope_parameters_form_is_read(tmp_path: Path) -> None:
    write_config(tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    model = build_model(open_checkpoint(str(tmp_path), files="text"), torch.float32, torch.device("cpu"))
    assert model.config.rope_theta == 5e5


@pytest.mark.parametrize("text", ["", "{", "\xff", "[" * 200_000, '{"hidden_size": ' + "1" * 5000 + "}"])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        open_checkpoint(str(tmp_path), files="text")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[]", '["a", 1]', "null", '"text"', "7"])
def test_json_file_without_an_object_is_named(tmp_path: Path, file: str, content: str) -> None:
    write_config(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=f"{file} must hold a JSON object; it begins with ".replace(".", r"\.")):
        open_checkpoint(str(tmp_path), files="text")


def test_missing_folder_and_folder_without_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path), files="text")
    with pytest.raises(ConfigError, match="no such folder"):
        open_checkpoint(str(tmp_path / "nothing"), files="text")


def test_hub_download_asks_for_needed_files_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda _: ["config.json", "model.safetensors"])
    assert open_checkpoint("owner/model", files="text").folder == folder
    assert open_checkpoint("owner/model", files="all").config["hidden_size"] == 32
    (name, text), (_, everything) = asked
    assert name == "owner/model"
    assert text == ["config.json"]
    assert everything == ["config.json", "model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "numbers", "tensors"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920, 310),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 338),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624, 18_867),
        ("google/gemma-3-1b-it", 999_885_952, 340),
        ("google/gemma-3-4b-it", 3_880_263_168, 444),
        ("google/gemma-3-27b-it", 27_009_346_304, 808),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 291),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, 146),
        ("mistralai/Mistral-7B-Instruct-v0.1", 7_241_732_096, 291),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, 291),
        ("mistralai/Mistral-Small-24B-Instruct-2501", 23_572_403_200, 363),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 23_572_403_200, 363),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, 272),
        ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624, 326),
        # A merged tensor of the files counts as those that it merges.
        ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, 291),
        ("microsoft/Phi-4-mini-instruct", 3_836_021_760, 290),
        ("microsoft/phi-4", 14_659_507_200, 363),
        ("allenai/OLMo-2-0425-1B-Instruct", 1_484_916_736, 179),
        ("ibm-granite/granite-3.3-2b-instruct", 2_533_539_840, 362),
    ],
)
def test_dummy_weights_need_no_download_of_a_bundled_configuration(
    monkeypatch: pytest.MonkeyPatch, name: str, numbers: int, tensors: int
) -> None:
    """Shapes and parameter counts, as the publishers state them, a tied head counted once."""
    for function in ("snapshot_download", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, function, lambda *_, **__: pytest.fail("no download is needed"))
    model = build_model(open_checkpoint(name, files="config"), torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers
    assert len(model.checkpoint_tensors()) == tensors


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repository: str, **_: object) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    with pytest.raises(
        ConfigError, match=r"owner/model: not a local folder, and its download from the hub failed: no network$"
    ):
        open_checkpoint("owner/model", files="all")


def test_dummy_weights_from_a_config_alone_repeat_with_the_seed(tmp_path: Path) -> None:
    write_config(tmp_path, dtype="float32")
    settings = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "memory_bytes": 2**26}
    first, again, other = (GenerationEngine(EngineConfig(**settings, seed=seed)) for seed in (1, 1, 2))
    weights = [engine.runner.model.lm_head.weight.values for engine in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.ready().weights == "dummy"


def test_dummy_biases_are_zero(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["Qwen2ForCausalLM"], dtype="float32")
    engine = GenerationEngine(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", memory_bytes=2**26))
    tensors = engine.runner.model.checkpoint_tensors()
    biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
    assert len(biases) == 6
    assert not any(bias.any() for bias in biases)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "needed"), [(1, "129.12"), (2, "129.20")])
def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(
    monkeypatch: pytest.MonkeyPatch, ranks: int, needed: str
) -> None:
    """Ranks on a CPU hold together what one does, and norms and routers each."""
    monkeypatch.setattr(loader, "host_available_bytes", lambda: 100 * 2**30)
    checkpoint = open_checkpoint("Qwen/Qwen3.5-35B-A3B", files="config")
    group = TensorParallelGroup(0, ranks) if ranks > 1 else None
    with pytest.raises(ConfigError, match=rf"take {needed} GiB, and 100 GiB of host memory are available"):
        build_model(checkpoint, torch.float32, torch.device("cpu"), group=group)
    assert build_model(checkpoint, torch.float32, torch.device("meta"), group=group).device.type == "meta"


def test_too_little_memory_is_refused_with_the_largest_context_that_fits(tmp_path: Path) -> None:
    write_config(tmp_path, dtype="float32")
    page_bytes = 2 * 2 * 64 * 16 * 4
    settings = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu"}
    with pytest.raises(ConfigError, match=r"Set --max-model-len (64|128|192) or less"):
        GenerationEngine(EngineConfig(**settings, memory_bytes=int((150_000 + 3 * page_bytes) / 0.92)))
    with pytest.raises(ConfigError, match=r"Raise --memory\."):
        GenerationEngine(EngineConfig(**settings, memory_bytes=1000))
    with pytest.raises(ConfigError, match="from 2 to the model's 256; got 257"):
        GenerationEngine(EngineConfig(**settings, max_model_len=257))
    with pytest.raises(ConfigError, match="--device quantum"):
        GenerationEngine(EngineConfig(model=str(tmp_path), load_format="dummy", device="quantum"))
