"""How a CPU holds weights: with the logits of the checkpoint's values, in the bytes that plans count."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch
from gguf_tools import load_dequantized, write_model
from safetensors.torch import load_file, save_file
from test_gguf import BLOCKS_OF_32, reference_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from meltcore.common.options import Size
from meltcore.common.sizes import size_text
from meltcore.engine.memory.memory_needs import engine_needs
from meltcore.kernels.gemm.half_weight import supports_half_weights
from meltcore.layers.ggml_weights import GgmlWeight
from meltcore.layers.half_weights import HalfWeight
from meltcore.layers.quantization import DenseWeight
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.models.quantized import host_weights
from meltcore.settings.fleet_spec import ModelSection

sys.path.append(str(Path(__file__).parents[1] / "layers"))
from int4_tools import write_int4

needs_half = pytest.mark.skipif(not supports_half_weights(), reason="this processor has no FBGEMM")


def kinds_of_weights(engine: tools.SeenEngine) -> set[type]:
    """Of linear layers and the head."""
    model = engine.engine.runner.model
    return {type(layer.weight) for layer in host_weights._layers(model)}


def in_float32(folder: Path) -> PreTrainedModel:
    """The model of a folder. `reference.float()` would keep rotary frequencies that `to` has rounded to 16 bits."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def without_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_weights, "supports_half_weights", lambda: False)


