"""Qwen3-0.6B as it is published: its tensor names, a copy of the tied head, shards, 16-bit types, the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.worker import loading
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.settings.config import EngineConfig

MODEL = "Qwen/Qwen3-0.6B"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def _keep_loaded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave weights as they are loaded; tests/models/test_published_configs.py has each family as a CPU serves it."""
    monkeypatch.setattr(loading, "host_weights", lambda *_: None)


def published_config() -> dict[str, Any]:
    return open_checkpoint(MODEL, files="config").config


def published_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the published file, listed independently of the model."""
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, wide),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_norm": (head,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def small_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape).to(dtype) for name, shape in published_shapes(published_config() | SMALL).items()
    }
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def write_config(folder: Path, stored: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published_config() | SMALL | {"torch_dtype": stored}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    return folder


def write_single(folder: Path, stored: str) -> Path:
    save_file(small_tensors(DTYPES[stored]), write_config(folder, stored) / "model.safetensors")
    return folder


def write_sharded(folder: Path, stored: str) -> Path:
    """Three shards that cut through layers, and an index, as large models have them."""
    tensors = small_tensors(DTYPES[stored])
    names = sorted(tensors)
    file_of = {name: f"model-{1 + 3 * index // len(names):05}-of-00003.safetensors" for index, name in enumerate(names)}
    write_config(folder, stored)
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def open_engine(model: str | Path, dtype: str = "float32") -> GenerationEngine:
    return GenerationEngine(
        EngineConfig(model=str(model), device="cpu", dtype=dtype, max_num_seqs=2, memory_bytes=2**27)
    )  # type: ignore[arg-type]


def assert_holds(engine: GenerationEngine, tensors: dict[str, torch.Tensor]) -> None:
    """Every published tensor is in the engine, in the engine's type; the head is the embedding itself."""
    model = engine.runner.model
    held = model.checkpoint_tensors()
    assert model.lm_head is model.embedding
    assert held.keys() == tensors.keys() - {"lm_head.weight"}
    for name, tensor in held.items():
        assert torch.equal(tensor, tensors[name].to(model.dtype)), name


def test_published_file_has_every_tensor() -> None:
    """311 tensors and 751,632,384 numbers, the copy of the head among them: what the hub says of the file."""
    shapes = published_shapes(published_config())
    assert len(shapes) == 311
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 751_632_384


@pytest.mark.parametrize("write", [write_single, write_sharded])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_is_loaded_in_any_type(tmp_path: Path, write: Any, stored: str, dtype: str) -> None:
    engine = open_engine(write(tmp_path, stored), dtype)
    assert engine.ready().dtype == dtype
    assert_holds(engine, small_tensors(DTYPES[stored]))


def test_end_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    assert open_checkpoint(str(write_config(tmp_path, "bfloat16")), files="config").eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_cached_hub_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """The hub's cache keeps contents under blobs/ and gives them names by links under snapshots/<commit>/."""
    cached = tmp_path / "models--Qwen--Qwen3-0.6B"
    snapshot = cached / "snapshots" / ("c1899de2" * 5)
    contents = write(tmp_path / "contents", "bfloat16")
    snapshot.mkdir(parents=True)
    (cached / "blobs").mkdir()
    for number, file in enumerate(sorted(contents.iterdir())):
        file.rename(cached / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for model in (MODEL, snapshot):
        engine = open_engine(model)
        assert engine.checkpoint.folder == snapshot
        assert_holds(engine, small_tensors(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_keep_their_stored_type_on_a_gpu(tmp_path: Path, stored: str) -> None:
    settings = {"device": "cuda", "max_num_seqs": 2, "memory_bytes": 2**30}
    engine = GenerationEngine(EngineConfig(model=str(write_single(tmp_path, stored)), **settings))  # type: ignore[arg-type]
    assert engine.ready().dtype == stored
    assert_holds(engine, {name: tensor.cuda() for name, tensor in small_tensors(DTYPES[stored]).items()})
