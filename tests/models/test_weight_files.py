"""Which files of a folder or repository are a model's own weights, and which tensors of them have no meaning."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_config import SMALL

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.checkpoints.weight_files import has_weights
from meltcore.models.loader import build_model, load_weights

BESIDE = [
    "adapter_model.safetensors",
    "adapter.safetensors",
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "consolidated.00.safetensors",
    "optimizer.safetensors",
    "pytorch_lora_weights.safetensors",
    "my-lora.safetensors",
    "original/model.safetensors",
    "onnx/decoder.safetensors",
]
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)]
Write = Callable[[Path], list[str]]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    model = build_model(open_checkpoint(str(folder), files="text"), torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"tie_word_embeddings": False, "eos_token_id": 1}))
    return tmp_path


def load(folder: Path, model: str = "") -> list[str]:
    """Load the checkpoint and compare every tensor. Returns the files that were read."""
    checkpoint = open_checkpoint(model or str(folder), files="all")
    loaded = build_model(checkpoint, torch.float32, torch.device("cpu"))
    load_weights(loaded, checkpoint, lambda stage, fraction: None)
    for name, tensor in tensors_of(folder).items():
        assert torch.equal(loaded.checkpoint_tensors()[name], tensor), name
    return [path.name for path in checkpoint.weight_files]


def write_whole(folder: Path) -> list[str]:
    save_file(tensors_of(folder), folder / "model.safetensors")
    return ["model.safetensors"]


def write_shards(folder: Path) -> list[str]:
    tensors = list(tensors_of(folder).items())
    for at, name in enumerate(SHARDS):
        save_file(dict(tensors[at::3]), folder / name)
    return SHARDS


def write_indexed_shards(folder: Path) -> list[str]:
    write_shards(folder)
    weight_map = {tensor: name for name in SHARDS for tensor in load_file(folder / name)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return SHARDS


def write_other_name(folder: Path) -> list[str]:
    save_file(tensors_of(folder), folder / "weights.safetensors")
    return ["weights.safetensors"]


def write_beside(folder: Path) -> None:
    for name in BESIDE:
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({"base_model.lora_A.weight": torch.ones(4, 4)}, folder / name)


WRITERS: list[Write] = [write_whole, write_shards, write_indexed_shards, write_other_name]


@pytest.mark.parametrize("write", WRITERS)
def test_only_the_own_files_are_read(folder: Path, write: Write) -> None:
    own = write(folder)
    write_beside(folder)
    assert load(folder) == own


def test_whole_file_comes_before_an_index_and_its_shards(folder: Path) -> None:
    """As a folder looks after a smaller model was saved over a larger one."""
    write_indexed_shards(folder)
    write_whole(folder)
    (folder / SHARDS[1]).unlink()
    assert load(folder) == ["model.safetensors"]


@pytest.mark.parametrize("name", [name for name in BESIDE if "/" not in name])
def test_folder_with_nothing_but_files_beside_a_model_is_refused_by_name(folder: Path, name: str) -> None:
    save_file({"x.lora_A.weight": torch.ones(4, 4)}, folder / name)
    with pytest.raises(ConfigError, match=rf"holds no model\.safetensors; {name} are adapters or other layouts"):
        load(folder)
    assert not has_weights([name])


@pytest.mark.parametrize("name", ["weights.safetensors", "model.fp16.safetensors", "explorations.safetensors", INDEX])
def test_file_of_any_other_name_counts_as_weights(name: str) -> None:
    assert has_weights([*BESIDE, name])


def test_missing_shard_without_an_index_is_named(folder: Path) -> None:
    write_shards(folder)
    (folder / SHARDS[2]).unlink()
    with pytest.raises(ConfigError, match=rf"1 of 3 shards are missing: {SHARDS[2]}"):
        load(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/tmp/model.safetensors", "parts/../../x.safetensors"])
def test_index_that_names_a_file_outside_of_its_folder_is_refused(folder: Path, name: str) -> None:
    write_indexed_shards(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["x"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"weight_map names files outside of its folder: {name}"):
        load(folder)


# --- the hub


@pytest.fixture
def downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of what is downloaded from a repository that holds the files of `folder`."""
    found: set[str] = set()

    def names(_: str) -> list[str]:
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        found.update(name for name in names(repository) if any(fnmatch(name, each) for each in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", names)
    return found


@pytest.mark.parametrize("write", WRITERS)
def test_only_the_own_files_are_downloaded(folder: Path, downloaded: set[str], write: Write) -> None:
    own = write(folder)
    write_beside(folder)
    text = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    others = ["README.md", "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors.index.json"]
    for name in (*text[1:], *others, "original/params.json", "modeling.py", "m-Q8_0.gguf"):
        (folder / name).write_text("{}")
    assert load(folder, "owner/model") == own
    index = [INDEX] if write is write_indexed_shards else []
    assert downloaded == {*text, *own, *index}


def test_configuration_alone_needs_no_weights(folder: Path, downloaded: set[str]) -> None:
    write_indexed_shards(folder)
    open_checkpoint("owner/model", files="text")
    assert downloaded == {"config.json"}


# --- tensors that follow from the configuration


DERIVED = {
    "model.layers.0.self_attn.rotary_emb.sin_cached": (1, 1, 16, 8),
    "model.layers.1.self_attn.rotary_emb.inv_freq": (4,),
    "model.rotary_emb.inv_freq": (4,),
    "model.rotary_emb.original_inv_freq": (4,),
    "model.rotary_emb_local.inv_freq": (4,),
    "model.rotary_emb.sliding_attention_inv_freq": (4,),
    "model.layers.0.attention.rotary_pos_emb.inv_freq": (4,),
    "model.layers.0.self_attn.rotary_emb.cos_sin_cache": (16, 8),
    "model.layers.0.self_attn.rotary_emb._cos_cached": (1, 1, 16, 8),
    "model.layers.1.self_attn.rotary_emb.scale": (),
    "model.rotary_emb.max_seq_len_cached": (),
    "transformer.rotary_pos_emb.long_factor": (4,),
    "rope.freqs": (4,),
    "freqs_cis": (16, 8),
    "model.layers.0.self_attn.masked_bias": (),
    "model.layers.0.self_attn.bias": (1, 1, 16, 16),
    "model.layers.0.attn.bias": (1, 1, 16, 16),
    "model.causal_mask": (16, 16),
    "model.embeddings.position_ids": (1, 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_derived_tensors_are_skipped(folder: Path, dtype: torch.dtype) -> None:
    """A tensor that is not skipped is an error, which names it."""
    derived = {name: torch.ones(shape).to(dtype) for name, shape in DERIVED.items()}
    save_file(tensors_of(folder) | derived, folder / "model.safetensors")
    load(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.bias", (32,)),
        ("model.layers.0.self_attn.rotary_emb.weight", (32, 32)),
        ("model.rotary_emb.proj.weight", (32, 32)),
        ("model.layers.0.self_attn.rotary_emb_norm_scale", (4,)),
        ("model.layers.2.mlp.up_proj.weight", (32, 32)),
        ("model.frequencies", (4,)),
    ],
)
def test_tensor_with_a_meaning_is_not_skipped(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    save_file(tensors_of(folder) | {name: torch.ones(shape)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="1 unexpected tensors"):
        load(folder)