def with_half(_: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "store"),
    [
        *(("llama", store) for store in ("Q8_0", "Q4_1", "BF16", "F16", "F32")),
        *((family, store) for family in ("gemma3_text", "qwen2") for store in ("Q4_1", "BF16")),
    ],
)
@pytest.mark.parametrize(
    ("processor", "held"), [pytest.param(with_half, HalfWeight, marks=needs_half), (without_half, DenseWeight)]
)
def test_held_weights_have_the_logits_and_the_bytes_of_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processor: Callable[[pytest.MonkeyPatch], None],
    held: type,
    store: str,
    family: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The plan of a fleet file knows them to the byte. Plan and log say what the file takes and how."""
    processor(monkeypatch)
    reference = reference_of(family, **BLOCKS_OF_32)
    file = write_model(tmp_path / "model.gguf", reference, store)
    load_dequantized(reference, file)
    engine = tools.open_engine(file, max_model_len=512)
    assert tools.error_of(engine, reference) <= 1e-4
    assert kinds_of_weights(engine) == ({DenseWeight} if store == "F32" else {held})
    needs = engine_needs(ModelSection(checkpoint=str(file), device="cpu", max_model_len=512), on_cpu=True)
    planned, seen = needs.rows[0], next(row for row in engine.engine.memory if row.name == "weights")
    assert seen.size_bytes == planned.size_bytes == host_weights.weight_bytes(engine.engine.runner.model)
    assert ("held in" in seen.note) == (store != "F32" and not (held is DenseWeight and store in ("BF16", "F16")))
    if "held in" in seen.note:
        parts = " in two parts" if held is HalfWeight and store in ("Q8_0", "Q4_1") else ""
        stored = size_text(sum(tensor.num_bytes for tensor in GGUFModel(file).tensors.values()))
        form = "float16" if held is HalfWeight else "float32"
        assert seen.note == planned.note == f"{stored} of the file, held in {form}{parts} for the CPU"
        assert f"weights: {seen.note}, take {size_text(seen.size_bytes)}" in capfd.readouterr().err
    # What is planned is enough for it: nothing stays as it is loaded.
    exact = tools.open_engine(file, max_model_len=512, max_num_seqs=16, memory_bytes=needs.budget_bytes)
    assert kinds_of_weights(exact) == kinds_of_weights(engine)


@needs_half
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_published_folders_of_16_bits_are_held_in_them(tmp_path: Path, stored: torch.dtype) -> None:
    reference = reference_of("llama", **BLOCKS_OF_32).to(stored)
    reference.save_pretrained(tmp_path)
    engine = tools.open_engine(tmp_path, max_model_len=512)
    assert kinds_of_weights(engine) == {DenseWeight if stored == torch.float32 else HalfWeight}
    assert tools.error_of(engine, in_float32(tmp_path)) <= 1e-4
    needs = engine_needs(ModelSection(checkpoint=str(tmp_path), device="cpu", max_model_len=512), on_cpu=True)
    assert needs.rows[0].size_bytes == host_weights.weight_bytes(engine.engine.runner.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        pytest.param(with_half, torch.bfloat16, marks=needs_half),
        pytest.param(with_half, torch.float32, marks=needs_half),
        (without_half, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", "awq", {}),
        ("qwen3", "gptq", {"desc_act": True}),
        ("qwen3_moe", "awq", {}),
        ("gemma3_text", "gptq_v2", {"modules_to_not_convert": ["v_proj", "gate_proj"]}),
    ],
    ids=str,
)
def test_folders_in_4_bits_have_the_bytes_of_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processor: Callable[[pytest.MonkeyPatch], None],
    dtype: torch.dtype,
    family: str,
    layout: str,
    settings: dict[str, Any],
) -> None:
    """Also where a layer merges matrices of which one is not quantized, and beside tied embeddings."""
    processor(monkeypatch)
    kept = tuple(settings.get("modules_to_not_convert", ()))
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3}
    reference = tools.make_reference(3, family, **sizes)
    with torch.no_grad():
        write_int4(tmp_path, reference, layout, {"group_size": 32} | settings, kept=kept)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: each.to(dtype) if each.dtype == torch.float32 else each for name, each in tensors.items()},
        tmp_path / "model.safetensors",
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    engine = tools.open_engine(tmp_path, max_model_len=512)
    needs = engine_needs(ModelSection(checkpoint=str(tmp_path), device="cpu", max_model_len=512), on_cpu=True)
    assert needs.rows[0].size_bytes == host_weights.weight_bytes(engine.engine.runner.model)


@needs_half
@pytest.mark.parametrize("store", ["Q4_0", "Q8_0"])
def test_blocks_stay_where_converted_weights_leave_no_room(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], store: str
) -> None:
    reference = reference_of("llama", **BLOCKS_OF_32)
    file = write_model(tmp_path / "model.gguf", reference, store)
    load_dequantized(reference, file)
    held = tools.open_engine(file, max_model_len=512)
    weight_bytes = next(row.size_bytes for row in held.engine.memory if row.name == "weights")
    settings: dict[str, Any] = {"max_model_len": 512, "memory_bytes": weight_bytes + 2**19 + 2**15}
    engine = tools.open_engine(file, **settings)
    assert kinds_of_weights(engine) == {GgmlWeight}
    note = next(row.note for row in engine.engine.memory if row.name == "weights")
    assert "converted at each step, which is slow: held in float16 in two parts" in note
    assert "MiB more" in capfd.readouterr().err
    assert tools.error_of(engine, reference) <= 1e-4


@needs_half
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_a_weight_beyond_float16_stays_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    reference = reference_of("llama", **BLOCKS_OF_32 | {"tie_word_embeddings": False}).to(torch.bfloat16)
    reference.get_parameter(name).data[0, 0] = 1e5
    reference.save_pretrained(tmp_path)
    engine = tools.open_engine(tmp_path, max_model_len=512)
    assert kinds_of_weights(engine) == {DenseWeight, HalfWeight}
    assert "has a value of magnitude 9" in capfd.readouterr().err
    assert tools.error_of(engine, in_float32(tmp_path)) <= 1e-4


@pytest.mark.parametrize(
    ("settings", "kept"), [({"dtype": "bfloat16"}, True), ({"enable_sleep_mode": True}, True), ({}, False)]
)
def test_other_types_and_engines_that_sleep_keep_what_they_load(
    tmp_path: Path, settings: dict[str, Any], kept: bool
) -> None:
    file = write_model(tmp_path / "model.gguf", reference_of("llama", **BLOCKS_OF_32), "Q8_0")
    engine = tools.open_engine(file, max_model_len=512, **settings)
    assert (kinds_of_weights(engine) == {GgmlWeight}) == kept


@pytest.mark.parametrize(
    ("limits", "full", "usual"), [({}, 1, 16), ({"max_num_seqs": 3}, 3, 0), ({"max_model_len": 300}, 1, 16)]
)
def test_default_memory_is_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], full: int, usual: int
) -> None:
    """Pages for `full` whole contexts, or for `usual` sequences of 1,024 tokens, and nearly no more."""
    from meltcore.engine.worker import loading

    monkeypatch.setattr(loading, "_HOST_LEAST_BYTES", 0)
    file = write_model(tmp_path / "model.gguf", reference_of("llama", **BLOCKS_OF_32), "Q8_0")
    asked: dict[str, Any] = {"max_num_seqs": None, "memory_bytes": None} | limits
    engine = tools.open_engine(file, **asked).engine
    length = engine.max_model_len
    tokens = max(full * length, usual * min(length, 1024))
    # A MiB more or less, and slots for penalties, which need memory in proportion.
    assert tokens <= engine.pool.total * 64 <= tokens + 2**22
    monkeypatch.setattr(loading, "_HOST_LEAST_BYTES", 2**28)
    assert sum(row.size_bytes for row in tools.open_engine(file, **asked).engine.memory) <= Size(2**28)
